"""What a local cluster gives its children, with a script in the place of each service."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from manylora.local import cluster as local_cluster
from manylora.local.cluster import ClusterFailed, ClusterOptions, LocalCluster
from manylora_router.config import RouterConfig
from manylora_shared.process.config import parse
from manylora_worker.config import WorkerConfig

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
    monkeypatch.setattr(LocalCluster, "_find_etcd", connected)
    options = ClusterOptions(model=tmp_path, model_name="m", data=tmp_path / "data", workers=2, etcd="127.0.0.1:1")
    async with LocalCluster(options) as cluster:
        got = {name: child.ready["omp"] for name, child in cluster.children.items()}
    assert got == {"scheduler": by_user, "router-0": by_user, "worker-0": seen, "worker-1": seen}


ENDS = (
    "import json, os, signal, sys, time\n"
    "def end(*_):\n"
    "    with open(os.environ['ENDED'], 'a') as file: file.write(sys.argv[1] + '\\n')\n"
    "    sys.exit()\n"
    "signal.signal(signal.SIGTERM, end)\n"
    "print(json.dumps({'ready': True, 'address': 'a:1'}), flush=True)\n"
    "time.sleep(60)"
)


async def test_what_others_need_ends_behind_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def connected(self: LocalCluster) -> None: ...

    monkeypatch.setenv("ENDED", str(tmp_path / "ended"))
    monkeypatch.setattr(local_cluster, "_python", lambda module: [sys.executable, "-c", ENDS, module])
    monkeypatch.setattr(LocalCluster, "wait_connected", connected)
    monkeypatch.setattr(LocalCluster, "_find_etcd", connected)
    options = ClusterOptions(model=tmp_path, model_name="m", data=tmp_path / "data", etcd="127.0.0.1:1")
    async with LocalCluster(options):
        pass
    ended = (tmp_path / "ended").read_text().split()
    assert sorted(ended[:2]) == ["manylora_router", "manylora_worker"]
    assert ended[2:] == ["manylora_scheduler"]


@pytest.mark.parametrize(
    ("options", "cores", "threads"),
    [({}, 1, 1), ({}, 2, 1), ({}, 16, 12), ({"workers": 2}, 2, 1), ({"workers": 2}, 8, 3), ({"threads": 3}, 2, 3)],
)
def test_engines_leave_a_quarter_of_the_cores_to_the_services(
    options: dict[str, Any], cores: int, threads: int, tmp_path: Path
) -> None:
    cluster = ClusterOptions(model=tmp_path, model_name="m", data=tmp_path, **options)
    assert local_cluster._threads(cluster, cores) == threads


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


def test_what_up_is_told_of_workers_reaches_them(tmp_path: Path) -> None:
    told: dict[str, Any] = {
        "sequence_slots": 8,
        "draft_model": "/small",
        "kv_cache_dtype": "fp8",
        "device_adapter_mb": 64,
        "host_adapter_mb": 128,
        "adapter_cache_mb": 512,
        "drain_s": 0.0,
        "tensor_parallel": 2,
        "model_aliases": ("acme/a", "b"),
    }
    cluster = LocalCluster(ClusterOptions(model=tmp_path, model_name="m", data=tmp_path, etcd="127.0.0.1:1", **told))
    config = parse(WorkerConfig, cluster._worker_command(0, {})[3:], {})
    assert {name: getattr(config, name) for name in told} == told


def test_what_up_is_told_of_answers_reaches_routers(tmp_path: Path) -> None:
    told = ClusterOptions(
        model=tmp_path,
        model_name="m",
        data=tmp_path,
        etcd="127.0.0.1:1",
        generation_config="none",
        tool_parser="qwen-coder",
        reasoning_parser="think",
    )
    config = parse(RouterConfig, LocalCluster(told)._router_command(0, {})[3:], {})
    assert (config.generation_config, config.tool_parser, config.reasoning_parser) == ("none", "qwen-coder", "think")


async def test_schedulers_stand_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def connected(self: LocalCluster) -> None: ...

    monkeypatch.setattr(local_cluster, "_python", lambda module: [sys.executable, "-c", SERVE])
    monkeypatch.setattr(LocalCluster, "wait_connected", connected)
    monkeypatch.setattr(LocalCluster, "_find_etcd", connected)
    options = ClusterOptions(model=tmp_path, model_name="m", data=tmp_path / "data", schedulers=2, etcd="127.0.0.1:1")
    async with LocalCluster(options) as cluster:
        assert [name for name in cluster.children if "scheduler" in name] == ["scheduler", "scheduler-1"]
    commands = [cluster._scheduler_command(name, {}) for name in ("scheduler", "scheduler-1")]
    assert ["--scheduler-id=scheduler-1" in command for command in commands] == [False, True]
    assert all("--lease-ttl-s=2" in command for command in commands)


@pytest.mark.parametrize(
    ("etcd", "message"),
    [
        ("127.0.0.1:1", "no etcd answers at 127.0.0.1:1"),
        ("http://127.0.0.1:1/,127.0.0.1:2", "no etcd answers at 127.0.0.1:1,127.0.0.1:2"),
        ("nowhere", "--etcd: address 'nowhere': host:port is expected"),
    ],
)
async def test_an_etcd_that_does_not_answer_ends_the_start_in_seconds(etcd: str, message: str, tmp_path: Path) -> None:
    cluster = LocalCluster(ClusterOptions(model=tmp_path, model_name="m", data=tmp_path, etcd=etcd))
    with pytest.raises(ClusterFailed, match=message):
        await cluster.start()
    assert not cluster.children


def test_the_first_router_serves_http_where_it_is_told_to(tmp_path: Path) -> None:
    cluster = LocalCluster(ClusterOptions(model=tmp_path, model_name="m", data=tmp_path, http_port=7080, routers=2))
    found = [parse(RouterConfig, cluster._router_command(index, {})[3:], {}).http_listen for index in (0, 1)]
    assert found == ["127.0.0.1:7080", "127.0.0.1:0"]
    again = parse(RouterConfig, cluster._router_command(1, {"address": "127.0.0.1:1", "http": "127.0.0.1:2"})[3:], {})
    assert (again.listen, again.http_listen) == ("127.0.0.1:1", "127.0.0.1:2")
    without = LocalCluster(ClusterOptions(model=tmp_path, model_name="m", data=tmp_path))
    assert parse(RouterConfig, without._router_command(0, {})[3:], {}).http_listen == ""
