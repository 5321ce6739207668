"""What a local cluster gives its children, with a script in the place of each service."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from manylora.local import cluster as local_cluster
from manylora.local.cluster import ClusterOptions, LocalCluster

SERVE = (
    "import json, os, time;"
    "print(json.dumps({'ready': True, 'address': 'a:1', 'omp': os.environ.get('OMP_WAIT_POLICY')}), flush=True);"
    "time.sleep(60)"
)


@pytest.mark.parametrize(("by_user", "seen"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
async def test_workers_threads_sleep_while_they_wait(
    by_user: str | None, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connected(self: LocalCluster) -> None: ...

    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if by_user is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", by_user)
    monkeypatch.setattr(local_cluster, "_python", lambda module: [sys.executable, "-c", SERVE])
    monkeypatch.setattr(LocalCluster, "wait_connected", connected)
    options = ClusterOptions(model=tmp_path, model_name="m", data=tmp_path / "data", workers=2, etcd="127.0.0.1:1")
    async with LocalCluster(options) as cluster:
        got = {name: child.ready["omp"] for name, child in cluster.children.items()}
    assert got == {"scheduler": by_user, "router-0": by_user, "worker-0": seen, "worker-1": seen}


@pytest.mark.parametrize(
    ("options", "num_cores", "services", "workers", "engines"),
    [
        ({}, 2, set(), {0}, [{1}]),
        ({"workers": 2}, 3, set(), {0}, [{1}, {2}]),
        ({}, 4, {0}, {0}, [{1, 2, 3}]),
        ({"threads": 1}, 4, {0, 1, 2}, {0, 1, 2}, [{3}]),
        ({}, 16, {0, 1, 2, 3}, {0, 1, 2, 3}, [set(range(4, 16))]),
        ({"threads": 3}, 8, {0, 1, 2, 3, 4}, {0, 1, 2, 3, 4}, [{5, 6, 7}]),
        ({"workers": 2}, 8, {0, 1}, {0, 1}, [{2, 3, 4}, {5, 6, 7}]),
        ({}, 1, set(), set(), [set()]),
        ({"workers": 2}, 2, set(), set(), [set(), set()]),
        ({"threads": 2}, 2, set(), set(), [set()]),
        ({"own_cores": False}, 2, set(), set(), [set()]),
        ({"device": "cuda"}, 8, set(), set(), [set()]),
        ({"worker_flags": ("--engine=fake",)}, 8, set(), set(), [set()]),
    ],
)
def test_engines_on_the_cpu_get_cores_that_the_services_leave(
    options: dict[str, Any],
    num_cores: int,
    services: set[int],
    workers: set[int],
    engines: list[set[int]],
    tmp_path: Path,
) -> None:
    cluster = ClusterOptions(model=tmp_path, model_name="m", data=tmp_path, **options)
    cores = local_cluster._shared_out(cluster, range(num_cores))
    if sys.platform == "linux":
        assert (cores.services, cores.workers, list(cores.engines)) == (services, workers, engines)
    else:
        assert not cores.services
        assert not cores.workers


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"workers": 2, "device": "cuda:0,cuda:1"}, [None, None]),
        ({"workers": 2, "device": "cuda"}, ["512", "512"]),
        ({"workers": 2, "device": "cuda", "kv_cache_mb": 64}, ["64", "64"]),
        ({"workers": 1, "device": "cuda"}, [None]),
    ],
)
def test_workers_that_share_a_device_do_not_each_take_all_of_it(
    options: dict[str, Any], seen: list[str | None], tmp_path: Path
) -> None:
    cluster = LocalCluster(ClusterOptions(model=tmp_path, model_name="m", data=tmp_path, etcd="127.0.0.1:1", **options))
    commands = [cluster._worker_command(index, {}) for index in range(options["workers"])]
    flags = [dict(flag.partition("=")[::2] for flag in command) for command in commands]
    assert [each.get("--kv-cache-mb") for each in flags] == seen
