"""A whole cluster on this machine: etcd, scheduler, routers and workers as supervised child processes, on loopback.

Owns them and the data folder: etcd/, adapters/, audit/, logs/, audit.key, operator.key (which clients of the same user
find by the router's address), peer.secret, encryption.keys and lock. What dies is started again with its id, data and
address. Children end with their parent.
"""

from __future__ import annotations

import asyncio
import datetime
import fcntl
import functools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TextIO

from manylora_shared.coordination import binary, keys
from manylora_shared.coordination.base import StoreUnavailable
from manylora_shared.ids import DEFAULT_POOL
from manylora_shared.process import config
from manylora_shared.process.cores import num_cores
from manylora_shared.process.settings import ServiceSettings
from manylora_shared.transport.tls import TlsFiles

from manylora.client import Client, ClusterStatus, RequestFailed
from manylora.client.credentials import read_key, remove_note, write_note
from manylora.local import certs
from manylora.local.child import Child, ChildFailed, Notify

ETCD = "etcd"
WORKER_MODULE = "manylora_worker"
SCHEDULER_MODULE = "manylora_scheduler"
SCHEDULER = "scheduler"
LOCAL_ENCRYPTION = "local"
CONNECT_TIMEOUT_S = 60.0
ETCD_TIMEOUT_S = 5.0  # of one that is given
POLL_S = 0.05
LEDGER = "usage.sqlite"


class ClusterFailed(Exception):
    """The message says which part, and why."""


# How a given etcd is reached: the services read them too.
_ETCD_VARIABLES = tuple(
    f"{config.PREFIX}{name}"
    for name in ("ETCD_TLS_CA", "ETCD_TLS_CERT", "ETCD_TLS_KEY", "ETCD_LOGIN_FILE", "ALLOW_PLAIN_TEXT")
)
_STANDBY_TTL_S = 2  # of a leader's lease where another stands by: the least that etcd takes
_SHARED_KV_CACHE_MB = 512  # of each worker, where several share a device


@dataclass(frozen=True)
class PoolModel:
    """A further pool's."""

    pool: str
    model: Path | str
    model_name: str


@dataclass(frozen=True)
class ClusterOptions:
    """What `manylora up` takes. Empty strings and None leave a setting to the service."""

    model: Path | str
    model_name: str
    data: Path
    workers: int = 1  # of each pool
    pools: tuple[PoolModel, ...] = ()  # besides the default one
    routers: int = 1
    device: str = "cpu"  # several, comma-separated, are dealt to the workers in turn
    port: int = 0  # of the first router
    http_port: int | None = None  # of its OpenAI HTTP API; None: no router has one
    etcd: str = ""  # host:port[,host:port], with or without http://; empty: one is started
    dtype: str = ""
    model_aliases: tuple[str, ...] = ()
    generation_config: str = ""
    tool_parser: str = ""
    reasoning_parser: str = ""
    quantization: str = "none"
    kv_cache_mb: int | None = None
    kv_cache_dtype: str = "auto"
    max_lora_rank: int | None = None
    max_model_len: int | None = None
    draft_model: str = ""  # of the first pool
    tls: bool = False
    schedulers: int = 1
    sequence_slots: int | None = None
    device_adapter_mb: int | None = None
    host_adapter_mb: int | None = None
    adapter_cache_mb: int | None = None
    tensor_parallel: int = 1
    adapter_store: str = ""  # s3://BUCKET/PREFIX; empty: a folder in `data`
    adapter_store_access: str = ""
    adapter_sources: str = ""
    encryption: str = ""  # as --encryption of the services, or `local`: a file in `data`; empty: nothing is sealed
    ledger: str = ""  # as --ledger of the router; empty: a file in `data`; none: usage is not kept
    prices: str = ""
    drain_s: float | None = None
    threads: int | None = None  # torch's, a worker; None: three quarters of the cores, shared out
    worker_module: str = WORKER_MODULE
    """What `python -m` runs; tests and benchmarks give another."""
    scheduler_module: str = SCHEDULER_MODULE
    worker_flags: tuple[str, ...] = ()
    """Further settings, as flags; for tests and benchmarks."""
    router_flags: tuple[str, ...] = ()
    scheduler_flags: tuple[str, ...] = ()
    command_of: Callable[[str, list[str]], list[str]] = lambda name, command: command
    """What a service's command becomes; for tests and benchmarks, which start one elsewhere."""
    start_timeout_s: float = 900.0  # of each process: a large model takes its time to load
    grace_s: float = 10.0  # beyond drain_s


class LocalCluster:
    """notify: told, in a line each, of what starts, dies and is started again."""

    def __init__(self, options: ClusterOptions, *, notify: Notify = lambda line: None) -> None:
        self.options = options
        self.children: dict[str, Child] = {}
        self._notify = notify
        self._data = options.data.absolute()
        self._lock: TextIO | None = None
        self._etcd = _endpoints(options.etcd)

    @property
    def router_addresses(self) -> list[str]:
        return [str(c.ready["address"]) for name, c in self.children.items() if name.startswith("router-")]

    @property
    def router(self) -> str:
        """The first one's address."""
        return self.router_addresses[0]

    @property
    def http_addresses(self) -> list[str]:
        """The routers', of the OpenAI HTTP API."""
        return [str(child.ready["http"]) for child in self.children.values() if "http" in child.ready]

    @property
    def metrics_addresses(self) -> dict[str, str]:
        """Of every service, by its name."""
        return {name: str(child.ready["metrics"]) for name, child in self.children.items() if "metrics" in child.ready}

    @property
    def etcd_address(self) -> str:
        return self._etcd

    @property
    def adapter_store(self) -> Path:
        return self._data / "adapters"

    @property
    def key_file(self) -> Path:
        return self._data / "operator.key"

    @property
    def peer_secret_file(self) -> Path:
        return self._data / "peer.secret"

    @property
    def tls_folder(self) -> Path:
        return self._data / "tls"

    @property
    def ca_file(self) -> Path | None:
        return self.tls_folder / certs.CA if self.options.tls else None

    @property
    def tls_ca(self) -> str:
        """For a client."""
        return str(self.ca_file or "")

    @property
    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self.children.items()}

    def describe(self) -> dict[str, Any]:
        """The line that `manylora up` prints."""
        return {
            "ready": True,
            "router": self.router,
            "routers": self.router_addresses,
            **({"http": self.http_addresses[0]} if self.http_addresses else {}),
            "metrics": self.metrics_addresses,
            "etcd": self._etcd,
            "data": str(self._data),
            "key_file": str(self.key_file),
            "pids": self.pids,
        }

    async def start(self) -> None:
        """Returns when every router serves, with all workers behind it. Raises ClusterFailed: nothing runs any more."""
        self._take_lock()
        try:
            await self._start_all()
        except BaseException as error:
            await asyncio.shield(self.stop())
            if isinstance(error, ChildFailed | binary.EtcdNotFound | OSError):
                raise ClusterFailed(str(error)) from error
            raise

    async def stop(self) -> None:
        """Idempotent. What others need ends behind them, so that none misses it."""
        self._forget_key()
        grace_s = self.options.grace_s + (self.options.drain_s or 0)
        last = [name for name in self.children if name.startswith(SCHEDULER)]
        first = [name for name in self.children if name not in (*last, ETCD)]
        for names in (first, last, [ETCD] if ETCD in self.children else []):
            await asyncio.gather(*(self.children[name].stop(grace_s) for name in names))
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def kill(self) -> None:
        """`stop` still has to run."""
        for child in self.children.values():
            child.end_at_once()

    async def wait_connected(self, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Raises ClusterFailed."""
        key = read_key(self.key_file)
        for address in self.router_addresses:
            async with Client(address, key=key, retry=None, tls_ca=self.tls_ca) as client:
                seen = "it does not answer"
                try:
                    async with asyncio.timeout(timeout_s):
                        while True:
                            seen = await self._what_is_missing(client)
                            if not seen:
                                break
                            await asyncio.sleep(POLL_S)
                except TimeoutError:
                    reason = f"the router at {address} is not ready after {timeout_s:g} s: {seen}"
                    raise ClusterFailed(reason) from None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _take_lock(self) -> None:
        try:
            for folder in ("adapters", "logs"):
                (self._data / folder).mkdir(parents=True, exist_ok=True)
            lock = (self._data / "lock").open("w")
        except OSError as error:
            raise ClusterFailed(f"{self._data}: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise ClusterFailed(f"{self._data} is in use by another cluster; give another --data") from None
        self._lock = lock

    async def _start_all(self) -> None:
        if self.options.tls:
            self._make_certificates()
        if self._etcd:
            await self._find_etcd()
        else:
            await self._start_etcd()
        names = [SCHEDULER if i == 0 else f"{SCHEDULER}-{i}" for i in range(self.options.schedulers)]
        starting = [self._service(name, functools.partial(self._scheduler_command, name)) for name in names]
        starting += [
            self._service(name, functools.partial(self._worker_command, i), worker_environment())
            for i, (name, _) in enumerate(_workers(self.options))
        ]
        starting += [
            self._service(f"router-{i}", functools.partial(self._router_command, i))
            for i in range(self.options.routers)
        ]
        devices = ", ".join(_devices(self.options))
        told = "auto (cuda where torch sees one, else cpu)" if devices == "auto" else devices
        self._notify(f"starting {', '.join(child.name for child in starting)}; device: {told}")
        async with _FirstFailure(), asyncio.TaskGroup() as tasks:
            for child in starting:
                tasks.create_task(child.start())
        await self.wait_connected()
        self._note_key()

    def _note_key(self) -> None:
        try:
            for address in self.router_addresses:
                write_note(address, self.key_file, self.ca_file)
        except OSError as error:
            self._notify(
                f"clients will not find the key by themselves ({error}): set MANYLORA_KEY from {self.key_file}"
            )

    def _forget_key(self) -> None:
        try:
            for child in self.children.values():
                if "address" in child.ready:
                    remove_note(str(child.ready["address"]), self.key_file)
        except OSError as error:
            self._notify(f"the note of the key file stays behind: {error}")

    async def _find_etcd(self) -> None:
        try:
            settings = self._etcd_settings()
            async with asyncio.timeout(ETCD_TIMEOUT_S):
                while True:
                    if await _etcd_answers(settings):
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise ClusterFailed(f"no etcd answers at {self._etcd}; without --etcd one is started") from None
        except ValueError as error:
            raise ClusterFailed(f"--etcd: {error}") from None

    async def _start_etcd(self) -> None:
        port = binary.free_port()
        self._etcd = f"127.0.0.1:{port}"
        flags = binary.member_flags(self._data / ETCD, self._etcd, self._tls_files)
        command = [str(binary.find_etcd()), *flags]
        child = Child(
            ETCD,
            lambda ready: command,
            log_path=self._log(ETCD),
            notify=self._notify,
            start_timeout_s=binary.START_TIMEOUT_S,
            probe=functools.partial(_etcd_answers, self._etcd_settings()),
            environment={"PATH": os.defpath},  # none of the ETCD_* that configure another etcd
        )
        self.children[ETCD] = child
        self._notify("starting etcd")
        await child.start()

    def _service(
        self,
        name: str,
        command: Callable[[Mapping[str, Any]], list[str]],
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        child = Child(
            name,
            lambda ready: self.options.command_of(name, command(ready)),
            log_path=self._log(name),
            notify=self._notify,
            start_timeout_s=self.options.start_timeout_s,
            environment=environment,
        )
        self.children[name] = child
        return child

    def _scheduler_command(self, name: str, ready: Mapping[str, Any]) -> list[str]:
        return [
            *_python(self.options.scheduler_module),
            *self._common("127.0.0.1:0", ready),
            f"--scheduler-id={name}",
            *([f"--lease-ttl-s={_STANDBY_TTL_S}"] if self.options.schedulers > 1 else []),
            *self.options.scheduler_flags,
        ]

    def _worker_command(self, index: int, ready: Mapping[str, Any]) -> list[str]:
        options = self.options
        name, pool = _workers(options)[index]
        devices = _devices(options)
        kv_cache_mb = options.kv_cache_mb
        if kv_cache_mb is None and len(_workers(options)) > len(devices):
            kv_cache_mb = _SHARED_KV_CACHE_MB  # a worker that is told nothing takes all that its GPU has left
        settings = {
            "worker-id": name,
            "pool": pool.pool,
            "model": pool.model,
            "model-name": pool.model_name,
            "model-alias": ",".join(options.model_aliases) if pool.pool == DEFAULT_POOL else "",
            "device": devices[index % len(devices)],
            "dtype": options.dtype,
            "quantization": options.quantization,
            "adapter-store": options.adapter_store or self.adapter_store,
            "adapter-store-access": options.adapter_store_access,
            "adapter-cache": self._data / "adapter-cache" if options.adapter_store else None,
            "kv-cache-mb": kv_cache_mb,
            "kv-cache-dtype": options.kv_cache_dtype,
            "max-lora-rank": options.max_lora_rank,
            "max-model-len": options.max_model_len,
            "draft-model": options.draft_model if pool.pool == DEFAULT_POOL else "",
            "sequence-slots": options.sequence_slots,
            "device-adapter-mb": options.device_adapter_mb,
            "host-adapter-mb": options.host_adapter_mb,
            "adapter-cache-mb": options.adapter_cache_mb,
            "tensor-parallel": options.tensor_parallel,
            "drain-s": options.drain_s,
            "threads": _threads(options, num_cores()),
        }
        flags = [f"--{name}={value}" for name, value in settings.items() if value not in ("", None)]
        flags += self._encryption_flags()
        return [
            *_python(options.worker_module),
            *self._common("127.0.0.1:0", ready),
            *flags,
            *options.worker_flags,
        ]

    def _router_command(self, index: int, ready: Mapping[str, Any]) -> list[str]:
        port = self.options.port if index == 0 else 0
        listen = str(ready.get("address") or f"127.0.0.1:{port}")
        http = ready.get("http")
        if http is None and self.options.http_port is not None:
            http = f"127.0.0.1:{self.options.http_port if index == 0 else 0}"
        settings = {
            "router-id": f"router-{index}",
            "model": str(self.options.model),
            "pool-models": ",".join(f"{each.pool}={each.model}" for each in self.options.pools),
            "adapter-store": self.options.adapter_store or str(self.adapter_store),
            "adapter-store-access": self.options.adapter_store_access,
            "adapter-sources": self.options.adapter_sources,
            "generation-config": self.options.generation_config,
            "tool-parser": self.options.tool_parser,
            "reasoning-parser": self.options.reasoning_parser,
            "http-listen": http or "",
            "drain-s": "" if self.options.drain_s is None else f"{self.options.drain_s:g}",
            "operator-key-file": str(self.key_file) if index == 0 else "",
            "audit-log": str(self._data / "audit"),
            "audit-key-file": str(self._data / "audit.key"),
            "ledger": self._ledger(),
            "ledger-log": str(self._data / "ledger-log") if self.options.ledger.startswith("postgres") else "",
            "prices": self.options.prices,
        }
        flags = [f"--{name}={value}" for name, value in settings.items() if value] + self._encryption_flags()
        return [
            *_python("manylora_router"),
            *self._common(listen, ready),
            *flags,
            *self.options.router_flags,
        ]

    def _ledger(self) -> str:
        if self.options.ledger == "none":
            return ""
        return self.options.ledger or f"sqlite:{self._data / LEDGER}"

    def _common(self, listen: str, ready: Mapping[str, Any]) -> list[str]:
        return [
            f"--listen={listen}",
            f"--etcd={self._etcd}",
            f"--peer-secret-file={self.peer_secret_file}",
            f"--metrics-listen={ready.get('metrics') or '127.0.0.1:0'}",
            *self._tls_flags(),
        ]

    def _encryption_flags(self) -> list[str]:
        """Of routers and workers."""
        named = self.options.encryption
        if named == LOCAL_ENCRYPTION:
            named = f"{LOCAL_ENCRYPTION}:{self._data / 'encryption.keys'}"
        return [f"--encryption={named}"] if named else []

    def _tls_flags(self) -> list[str]:
        if not self.options.tls:
            return []
        named = {"tls-cert": certs.CERT, "tls-key": certs.KEY, "tls-ca": certs.CA}
        found = [f"--{flag}={self.tls_folder / file}" for flag, file in named.items()]
        return found + ([f"--etcd-{flag[2:]}" for flag in found] if not self.options.etcd else [])

    @property
    def _tls_files(self) -> TlsFiles | None:
        folder = self.tls_folder
        return TlsFiles(folder / certs.CERT, folder / certs.KEY, folder / certs.CA) if self.options.tls else None

    def _etcd_settings(self) -> ServiceSettings:
        """As the services have them: of a given etcd by the environment. Raises ValueError."""
        own = [flag for flag in self._tls_flags() if flag.startswith("--etcd-")]
        given = {name: value for name, value in config.environment().items() if name in _ETCD_VARIABLES}
        return config.parse(ServiceSettings, [f"--etcd={self._etcd}", *own], given if self.options.etcd else {})

    def _make_certificates(self) -> None:
        """New ones at every start: they are of this machine alone, and last a year."""
        try:
            certs.make(self.tls_folder, [], datetime.datetime.now(datetime.UTC))
        except (OSError, ValueError) as e:
            raise ClusterFailed(f"no certificate could be made in {self.tls_folder}: {e}") from e

    def _log(self, name: str) -> Path:
        return self._data / "logs" / f"{name}.log"

    async def _what_is_missing(self, client: Client) -> str:
        try:
            await client.wait_until_serving(2.0)
            status = await client.status(timeout_s=2.0)
        except RequestFailed as error:
            return str(error)
        return _incomplete(status, self.options)


def _devices(options: ClusterOptions) -> list[str]:
    return [d.strip() for d in options.device.split(",") if d.strip()] or ["auto"]


def _workers(options: ClusterOptions) -> list[tuple[str, PoolModel]]:
    """By their names."""
    own = PoolModel(DEFAULT_POOL, options.model, options.model_name)
    found = [(f"worker-{i}", own) for i in range(options.workers)]
    return found + [(f"worker-{pool.pool}-{i}", pool) for pool in options.pools for i in range(options.workers)]


def _threads(options: ClusterOptions, cores: int) -> int:
    """Of one process of a worker's engine."""
    return options.threads or max(1, (cores - max(1, cores // 4)) // (len(_workers(options)) * options.tensor_parallel))


def worker_environment() -> Mapping[str, str]:
    # By default OpenMP's threads spin while they wait for each other at the end of every parallel region. Where another
    # process has one of their cores, the others spin for its whole time slice, and a worker of two threads is 10 to 25
    # times slower. Sleeping costs microseconds a region.
    return {"OMP_WAIT_POLICY": "PASSIVE", **config.environment()}


def _incomplete(status: ClusterStatus, options: ClusterOptions) -> str:
    if not status.scheduler.reachable:
        return "it does not reach the scheduler"
    connected = {w.worker_id for w in status.workers if w.connected}
    missing = sorted({name for name, _ in _workers(options)} - connected)
    return f"the scheduler is not connected to {', '.join(missing)}" if missing else ""


def _endpoints(url: str) -> str:
    parts = (part.strip().rpartition("://")[2].rstrip("/") for part in url.split(","))
    return ",".join(part for part in parts if part)


def _python(module: str) -> list[str]:
    return [sys.executable, "-m", module]


async def _etcd_answers(settings: ServiceSettings) -> bool:
    store, _ = settings.etcd_store()
    try:
        await store.get(keys.SCHEDULER_LEADER)
    except StoreUnavailable:
        return False
    finally:
        await store.close()
    return True


class _FirstFailure:
    """Raises the first of a task group's exceptions in the place of all."""

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, BaseExceptionGroup):
            raise error.exceptions[0] from None
