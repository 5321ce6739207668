"""The cluster that things are done to: two routers, two schedulers, two workers, etcd. Each is a process that is
started again when it ends, as systemd or Kubernetes would.

Where it can, each process has a network of its own, and etcd's data lie on a small disk of their own.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from manylora.client import Client, RequestFailed, RetryPolicy
from manylora.demo import BASE_FOLDER, BASE_NAME, adapter_folder
from manylora.local.child import Child
from manylora.local.cluster import ClusterOptions, LocalCluster
from manylora_shared.coordination import binary
from manylora_shared.coordination.base import StoreUnavailable
from manylora_shared.coordination.etcd import EtcdStore
from manylora_shared.process import config

from bench.chaos.network import Networks

ETCD = "etcd"
SERVICES = ("scheduler", "scheduler-1", "worker-0", "worker-1", "router-0", "router-1")
WORKERS, ROUTERS = ("worker-0", "worker-1"), ("router-0", "router-1")
TENANTS = "tenant_id: busy\n---\ntenant_id: calm\n"
ADAPTER = "upper"
ETCD_QUOTA_MB = 24
_DISK_MB = 256
_WHOLE_S = 90.0
ONCE = RetryPolicy(max_attempts=1)
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")


@dataclass(frozen=True)
class Setting:
    """networks, has_disk: they need root. clocks: services' wall clocks can be set (libfaketime)."""

    networks: bool = True
    has_disk: bool = True
    clocks: bool = False
    is_fake: bool = False  # workers' model, for machines on which nothing is to be computed


class ChaosCluster:
    def __init__(self, folder: Path, setting: Setting) -> None:
        self.setting = setting
        self._folder = folder
        self._networks = Networks((ETCD, *SERVICES)) if setting.networks else None
        self._etcd: Child | None = None
        self._etcd_at = ""
        self._data = folder / "etcd"
        self._is_mounted = False
        self.local: LocalCluster | None = None
        self._operator: Client | None = None

    # -- its life

    async def __aenter__(self) -> Self:
        if self._networks is not None:
            self._networks.open()
            config.set_default("MANYLORA_ALLOW_PLAIN_TEXT", "true")  # what services say stays on this machine's bridge
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _start(self) -> None:
        self._data.mkdir(parents=True)
        if self.setting.has_disk:
            await _run("mount", "-t", "tmpfs", "-o", f"size={_DISK_MB}m", "none", str(self._data))
            self._is_mounted = True
        await self._start_etcd()
        options = ClusterOptions(
            model=BASE_FOLDER,
            model_name=BASE_NAME,
            data=self._folder / "cluster",
            etcd=self._etcd_at,
            workers=len(WORKERS),
            routers=len(ROUTERS),
            schedulers=2,
            kv_cache_mb=64,
            threads=1,
            worker_module="manylora_sim.worker" if self.setting.is_fake else "manylora_worker",
            command_of=self._command_of,
        )
        self.local = LocalCluster(options)
        await self.local.start()
        self._operator = self.client(tenant="")
        await self.operator.tenants.apply("tenant_id: busy\n")
        await self.operator.tenants.apply("tenant_id: calm\n")
        if not self.setting.is_fake:
            for tenant in ("busy", "calm"):
                await self.operator.adapters.add(tenant, ADAPTER, adapter_folder(ADAPTER))
        await self.whole()

    async def close(self) -> None:
        if self._operator is not None:
            await self._operator.close()
        if self.local is not None:
            await self.local.stop()
        if self._etcd is not None:
            await self._etcd.stop(2.0)
        if self._is_mounted:
            await _run("umount", "--lazy", str(self._data))
        if self._networks is not None:
            self._networks.close()

    async def _start_etcd(self) -> None:
        host = "127.0.0.1" if self._networks is None else self._networks.address(ETCD)
        self._etcd_at = f"{host}:{binary.free_port() if self._networks is None else 2379}"
        flags = binary.member_flags(self._data / "data", self._etcd_at)
        command = [str(binary.find_etcd()), *flags, f"--quota-backend-bytes={ETCD_QUOTA_MB << 20}"]
        if self._networks is not None:
            command = self._networks.command(ETCD, command)
        self._etcd = Child(
            ETCD,
            lambda ready: command,
            log_path=self._folder / "etcd.log",
            notify=lambda line: None,
            start_timeout_s=binary.START_TIMEOUT_S,
            probe=self._etcd_answers,
            environment={"PATH": os.environ["PATH"]},
        )
        await self._etcd.start()

    async def _etcd_answers(self) -> bool:
        store = EtcdStore([self._etcd_at])
        try:
            await store.get("manylora/ready")
        except StoreUnavailable:
            return False
        finally:
            await store.close()
        return True

    def _command_of(self, name: str, command: list[str]) -> list[str]:
        if self.setting.clocks and not (self.setting.is_fake and name in WORKERS):  # a fake's pace is time.sleep's
            self._clock_file(name).write_text("+0")
            command = ["env", f"LD_PRELOAD={FAKETIME}", f"FAKETIME_TIMESTAMP_FILE={self._clock_file(name)}",
                       "FAKETIME_DONT_FAKE_MONOTONIC=1", "FAKETIME_CACHE_DURATION=1", *command]  # fmt: skip
        if self._networks is None:
            return command
        own = f"listen={self._networks.address(name)}:"
        return self._networks.command(name, [word.replace("listen=127.0.0.1:", own) for word in command])

    # -- what it is

    @property
    def operator(self) -> Client:
        assert self._operator is not None
        return self._operator

    @property
    def _running(self) -> LocalCluster:
        assert self.local is not None
        return self.local

    @property
    def key(self) -> str:
        return self._running.key_file.read_text().strip()

    @property
    def routers(self) -> list[str]:
        return self._running.router_addresses

    def client(self, *, tenant: str, routers: Sequence[str] = (), retry: RetryPolicy | None = None) -> Client:
        """retry: None: the client's own."""
        key = self.key
        at = ",".join(routers or self.routers)
        return Client(at, key=key, tenant=tenant) if retry is None else Client(at, key=key, tenant=tenant, retry=retry)

    async def epoch(self) -> int:
        return (await self.operator.status()).scheduler.epoch

    async def leader(self) -> str:
        address = (await self.operator.status()).scheduler.address
        return next(name for name, child in self._running.children.items() if child.ready.get("address") == address)

    async def busiest(self) -> str:
        """Of the workers."""
        workers = (await self.operator.status()).workers
        return max(workers, key=lambda worker: worker.running).worker_id

    async def standby(self) -> str:
        leader = await self.leader()
        return next(name for name in ("scheduler", "scheduler-1") if name != leader)

    async def whole(self) -> None:
        """Returns when every router reaches the leader, and it both workers."""
        async with asyncio.timeout(_WHOLE_S):
            for address in self.routers:
                async with self.client(tenant="", routers=[address], retry=ONCE) as client:
                    await _until(partial(_is_whole, client))

    # -- what is done to it

    def signal(self, name: str, number: signal.Signals) -> None:
        child = self._etcd if name == ETCD else self._running.children[name]
        assert child is not None
        with suppress(ProcessLookupError):
            os.kill(child.pid, number)

    def cut(self, one: str, *others: str) -> None:
        assert self._networks is not None
        for other in others:
            self._networks.cut(one, other)

    def isolate(self, name: str) -> None:
        assert self._networks is not None
        self._networks.isolate(name)

    def mend(self) -> None:
        if self._networks is not None:
            self._networks.mend()

    def _clock_file(self, name: str) -> Path:
        return self._folder / f"clock-{name}"

    def set_clock(self, name: str, seconds: int) -> None:
        """So much later (or earlier) than it is; the monotonic clock stays."""
        self._clock_file(name).write_text(f"{seconds:+d}")

    async def fill_quota(self) -> None:
        """Until etcd takes no more."""
        store = EtcdStore([self._etcd_at])
        try:
            with suppress(StoreUnavailable):
                for number in range(4 * ETCD_QUOTA_MB):
                    await store.put(f"/filler/{number}", os.urandom(1 << 19))
                raise RuntimeError("etcd takes more than its quota")
        finally:
            await store.close()

    async def clear_quota(self) -> None:
        """What an operator does (docs/RUNBOOK.md)."""
        await self._etcdctl("del", "--prefix", "/filler/")
        told = json.loads(await self._etcdctl("get", "/", "-w", "json"))
        await self._etcdctl("compaction", str(told["header"]["revision"]), may_fail=True)
        await self._etcdctl("defrag")
        await self._etcdctl("alarm", "disarm")

    async def fill_disk(self) -> None:
        """And let etcd write on, until it cannot."""
        with suppress(OSError):
            await asyncio.to_thread((self._data / "filler").write_bytes, bytes(_DISK_MB << 20))
        await self.fill_quota()

    async def clear_disk(self) -> None:
        (self._data / "filler").unlink(missing_ok=True)
        async with asyncio.timeout(_WHOLE_S):
            await _until(self._etcd_answers)
        await self.clear_quota()

    async def _etcdctl(self, *arguments: str, may_fail: bool = False) -> str:
        beside = binary.find_etcd().parent / "etcdctl"
        tool = str(beside) if beside.exists() else shutil.which("etcdctl")
        if tool is None:
            raise OSError("etcdctl is not installed (Debian: etcd-client)")
        flags = (f"--endpoints={self._etcd_at}", "--command-timeout=20s")
        return await _run(tool, *flags, *arguments, may_fail=may_fail)


async def _run(*command: str, may_fail: bool = False) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "ETCDCTL_API": "3"},
    )
    told, problem = await process.communicate()
    if process.returncode and not may_fail:
        raise OSError(f"{' '.join(command)}: {problem.decode().strip()}")
    return told.decode()


async def _until(holds: Callable[[], Awaitable[bool]]) -> None:
    while not await holds():  # noqa: ASYNC110 - nothing tells when it does
        await asyncio.sleep(0.05)


async def _is_whole(client: Client) -> bool:
    try:
        status = await client.status(timeout_s=2)
    except RequestFailed:
        return False
    connected = {w.worker_id for w in status.workers if w.connected and not w.draining}
    return status.scheduler.reachable and connected >= set(WORKERS)


Act = Callable[[ChaosCluster], Awaitable[None]]
