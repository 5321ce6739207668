"""The whole cluster in one SimLoop: real routers, schedulers and workers over a simulated network, store and model.

Owns the processes and their incarnations. A process is a SimNode in which the service's own app runs; killing one cuts
it off from network and store first, so that what its `finally` blocks still do reaches nobody.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import random
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from manylora_router.app import RouterApp
from manylora_router.config import RouterConfig
from manylora_scheduler.app import SchedulerApp
from manylora_scheduler.config import SchedulerConfig
from manylora_scheduler.serving.clock_codec import decode
from manylora_shared.coordination import keys
from manylora_shared.coordination.records import AdapterRecord, ClockIndexRecord
from manylora_shared.ids import (
    DEFAULT_POOL,
    AdapterDigest,
    AdapterName,
    AdapterUid,
    QosClass,
    TenantId,
    digest_of,
    owner_of,
)
from manylora_shared.telemetry import Telemetry
from manylora_shared.tenancy.identity import new_key
from manylora_shared.tenancy.policy import ClassPolicy, TenantPolicy, TenantQuotas
from manylora_sim.adapter_files import MemoryAdapterFiles
from manylora_sim.documents import MemoryDocuments
from manylora_sim.fake_runner import FakeAdapterBackend, FakeRunner, FakeValidator
from manylora_sim.fake_text import FakeText
from manylora_sim.loop import SimLoop, SimNode, SimWallClock
from manylora_sim.loop_runtime import LoopRuntime
from manylora_sim.network import MemoryNetwork, MemoryTransport
from manylora_sim.peers import SIMULATED
from manylora_sim.store import MemoryStore, MemoryStoreServer
from manylora_sim.worker import FakeWorkerConfig
from manylora_worker.app import WorkerApp
from manylora_worker.config import WorkerConfig
from manylora_worker.engine.core import EngineCore
from manylora_worker.hosting.engine import engine_limits, prefix_options
from manylora_worker.kinds.api import AdapterTier
from manylora_worker.kinds.sequence import Sequence, SequenceStatus
from manylora_worker.models.parts import ModelInfo
from manylora_worker.planning.step_planner import QUANTUM_TOKENS

from tests.memory_ledger import MemoryLedger
from tests.sim.observers import Fence, Meter
from tests.sim.term_checks import TermChecks

VOCAB_SIZE = 259
EOS = 2
EOS_ONE_IN = 64
MAX_CONTEXT_TOKENS = 160
BLOCK_SIZE = 4
NUM_BLOCKS = 64
NUM_HOST_BLOCKS = 32
QUANTUM_BLOCKS = QUANTUM_TOKENS // BLOCK_SIZE
MOST_CLAIMED_STEPS = 8 * QUANTUM_TOKENS
SLOTS = 5
PARKED = 4
FRAMES_PER_S = 1000
"""Of a worker: a token in each, with so few slots."""
STEP_S = 0.02
MODEL = ModelInfo("tiny", "digest", "none", VOCAB_SIZE, MAX_CONTEXT_TOKENS, (EOS,), kv_block_bytes=1 << 20)
TENANTS = {"acme": (8, 4, 1), "bolt": (4, 2, 1), "crux": (1, 1, 1)}
"""Tenant: weights of interactive, standard, batch."""
KV_QUOTAS = {"acme": TenantQuotas(kv_hbm_mb=24, kv_hbm_mb_hard=44), "bolt": TenantQuotas(kv_hbm_mb_reserve=16)}
"""A block is a MiB: one tenant has a hard cap that its longest request reaches nearly, one has a reserve."""
PINS = {"acme": ("acme-0",), "bolt": ("broken",), "crux": ("leaving",)}
"""One that can always be kept, one that never loads, one that may be removed."""
ADAPTERS_PER_TENANT = 3
BROKEN_ADAPTER = "broken"
"""Registered for every tenant; its weights cannot be loaded."""
LEAVING_ADAPTER = "leaving"
"""Registered for every tenant; may be removed while it is used."""
WINDOW_BYTES = 256
PAUSE_UNREAD_TOKENS = 12
"""Little, so that callers that read slowly hold up answers as short as they are here."""
WATCH_DELAY_S = 0.005
LEASE_TTL_S = 2
_START_TIMEOUT_S = 30.0
_WATCH_S = 0.1


@functools.cache
def digest_of_adapter(tenant: str, adapter: str) -> AdapterDigest:
    """Each tenant's first one is the same."""
    name = "first" if adapter == f"{tenant}-0" else f"{tenant}/{adapter}"
    return AdapterDigest(hashlib.sha256(name.encode()).hexdigest())


def adapters_of(tenant: str) -> list[str]:
    """Names of a tenant's good adapters."""
    return [f"{tenant}-{i}" for i in range(ADAPTERS_PER_TENANT)]


_BROKEN = [digest_of_adapter(tenant, BROKEN_ADAPTER) for tenant in TENANTS]


@dataclass
class Engine:
    core: EngineCore
    runner: FakeRunner
    runtime: LoopRuntime
    backend: FakeAdapterBackend
    fence: Fence = field(default_factory=Fence)
    kept: dict[AdapterUid, None] = field(default_factory=dict)
    """Pinned adapters that were on the device."""
    passed_over: dict[Sequence, int] = field(default_factory=dict)
    """Those that could have had a slot at the last look, and in all since the step that stands with them."""
    unclaimed_at: int = 0
    """The last step in which no blocks were kept for a claimant."""
    checked: tuple[int, int] = (-1, -1)
    """Up to which of its changes, and of the policies'."""

    def check(self, policies: Mapping[str, TenantPolicy]) -> None:
        for tenant_id, policy in policies.items():
            held, hard = self.core.blocks_held_by(TenantId(tenant_id)), policy.quotas.kv_hbm_mb_hard
            assert hard is None or held <= hard, f"{tenant_id} holds {held} blocks, past its hard cap"
        self.check_pins(policies)
        self.check_no_slot_is_idle(policies)

    def check_copies(self, sharers: Mapping[TenantId, None]) -> None:
        """No tenant uses, waits for or keeps another's copy of an adapter."""
        for uid, entry in self.core._adapters._residency.entries.items():
            users = {*entry.waiters.values(), *(tenant for claims in entry.claims.values() for tenant in claims)}
            owner = owner_of(uid)
            assert users <= (sharers.keys() if owner is None else {owner}), f"{users} have {uid}"

    def check_no_slot_is_idle(self, policies: Mapping[str, TenantPolicy]) -> None:
        """No parked sequence that could decode is without a slot at looks three steps apart, while one is free, and for
        its quantum so many blocks that neither its own cap nor others' reserves are in the way, nor what is kept for
        one that leads, which is for some quanta at most."""
        planner, pool = self.core._planner, self.core._pool
        before, self.passed_over = self.passed_over, {}
        if not planner.num_claimed:
            self.unclaimed_at = self.core.stats().steps
        assert self.core.stats().steps < self.unclaimed_at + MOST_CLAIMED_STEPS, "blocks are kept for ever"
        if planner.num_running == SLOTS or not planner.parking.parked:
            return
        left = pool.num_free - planner.num_claimed
        capped: set[str] = set()
        for tenant_id, policy in policies.items():
            held, quotas = self.core.blocks_held_by(TenantId(tenant_id)), policy.quotas
            left -= max(0, (quotas.kv_hbm_mb_reserve or 0) - held)
            if quotas.kv_hbm_mb_hard is not None and held + QUANTUM_BLOCKS > quotas.kv_hbm_mb_hard:
                capped.add(tenant_id)
        if left >= QUANTUM_BLOCKS:
            step = self.core.stats().steps
            self.passed_over = {
                s: before.get(s, step)
                for s in planner.parking.parked
                if s.status is SequenceStatus.DECODE and s.item is not None and s.tenant_id not in capped
            }
            stuck = [s.flow for s, since in self.passed_over.items() if step > since + 2]
            assert not stuck, f"sequences of {stuck} wait beside free slots"

    def check_pins(self, policies: Mapping[str, TenantPolicy]) -> None:
        """What is pinned and was brought to the device never leaves it. LEAVING_ADAPTER may be unregistered."""
        everybody = self.core.tenant_adapters()
        states = [state for adapters in everybody.values() for state in adapters.pins]
        assert all(state.pin.uid in self.backend.on_device for state in states if state.is_ready)
        pinned = {
            policy.copy_of(digest_of_adapter(tenant, name))
            for tenant, policy in policies.items()
            for name in policy.pinned_adapters
        }
        self.kept = {uid: None for uid in self.kept if uid in pinned}
        assert self.kept.keys() <= self.backend.on_device.keys(), "a pinned adapter was evicted"
        for state in states:
            if state.is_ready and state.pin.uid in pinned and state.pin.name != LEAVING_ADAPTER:
                self.kept[state.pin.uid] = None


def _is_held_over(app: SchedulerApp) -> bool:
    """Whether it leads on because no store answers: another may lead whom the workers do not obey yet."""
    assert app._election is not None
    return app._election._is_held_over


def address_of(router: str) -> str:
    """Where routers have ports of their own."""
    return f"127.0.0.1:{7070 + int(router.removeprefix('router'))}"


App = RouterApp | SchedulerApp | WorkerApp
Boot = Callable[["Process"], Coroutine[Any, Any, App]]


@dataclass(eq=False)
class Process:
    """A service by name, over its incarnations. States: down, starting, up; `is_paused` beside that."""

    name: str
    boot: Boot
    node: SimNode | None = None
    transport: MemoryTransport | None = None
    store: MemoryStore | None = None
    main: asyncio.Task[None] | None = None
    app: App | None = None
    is_paused: bool = False
    is_changing: bool = False
    """Being killed or stopped."""

    @property
    def is_down(self) -> bool:
        return self.node is None


class Cluster:
    def __init__(
        self, seed: int, *, routers: int = 2, schedulers: int = 2, workers: int = 3, overload: bool = True
    ) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        self.loop = loop
        self.network = MemoryNetwork(random.Random(f"{seed}/network"), window_bytes=WINDOW_BYTES)
        self.store_server = MemoryStoreServer(
            random.Random(f"{seed}/store"), min_delay_s=0.0005, max_delay_s=0.004, watch_delay_s=WATCH_DELAY_S
        )
        self.files = MemoryAdapterFiles()
        self.documents = MemoryDocuments(self.files)
        self.clock = SimWallClock(loop)
        self.engines: list[Engine] = []
        """Of all workers there ever were."""
        self.is_thorough = False
        """Whether `watch` also looks at every block and sequence of engines that are at work."""
        self.meter = Meter()
        self.ledger = MemoryLedger(self.clock.now_unix_s)
        self.load_factor = 1.0
        """By which loads of adapters take longer."""
        self.processes: dict[str, Process] = {}
        self.policies: dict[str, TenantPolicy] = {}
        """As they were put last."""
        self._policies_put = 0
        self.group_members: dict[str, None] = {}
        """Tenants that were in the cache group at some time."""
        self.sharers: dict[TenantId, None] = {}
        """Tenants that shared copies of adapters at some time."""
        self._overload = overload
        self.bounded_tenants: dict[str, None] = {}
        """Those with quotas."""
        self.key = ""
        """A gateway's."""
        self.have_routers_ports = False
        """Their addresses outlive their incarnations; else each incarnation has its own."""
        self.lease_taken_at = float("-inf")
        self.leases_taken = 0
        self._moments_of_two = 0
        """At which two schedulers led, of those that `watch` saw."""
        self._term_checks = TermChecks()
        self._clock = self._clock_revision = 0
        """As it was kept last, and the store's revision of that."""
        self.removed_adapters: dict[str, None] = {}
        """Tenants whose LEAVING_ADAPTER was removed."""
        self._rng = random.Random(f"{seed}/processes")
        for kind, boot, count in (
            ("scheduler", self._boot_scheduler, schedulers),
            ("worker", self._boot_worker, workers),
            ("router", self._boot_router, routers),
        ):
            for i in range(count):
                self.processes[f"{kind}{i}"] = Process(f"{kind}{i}", boot)

    def names(self, kind: str) -> list[str]:
        return [name for name in self.processes if name.startswith(kind)]

    async def start(self) -> None:
        """Tenants and adapters into the store, then all processes."""
        store = self.store_server.client()
        made = new_key(self._rng.getrandbits, tenant_id="", scopes=("gateway",), name="", now_unix_s=0.0)
        self.key = made.key
        await store.put(keys.api_key(made.record.key_id), made.record.to_json())
        for tenant, weights in TENANTS.items():
            classes = {c: ClassPolicy(w) for c, w in zip(QosClass, weights, strict=True)}
            await self.put_policy(
                store,
                TenantPolicy(
                    TenantId(tenant),
                    classes,
                    quotas=KV_QUOTAS.get(tenant, TenantQuotas()),
                    pinned_adapters=tuple(AdapterName(name) for name in PINS[tenant]),
                ),
            )
            for name in [*adapters_of(tenant), BROKEN_ADAPTER, LEAVING_ADAPTER]:
                record = AdapterRecord(tenant, name, digest_of_adapter(tenant, name), 8, 1, ("q_proj",), 0.0)
                await store.put(keys.adapter(tenant, name), record.to_json())
        await store.close()
        for process in self.processes.values():
            self.launch(process)
        await self.all_up()

    async def put_policy(self, store: MemoryStore, policy: TenantPolicy) -> None:
        self.policies[policy.tenant_id] = policy
        if policy.cache_group is not None:
            self.group_members[policy.tenant_id] = None
        if policy.share_copies:
            self.sharers[policy.tenant_id] = None
        self._policies_put += 1
        await store.put(keys.tenant(policy.tenant_id), policy.to_yaml().encode())

    def launch(self, process: Process) -> None:
        """A new incarnation; it starts by itself."""
        assert process.is_down
        process.node = self.loop.node(process.name)
        process.transport = self.network.transport(process.name)
        process.store = self.store_server.client()
        process.main = process.node.start(self._main(process))

    async def kill(self, process: Process, *, silently: bool = False) -> None:
        """As kill -9 (or, silently, as a machine that loses power)."""
        assert process.node is not None
        assert process.store is not None
        process.is_changing = True
        process.store.set_reachable(False)
        self.network.kill(process.name, silently=silently)
        await process.node.kill()
        self._down(process)

    async def stop(self, process: Process) -> None:
        """As SIGTERM; where it is not up yet, as kill -9."""
        assert process.node is not None
        if process.app is None:
            await self.kill(process)
            return
        process.is_changing = True
        await process.node.start(process.app.stop())
        self._check_left(process.app)
        assert process.store is not None
        await process.store.close()
        self.network.kill(process.name)
        await process.node.kill()
        self._down(process)

    def _check_left(self, app: App) -> None:
        """Who has ended in order holds nothing."""
        if isinstance(app, WorkerApp):
            (engine,) = [engine for engine in self.engines if engine.runtime is app._runtime]
            has_failed = engine.runtime.view.failure is not None
            assert has_failed or engine.core.stats().requests == 0, "it left with requests"
            assert not engine.runtime.view.running
            assert not app._servicer._executing
        elif isinstance(app, RouterApp):
            counts = app.debug_counters()
            held = {name: counts[name] for name in ("live_requests", "granted", "waiting", "streams")}
            assert not any(held.values()), f"it left with {held}"
            assert all(answer.has_ended for answer in app.kept.all()), "it left with answers that it keeps"
        else:
            assert app.term is None, "it left as the leader"

    async def all_up(self) -> None:
        """Launches what is down, and waits until all are up."""
        async with asyncio.timeout(_START_TIMEOUT_S):
            for process in self.processes.values():
                while process.is_changing or process.app is None:
                    if process.is_down and not process.is_changing:
                        self.launch(process)
                    if process.main is not None and process.main.done():
                        process.main.result()
                    await asyncio.sleep(0.01)

    def resume(self, process: Process) -> None:
        if process.is_paused and process.node is not None:
            process.node.resume()
        process.is_paused = False

    def pause(self, process: Process) -> None:
        if process.node is not None and not process.is_changing:
            process.node.pause()
            process.is_paused = True

    async def watch(self) -> None:
        """Checks what must hold at every moment, now and then, until it is cancelled. What has not changed since it was
        checked is not checked again."""
        while True:
            leaders = [app for app in self.leaders() if not _is_held_over(app)]
            # A lease that the store takes away before its time is its holder's until it hears of it, or that time.
            if self.loop.time() - self.lease_taken_at > LEASE_TTL_S:
                assert len(leaders) <= 1, "two schedulers lead"
            self._moments_of_two += len(leaders) > 1
            for app in self.leaders():
                assert app.term is not None
                self._term_checks.check(app.term)
            self._check_kept_clock()
            for engine in self.engines:
                changes = (engine.runtime.num_changes, self._policies_put)
                if engine.checked != changes:
                    engine.checked = changes
                    engine.check(self.policies)
                    engine.check_copies(self.sharers)
                    if self.is_thorough:
                        engine.core.check_invariants()
            await asyncio.sleep(_WATCH_S)

    def _check_kept_clock(self) -> None:
        """The virtual clock that leaders keep in the store never falls, whoever leads."""
        kv = self.store_server.get(keys.SCHEDULER_CLOCK)
        if kv is None or kv.mod_revision == self._clock_revision:
            return
        self._clock_revision = kv.mod_revision
        index = ClockIndexRecord.from_json(kv.value)
        parts = [self.store_server.get(keys.scheduler_clock_part(index.bank, i)) for i in range(index.parts)]
        clock = decode(b"".join(part.value for part in parts if part is not None)).clocks[DEFAULT_POOL].clock
        assert clock >= self._clock, f"the virtual clock fell from {self._clock} to {clock}"
        self._clock = clock

    @property
    def most_of_two_leaders_s(self) -> float:
        """For no longer did two schedulers lead, as `watch` saw it: where a leader's lease is taken from it before its
        time, it leads until it hears of that."""
        return _WATCH_S * (self._moments_of_two + self.leases_taken)

    def engines_up(self) -> list[Engine]:
        """Those of living workers."""
        runtimes = [process.app._runtime for process in self.processes.values() if isinstance(process.app, WorkerApp)]
        return [engine for engine in self.engines if engine.runtime in runtimes]

    def leaders(self) -> list[SchedulerApp]:
        apps = [process.app for process in self.processes.values()]
        return [a for a in apps if isinstance(a, SchedulerApp) and a.term is not None and a.term.is_leading]

    def _down(self, process: Process) -> None:
        process.node = process.app = process.main = None
        process.is_paused = process.is_changing = False

    async def _main(self, process: Process) -> None:
        app = await process.boot(process)
        process.app = app
        if not isinstance(app, WorkerApp):
            await app.failed()
        else:
            raise RuntimeError(f"the engine failed: {await app.failed()}")

    # ---- the three services

    async def _boot_router(self, process: Process) -> App:
        assert process.transport is not None
        assert process.store is not None
        app = RouterApp(
            RouterConfig(
                adapter_store="memory",
                router_id=process.name,
                lease_ttl_s=LEASE_TTL_S,
                listen=address_of(process.name) if self.have_routers_ports else "127.0.0.1:0",
            ),
            transport=process.transport,
            store=process.store,
            text=FakeText(),
            adapter_store=self.files,
            documents=self.documents,
            telemetry=Telemetry.disabled(),
            rng=self._draw(),
            peer_secret=SIMULATED,
            clock=self.clock,
            open_ledger=self.ledger.opened,
        )
        self.meter.listen(app.scheduler)
        await app.start()
        return app

    async def _boot_scheduler(self, process: Process) -> App:
        assert process.transport is not None
        assert process.store is not None
        app = SchedulerApp(
            SchedulerConfig(scheduler_id=process.name, lease_ttl_s=LEASE_TTL_S),
            transport=process.transport,
            store=process.store,
            telemetry=Telemetry.disabled(),
            rng=self._draw(),
            peer_secret=SIMULATED,
            clock=self.clock,
            overload=self._overload,
        )
        await app.start()
        return app

    async def _boot_worker(self, process: Process) -> App:
        assert process.transport is not None
        assert process.store is not None
        settings = self._worker_settings(process.name)
        engine = self._engine(settings)
        self.engines.append(engine)
        app = WorkerApp(
            settings,
            transport=process.transport,
            store=process.store,
            runtime=engine.runtime,
            validate=FakeValidator(),
            telemetry=Telemetry.disabled(),
            rng=self._draw(),
            peer_secret=SIMULATED,
            started_unix_s=asyncio.get_running_loop().time(),
        )
        engine.fence.listen(app._servicer, engine.runtime.view)
        await app.start()
        return app

    def _worker_settings(self, name: str) -> FakeWorkerConfig:
        return FakeWorkerConfig(
            worker_id=name,
            lease_ttl_s=LEASE_TTL_S,
            sequence_slots=SLOTS,
            parked_sequences=PARKED,
            max_batch_tokens=32,
            prefill_chunk_tokens=16,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            host_adapter_mb=6e-6,
            device_adapter_mb=4e-6,
            max_frames_per_s=FRAMES_PER_S,
            drain_s=1.0,
        )

    def _engine(self, settings: WorkerConfig) -> Engine:
        rng = self._draw()
        runner = FakeRunner(
            num_blocks=settings.num_blocks,
            block_size=settings.block_size,
            vocab_size=VOCAB_SIZE,
            max_context_tokens=MAX_CONTEXT_TOKENS,
            eos_token_id=EOS,
            eos_one_in=EOS_ONE_IN,
            num_host_blocks=NUM_HOST_BLOCKS,
            block_copy_s=STEP_S / 16,
            copy_polls=1,
        )

        def error_of(uid: AdapterUid, tier: AdapterTier) -> str | None:
            return "the file is corrupt" if digest_of(uid) in _BROKEN else None

        backend = FakeAdapterBackend(
            self.loop.time,
            load_s=lambda uid, tier: rng.choice([0.002, 0.02, 0.2]) * self.load_factor,
            error_of=error_of,
        )
        limits = engine_limits(settings)
        core = EngineCore(runner, backend, limits, prefix_options(settings, MODEL, secret=bytes(32)))
        runner.tenant_of = core.tenant_of
        runner.shares = lambda reader, writer: self.group_members.keys() >= {reader, writer}
        runner.adapters_on_device = lambda: backend.on_device
        runtime = LoopRuntime(
            core,
            backend,
            MODEL,
            max_requests=limits.max_requests,
            step_s=lambda batch: STEP_S * rng.uniform(0.5, 2.0),
            pause_unread_tokens=PAUSE_UNREAD_TOKENS,
        )
        backend.when_due = lambda due: self.loop.call_at(due, runtime.wake)
        return Engine(core, runner, runtime, backend)

    def _draw(self) -> random.Random:
        return random.Random(self._rng.getrandbits(64))
