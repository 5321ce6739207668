"""EtcdStore against an etcd with TLS and a login."""

from __future__ import annotations

import asyncio
import datetime
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio
from manylora.local import certs
from manylora_shared.coordination.base import StoreUnavailable
from manylora_shared.coordination.binary import EtcdProcess, start_etcd
from manylora_shared.coordination.etcd import EtcdStore
from manylora_shared.coordination.login import EtcdLogin
from manylora_shared.transport.tls import Tls, TlsFiles

pytestmark = pytest.mark.e2e


def files(folder: Path) -> TlsFiles:
    return TlsFiles(folder / certs.CERT, folder / certs.KEY, folder / certs.CA)


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


@pytest_asyncio.fixture
async def etcd(tmp_path: Path) -> AsyncIterator[EtcdProcess]:
    certs.make(tmp_path / "tls", [], now())
    process = await start_etcd(tmp_path / "etcd", sync_to_disk=False, tls=files(tmp_path / "tls"))
    yield process
    await process.kill()


def login_file(folder: Path, text: str = "manylora:s3cret-word") -> Path:
    path = folder / "etcd.login"
    path.write_text(text)
    path.chmod(0o600)
    return path


async def etcdctl(etcd: EtcdProcess, folder: Path, *arguments: str) -> None:
    tls = files(folder / "tls")
    process = await asyncio.create_subprocess_exec(
        "etcdctl",
        f"--endpoints=https://{etcd.endpoint}",
        *(f"--cacert={tls.ca}", f"--cert={tls.cert}", f"--key={tls.key}"),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"ETCDCTL_API": "3", "PATH": os.environ["PATH"]},
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, output + errors


async def test_it_speaks_tls_and_takes_new_certificates(etcd: EtcdProcess, tmp_path: Path) -> None:
    tls = Tls(files(tmp_path / "tls"))
    store = EtcdStore([etcd.endpoint], tls=tls)
    async with aclosing(store.watch("/k", start_revision=1)) as batches:
        seen = asyncio.ensure_future(anext(batches))
        for count in range(3):
            certs.make(tmp_path / "tls", [], now())
            assert tls.refresh()
            await store.put(f"/k/{count}", b"x")
        assert (await asyncio.wait_for(seen, 60)).events[0].kv.key == "/k/0"
    await store.close()
    certs.make(tmp_path / "foreign", [], now())
    foreign = files(tmp_path / "foreign")
    ours = files(tmp_path / "tls")
    for wrong in (None, Tls(TlsFiles(ca=ours.ca)), Tls(foreign), Tls(TlsFiles(foreign.cert, foreign.key, ours.ca))):
        stranger = EtcdStore([etcd.endpoint], tls=wrong, call_timeout_s=1)
        with pytest.raises(StoreUnavailable):
            await stranger.get("/k/0")
        await stranger.close()


@pytest.mark.skipif(shutil.which("etcdctl") is None, reason="the login is set up by etcdctl")
async def test_a_login_lasts_through_changes_of_password_and_token(etcd: EtcdProcess, tmp_path: Path) -> None:
    for command in (
        "user add root:root-word",
        "user grant-role root root",
        "role add services",
        "role grant-permission services readwrite --prefix=true /manylora/",
        "user add manylora:s3cret-word",
        "user grant-role manylora services",
        "auth enable",
    ):
        await etcdctl(etcd, tmp_path, *command.split())
    tls = Tls(files(tmp_path / "tls"))
    path = login_file(tmp_path)
    store = EtcdStore([etcd.endpoint], tls=tls, login=EtcdLogin(path))
    await store.put("/manylora/a", b"1", lease_id=(lease := await store.grant(60)))
    assert await store.keep_alive(lease) > 0
    with pytest.raises(StoreUnavailable, match="refuses this service: etcdserver: permission denied"):
        await store.get("/elsewhere")
    nobody = EtcdStore([etcd.endpoint], tls=tls)
    with pytest.raises(StoreUnavailable, match="refuses this service"):
        await nobody.get("/manylora/a")
    await nobody.close()
    async with aclosing(store.watch("/manylora/", start_revision=1)) as batches:
        assert (await asyncio.wait_for(anext(batches), 5)).events[0].kv.value == b"1"
        await etcdctl(etcd, tmp_path, "--user=root:root-word", "user", "add", "other:word")  # an older token is stale
        await store.put("/manylora/a", b"2")
        assert (await asyncio.wait_for(anext(batches), 5)).events[0].kv.value == b"2"
    await store.close()
    login_file(tmp_path, "manylora:wrong-word")
    wrong = EtcdStore([etcd.endpoint], tls=tls, login=EtcdLogin(path))
    with pytest.raises(StoreUnavailable, match=r"refuses the login of .*etcd\.login: .*invalid user"):
        await wrong.get("/manylora/a")
    login_file(tmp_path)
    await asyncio.sleep(1.1)
    assert await wrong.get("/manylora/a") is not None
    await wrong.close()


async def test_what_is_no_login_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not `user:password`"):
        EtcdLogin(login_file(tmp_path, "manylora"))
    with pytest.raises(FileNotFoundError):
        EtcdLogin(tmp_path / "none")
