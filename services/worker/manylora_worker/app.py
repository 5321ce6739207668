"""The worker as a whole: owns the order of its start and its end. Built from ready parts, by the simulation too."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from contextlib import suppress

from manylora_shared.coordination import keys
from manylora_shared.coordination.base import Store, StoreUnavailable
from manylora_shared.coordination.peers import PeerSecret, guarded
from manylora_shared.coordination.pool import PROTOCOL
from manylora_shared.coordination.records import WorkerRecord
from manylora_shared.coordination.session import first_of
from manylora_shared.encryption.keyring import Keyring
from manylora_shared.ids import AdapterUid
from manylora_shared.process.clock import SystemClock
from manylora_shared.telemetry import Telemetry
from manylora_shared.telemetry.logs import fields
from manylora_shared.transport.base import Server, Transport

from manylora_worker.config import WorkerConfig
from manylora_worker.constraints.compiler import ConstraintCompiler
from manylora_worker.hosting.runtime import Runtime
from manylora_worker.hosting.stall import LOOK_S, StallJudge
from manylora_worker.serving.metrics import LOOK_AT_METRICS_S, EngineMetrics, WorkerMetrics
from manylora_worker.serving.policy_watch import TenantWatch
from manylora_worker.serving.registration import Registration
from manylora_worker.serving.servicer import WorkerServicer
from manylora_worker.serving.warm_up import warm_up
from manylora_worker.weights.adapter_check import AdapterValidator

_LOG = logging.getLogger(__name__)
_LAST_FRAMES_S = 1.0
"""For the frames of requests that end with the worker to go out."""
_TOLD_S = 0.25
"""For all workers that were told to stop at the same time to say so."""


class WorkerApp:
    def __init__(
        self,
        config: WorkerConfig,
        *,
        transport: Transport,
        store: Store,
        runtime: Runtime,
        validate: AdapterValidator,
        constraints: ConstraintCompiler | None = None,
        is_near: Callable[[AdapterUid], bool] = lambda uid: True,
        keyring: Keyring | None = None,
        telemetry: Telemetry,
        rng: random.Random,
        peer_secret: PeerSecret,
        started_unix_s: float,
    ) -> None:
        self.worker_id = config.worker_id or f"worker-{rng.getrandbits(40):010x}"
        self._config = config
        self._started_unix_s = started_unix_s
        self._transport = transport
        self._store = store
        self._rng = rng
        self._peer_secret = peer_secret
        self._runtime = runtime
        self._metrics = WorkerMetrics(
            runtime.view,
            telemetry,
            model=runtime.model.name,
            block_bytes=runtime.model.kv_block_bytes,
            sequence_slots=config.sequence_slots,
            device_adapter_bytes=config.device_adapter_bytes,
            is_near=is_near,
        )
        self._has_readers = telemetry.has_metrics
        self._constraints = constraints
        self._keyring = keyring
        self._leaving = asyncio.Event()
        self._servicer = WorkerServicer(
            runtime,
            validate,
            telemetry,
            worker_id=self.worker_id,
            sequence_slots=config.sequence_slots,
            parked_sequences=config.parked_sequences,
            frames_per_s=config.frames_per_s,
            metrics=self._metrics,
            leave=self._set_leaving,
            constraints=constraints,
        )
        if telemetry.has_metrics:
            runtime.view.subscribe(EngineMetrics(runtime.view, telemetry, runtime.model.kv_block_bytes))
        self._tenants = TenantWatch(store, runtime, config.pool)
        self._server: Server | None = None
        self._registration: Registration | None = None
        self._watching: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None
        self._engine_has_failed = asyncio.Event()
        runtime.view.when_failed(self._engine_failed)

    @property
    def instance_id(self) -> str:
        return self.worker_id

    @property
    def address(self) -> str:
        """What others dial."""
        assert self._server is not None, "start comes first"
        return self._config.advertise or self._server.address

    @property
    def endpoints(self) -> Mapping[str, str]:
        return {}

    async def start(self) -> None:
        """Returns when the worker serves and is registered."""
        if self._keyring is not None:
            await self._keyring.start(self._store)
        self._runtime.start()
        self._watching = asyncio.create_task(self._watch_engine(), name="engine watch")
        if self._has_readers:
            self._telling = asyncio.create_task(self._tell_metrics(), name="metrics")
        services = [guarded(self._servicer.service(), self._peer_secret)]
        self._server = await self._transport.serve(self._config.listen, services)
        await self._tenants.start()
        if self._config.warm_up_s:
            await warm_up(self._store, self._runtime, self._tenants.serves, self._config.warm_up_s)
        self._registration = Registration(self._store, self._record(), lease_ttl_s=self._config.lease_ttl_s)
        await self._registration.start()
        if self._runtime.view.failure is None:
            self._server.set_serving(True)
        _LOG.info("serving", extra=fields(worker=self.worker_id, address=self.address))

    async def failed(self) -> str:
        """Waits until the engine has failed. Returns why. Raises where a mirror has ended."""
        mirrors = [self._tenants.failed(), *([self._keyring.failed()] if self._keyring is not None else [])]
        await first_of(self._engine_has_failed.wait(), *mirrors)
        assert self._runtime.view.failure is not None
        return self._runtime.view.failure

    async def stop(self) -> None:
        """Ends in order; also what was started in part."""
        self._servicer.drain()
        if self._server is not None:
            self._server.set_serving(False)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_s):
                if self._runtime.view.running and await self._others_go_on():
                    self._servicer.hand_over()
                await self._servicer.wait_quiet()
        self._servicer.close()
        await self._tenants.close()
        if self._watching is not None:
            self._watching.cancel()
        if self._telling is not None:
            self._telling.cancel()
        await self._runtime.stop()
        if self._keyring is not None:
            await self._keyring.close()
        if self._constraints is not None:
            self._constraints.close()
        if self._registration is not None:
            await self._registration.stop()
        self._servicer.end_control()
        if self._server is not None:
            await self._server.stop(_LAST_FRAMES_S)

    async def _others_go_on(self) -> bool:
        """Whether a worker of the same pool stays. Where nobody knows, what runs here is to end here."""
        if self._registration is None or self._runtime.view.failure is not None:
            return False
        await self._registration.leave()
        await asyncio.sleep(_TOLD_S)
        own = self._record()
        try:
            listing = await self._store.list(keys.WORKERS)
            records = [WorkerRecord.stored(kv) for kv in listing.kvs]
        except (StoreUnavailable, ValueError) as e:
            _LOG.warning("what runs here is not handed over", extra=fields(worker=self.worker_id, error=str(e)))
            return False
        others = (record for record in records if record.worker_id != self.worker_id and not record.is_leaving)
        return any(record.pool == own.pool and record.computes == own.computes for record in others)

    def _set_leaving(self) -> None:
        self._leaving.set()

    async def told_to_leave(self) -> None:
        await self._leaving.wait()

    async def _tell_metrics(self) -> None:
        while True:
            self._metrics.look(self._runtime.now(), SystemClock().now_unix_s())
            await asyncio.sleep(LOOK_AT_METRICS_S)

    async def _watch_engine(self) -> None:
        judge = StallJudge(self._config.stall_s)
        while self._runtime.view.failure is None:
            await asyncio.sleep(LOOK_S)
            stood_s = judge.look(self._runtime.progress())
            if stood_s is not None:
                self._runtime.give_up(f"it has stood still for {stood_s:g} s")

    def _engine_failed(self, message: str) -> None:
        """Nobody is to come here any more."""
        if self._server is not None:
            self._server.set_serving(False)
        if self._registration is not None:
            self._registration.withdraw()
        self._engine_has_failed.set()

    def _record(self) -> WorkerRecord:
        model = self._runtime.model
        return WorkerRecord(
            worker_id=self.worker_id,
            address=self.address,
            device=model.device,
            model_name=model.name,
            model_digest=model.digest,
            vocab_size=model.vocab_size,
            max_context_tokens=model.max_context_tokens,
            sequence_slots=self._config.sequence_slots,
            max_lora_rank=self._config.max_lora_rank,
            eos_token_ids=model.eos_token_ids,
            device_adapter_bytes=self._config.device_adapter_bytes,
            dtype=model.dtype,
            quantization=self._config.quantization,
            rotation=model.rotation,
            started_unix_s=self._started_unix_s,
            sampling_defaults=model.sampling_defaults,
            pool=self._config.pool,
            protocol=PROTOCOL,
            longest_context_tokens=model.longest_context_tokens,
            layer_parameters=model.shape.layer_parameters,
            head_parameters=model.shape.head_parameters,
            attention_operations=model.shape.attention,
            merge_problem=self._runtime.merge_problem,
        )
