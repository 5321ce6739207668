"""The router as one object: its parts wired together, started and stopped in order.

Holds no state that another router could not take over: clients of a router that stopped go to another one.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from manylora_shared.audit.log import AuditLog
from manylora_shared.coordination import keys
from manylora_shared.coordination.base import Store
from manylora_shared.coordination.peers import PeerSecret, PeerTransport
from manylora_shared.coordination.records import AdapterRecord, RouterRecord
from manylora_shared.coordination.session import LeaseSession
from manylora_shared.encryption.keyring import Keyring
from manylora_shared.errors import ServiceUnavailable
from manylora_shared.ids import AdapterDigest, AdapterUid, TenantId, adapter_uid
from manylora_shared.ledger.compute import Served
from manylora_shared.process.clock import SystemClock, WallClock
from manylora_shared.stores.adapter_files import AdapterFiles
from manylora_shared.stores.documents import REPORTS, Documents
from manylora_shared.telemetry import Telemetry
from manylora_shared.tenancy.adapter_line import Line
from manylora_shared.transport.base import Server, Service, Transport
from manylora_shared.transport.handling import MAX_MESSAGE_BYTES
from manylora_shared.transport.tls import Tls

from manylora_router.admin.access import operator_key
from manylora_router.admin.access.audit import AuditReader
from manylora_router.admin.adapters import UPLOAD_BYTES_PER_S, AdapterIntake
from manylora_router.admin.draining import Draining
from manylora_router.admin.quality_gate import QualityGate
from manylora_router.admin.service_levels import ServiceLevels
from manylora_router.admin.servicer import AdminServicer
from manylora_router.admin.sources import Sources
from manylora_router.admin.status import ClusterStatus
from manylora_router.admin.validation import AdapterValidation
from manylora_router.admin.verification import Verification
from manylora_router.config import RouterConfig
from manylora_router.dialect.dialect import Dialect
from manylora_router.front.far_answers import AnswerServicer, FarAnswers
from manylora_router.front.feedback import FeedbackDesk
from manylora_router.front.gate import (
    LARGE_BYTES_PER_S,
    MAX_REQUEST_BYTES,
    Bounds,
    Gate,
    OwnBounds,
    own_tenant,
)
from manylora_router.front.generation import Outliving, generate
from manylora_router.front.grpc import InferenceServicer, tenant_of
from manylora_router.front.http.api.answers import Door
from manylora_router.front.http.routes import Routes
from manylora_router.front.http.server import HttpServer
from manylora_router.front.intake import Intake
from manylora_router.front.kept_answers import KeptAnswers
from manylora_router.front.pace import bytes_pace
from manylora_router.guard.resume_tokens import ResumeTokens
from manylora_router.guard.tokens import Issuer, Tokens
from manylora_router.history.samples import STEP_S
from manylora_router.keeping.encryption import EncryptionDesk
from manylora_router.keeping.retention import RetentionDesk
from manylora_router.keeping.texts import TextKeeper
from manylora_router.ledger.budgets import Budgets
from manylora_router.ledger.rows import UsageLedger
from manylora_router.links.acts import Acts
from manylora_router.links.answer_owners import AnswerOwners
from manylora_router.links.callers import Callers
from manylora_router.links.channels import WorkerChannels
from manylora_router.links.directory import Directory
from manylora_router.links.entrance import Entrance
from manylora_router.links.other_routers import OtherRouters
from manylora_router.links.scheduler_client import SchedulerClient
from manylora_router.links.token_keys import TokenKeys, load_issuers
from manylora_router.links.wire import trial_counts
from manylora_router.metrics import RECORD_S
from manylora_router.request.call import Calls
from manylora_router.text.service import TextService
from manylora_router.text.texts import Load, Texts

_LOG = logging.getLogger(__name__)

HOUSEKEEPING_S = 300.0
TRIALS_S = 1.0
_EMPTY_POLL_S = 0.01
_HAND_OVER_S = 0.5  # for the callers to hear of it
FILES_GRACE_S = 900.0  # files are left alone for so long after an upload last wrote or committed them


class RouterApp:
    """The parts that it is given, except texts, stay their giver's to close."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        transport: Transport,
        store: Store,
        text: TextService,
        adapter_store: AdapterFiles,
        documents: Documents,
        keyring: Keyring | None = None,
        sources: Sources | None = None,
        telemetry: Telemetry,
        rng: random.Random,
        peer_secret: PeerSecret,
        clock: WallClock | None = None,
        tls: Tls | None = None,
        pool_texts: Mapping[str, Load] | None = None,  # of pools besides the default one, whose is `text`
        audit: AuditLog | None = None,
        open_ledger: Callable[[str, Callable[[str], Served]], UsageLedger] | None = None,
    ) -> None:
        """open_ledger: by this router's id, and what tells the base model of a pool."""
        self.config = config
        self.router_id = config.router_id or f"router-{rng.getrandbits(32):08x}"
        self._transport = transport
        self._store = store
        self._texts = Texts(text, pool_texts)
        self._files = adapter_store
        self._documents = documents
        self._keyring = keyring
        self._sources = sources or Sources(())
        self._clock = clock or SystemClock()
        self._rng = rng
        self._server: Server | None = None
        self._leaving = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._peer_secret = peer_secret
        peers = PeerTransport(transport, peer_secret)
        self.channels = WorkerChannels(peers)
        self.directory = self._mirrors()
        issuers = load_issuers(Path(config.token_issuers)) if config.token_issuers else []
        self._token_keys = TokenKeys(issuers)
        self._audit = audit
        self._acts = Acts(audit, self._clock)
        self.callers = self._callers(issuers)
        self.scheduler = SchedulerClient(
            router_id=self.router_id, transport=peers, leader_address=self.directory.leader_address, rng=rng
        )
        self._keeper = self._text_keeper() if keyring is not None else None
        self.ledger = open_ledger(self.router_id, self._served) if open_ledger is not None else None
        self.budgets = Budgets(self.ledger, self.directory.capped)
        self.calls = self._running_calls(telemetry)
        self.intake = self._front_intake()
        self.bounds = Bounds()
        self._pace = bytes_pace(LARGE_BYTES_PER_S)
        self._others = OtherRouters(router_id=self.router_id, directory=self.directory, transport=peers)
        self._feedback = FeedbackDesk(self.calls, self._others)
        self._entrance = Entrance(self.callers, self._acts, rng.getrandbits)
        self._lease = LeaseSession(store, ttl_s=config.lease_ttl_s)
        self._started_unix_s = self._clock.now_unix_s()
        self.kept = KeptAnswers(AnswerOwners(store, self.router_id, self._started_unix_s), rng.getrandbits)
        self.outliving = Outliving(self.kept, FarAnswers(self.router_id, self.directory, peers))
        self._inference = InferenceServicer(self.intake, self.calls, self._feedback, self._entrance, self.outliving)
        self._answers = AnswerServicer(self.intake, self.kept, peer_secret)
        self._intake = self._adapter_intake()
        levels = self._service_levels()
        self._status = ClusterStatus(directory=self.directory, transport=peers, levels=levels)
        self.admin = self._admin(levels, peers)
        self._encryption = EncryptionDesk(self._entrance, store, keyring, adapter_store, documents)
        self._http = HttpServer(Routes(self.door), tls) if config.http_listen else None

    def _callers(self, issuers: Sequence[Issuer]) -> Callers:
        tokens = Tokens(issuers, self._token_keys.key_of) if issuers else None
        return Callers(
            self.directory.key_of,
            self._clock,
            tokens,
            self._acts.stranger,
            self._peer_secret,
            keys_revision=lambda: self.directory.keys_revision,
        )

    def _running_calls(self, telemetry: Telemetry) -> Calls:
        return Calls(
            directory=self.directory,
            scheduler=self.scheduler,
            channels=self.channels,
            texts=self._texts,
            telemetry=telemetry,
            rng=self._rng,
            tokens=ResumeTokens(self._peer_secret.sign),
            now_unix_s=self._clock.now_unix_s,
            take_text=self._keeper.take if self._keeper is not None else None,
            rows=self.ledger,
        )

    def _text_keeper(self) -> TextKeeper:
        return TextKeeper(
            self._documents,
            policy_of=self.directory.policy_of,
            now_unix_s=self._clock.now_unix_s,
            getrandbits=self._rng.getrandbits,
            max_bytes=self.config.retention_mb << 20,
        )

    def _mirrors(self) -> Directory:
        return Directory(
            self._store,
            on_leader_changed=self._leader_changed,
            on_workers_changed=self._workers_changed,
            takes_sampling_defaults=self.config.generation_config == "auto",
        )

    def _front_intake(self) -> Intake:
        return Intake(
            directory=self.directory,
            callers=self.callers,
            scheduler=self.scheduler,
            texts=self._texts,
            calls=self.calls,
            budgets=self.budgets,
            rng=self._rng,
            default_max_tokens=self.config.default_max_tokens,
        )

    def _admin(self, levels: ServiceLevels, peers: Transport) -> AdminServicer:
        return AdminServicer(
            directory=self.directory,
            entrance=self._entrance,
            store=self._store,
            intake=self._intake,
            validation=self._validation(),
            documents=self._documents,
            verification=Verification(self._files),
            status=self._status,
            levels=levels,
            keeps_texts=self._keeper is not None,
            draining=Draining(
                router_id=self.router_id,
                directory=self.directory,
                store=self._store,
                peers=peers,
                leave=self._leaving.set,
            ),
            audit=self._audit_reader(),
            ledger=self.ledger,
            clock=self._clock,
            rng=self._rng,
        )

    def _audit_reader(self) -> AuditReader:
        if self._audit is None:
            return AuditReader(None, self._store, self._others)
        return AuditReader(self._audit.folder, self._store, self._others, self._audit.seal)

    def _validation(self) -> AdapterValidation:
        gate = QualityGate(
            partial(generate, intake=self.intake, calls=self.calls),
            self.intake.tokenize,
            partial(self.callers.lend, getrandbits=self._rng.getrandbits),
        )
        return AdapterValidation(self._intake, gate, self._documents, self.directory, self._clock)

    def _adapter_intake(self) -> AdapterIntake:
        return AdapterIntake(
            self._files,
            self._sources,
            directory=self.directory,
            texts=self._texts,
            channels=self.channels,
            clock=self._clock,
            rng=self._rng,
        )

    def _service_levels(self) -> ServiceLevels:
        return ServiceLevels(
            directory=self.directory,
            others=self._others,
            slo=self.calls.slo,
            guard=self.calls.guard,
            num_resumed=lambda: self.calls.counters.resumed,
            caps_without_effect=lambda: self.budgets.without_effect,
        )

    @property
    def door(self) -> Door:
        return Door(
            intake=self.intake,
            callers=self.callers,
            entrance=self._entrance,
            calls=self.calls,
            outliving=self.outliving,
            feedback=self._feedback,
            text=self._texts.default,
            dialect=self._dialect_of(self._texts.default),
            texts=self._texts,
            dialect_of=self._dialect_of,
            admin=self.admin.handlers,
            places=self.bounds.places,
            pace=self._pace,
            getrandbits=self._rng.getrandbits,
            now_unix_s=self._clock.now_unix_s,
            router_id=self.router_id,
            console=self._status.moments if self.config.console else None,
        )

    def _dialect_of(self, text: TextService) -> Dialect:
        return Dialect.of(text.chat_template, self.config.tool_parser, self.config.reasoning_parser)

    def _served(self, pool: str) -> Served:
        model = self.directory.models.get(pool)
        return Served(model.name, model.shape) if model is not None else Served()

    @property
    def instance_id(self) -> str:
        return self.router_id

    @property
    def address(self) -> str:
        assert self._server is not None, "start comes first"
        return self.config.advertise or self._server.address

    @property
    def endpoints(self) -> Mapping[str, str]:
        return {"http": self._http.address} if self._http is not None else {}

    def live_requests(self) -> list[str]:
        return list(self.calls.live)

    def debug_counters(self) -> dict[str, int]:
        """All zero when nothing runs, except channels to living workers."""
        return {
            "live_requests": len(self.calls.live),
            "waiting": self.scheduler.num_waiting,
            "granted": self.scheduler.num_granted,
            "leases": self.scheduler.num_leases,
            "unsent": self.scheduler.num_unsent,
            "uploads": self._intake.num_uploads,
            "streams": self.channels.num_users,
            "guarded": self.calls.guard.num_running,
            "places": self.bounds.places.num_held,
            "channels": len(self.channels),
        }

    def _services(self) -> list[Service]:
        gate = partial(Gate, self.callers, self.bounds)
        inference = gate(tenant_of=tenant_of, max_message_bytes=MAX_REQUEST_BYTES, pace=self._pace)
        admin = gate(
            tenant_of=lambda principal, call: own_tenant(principal),
            max_message_bytes=MAX_MESSAGE_BYTES,
            pace=bytes_pace(UPLOAD_BYTES_PER_S),
            own=OwnBounds(),
        )
        return [
            self._inference.service(inference),
            self._answers.service(),
            self.admin.service(admin),
            self._encryption.service(admin, RetentionDesk(self._store, self._keeper).handlers),
        ]

    async def start(self) -> None:
        """Returns when this router serves. Waits for the store as long as it takes."""
        if self._keyring is not None:
            await self._keyring.start(self._store)
        if self._audit is not None:
            await self._audit.start(self.router_id)
        if self.ledger is not None:
            await self.ledger.start()
        if self.config.operator_key_file:
            await operator_key.ensure(
                self._store,
                Path(self.config.operator_key_file),
                getrandbits=self._rng.getrandbits,
                now_unix_s=self._clock.now_unix_s(),
                will=self._acts.own,
            )
        self.directory.start()
        await self.directory.ready()
        self._server = await self._transport.serve(self.config.listen, self._services())
        self._tasks = [
            asyncio.create_task(self.scheduler.run(), name="scheduler-line"),
            asyncio.create_task(self._keep_house(), name="housekeeping"),
            asyncio.create_task(self._keep_trials(), name="trials"),
            asyncio.create_task(self._keep_token_keys(), name="token keys"),
            asyncio.create_task(self.directory.failed(), name="mirrors"),
            asyncio.create_task(self._close_steps(), name="history"),
            asyncio.create_task(self._acts.keep_counting(), name="refused calls"),
            asyncio.create_task(self.budgets.run(), name="budgets"),
        ]
        if self._keyring is not None:
            self._tasks.append(asyncio.create_task(self._keyring.failed(), name="data keys"))
        if self._audit is not None:
            self._tasks.append(asyncio.create_task(self._audit.failed(), name="audit log"))
        if self._keeper is not None:
            self._tasks.append(asyncio.create_task(self._keeper.run(), name="kept texts"))
        if self.ledger is not None:
            self._tasks.append(asyncio.create_task(self.ledger.keep_notes(), name="ledger"))
        if self.calls.metrics.has_readers:
            self._tasks.append(asyncio.create_task(self._tell_metrics(), name="metrics"))
        self._lease.start()
        record = RouterRecord(self.router_id, self.address, self._started_unix_s)
        await self._lease.register(keys.router(self.router_id), record.to_json())
        self._server.set_serving(True)
        if self._http is not None:
            await self._http.start(self.config.http_listen)
            self._tasks.append(asyncio.create_task(self._http.failed(), name="http front"))

    async def stop(self, grace_s: float | None = None) -> None:
        """Refuses new requests, hands over what another router can go on with, lets the rest go on for `grace_s` (None:
        as configured), then ends everything.
        """
        grace_s = self.config.drain_s if grace_s is None else grace_s
        until = asyncio.get_running_loop().time() + grace_s
        if self._server is not None:
            self._server.set_serving(False)
            has_others = any(name != self.router_id for name in self.directory.routers)
            self.calls.drain(hands_over=has_others)
            if has_others:
                self.outliving.far.hand_over()
            await self._empty(until)
            if self.calls.live:
                self.calls.drain(hands_over=True)
                await self._empty(asyncio.get_running_loop().time() + min(grace_s, _HAND_OVER_S))
            await self.kept.close()
            await self._lease.close()
            grace_s = max(0.0, until - asyncio.get_running_loop().time())
            await asyncio.gather(self._server.stop(grace_s), *([self._http.stop(grace_s)] if self._http else []))
        await self.calls.reckonings.close()
        await self._empty(asyncio.get_running_loop().time() + _HAND_OVER_S)
        self._sources.close()
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.ledger is not None:
            await self.ledger.stop()
        self._acts.tell_counts(is_last=True)
        if self._audit is not None:
            await self._audit.stop()
        self._status.close()
        await self.channels.close()
        await self.directory.close()
        if self._keeper is not None:
            await self._keeper.write_all()
        if self._keyring is not None:
            await self._keyring.close()
        await self._texts.close()
        self.intake.close()
        for error in ended:
            if error is not None and not isinstance(error, asyncio.CancelledError):
                raise error

    async def _empty(self, until: float) -> None:
        """Nothing runs, and the leader was told of its charge; or it is `until`."""
        calls, scheduler, loop = self.calls, self.scheduler, asyncio.get_running_loop()
        while loop.time() < until and (  # noqa: ASYNC110
            calls.live or len(calls.reckonings) or (scheduler.num_unsent and scheduler.is_connected)
        ):
            await asyncio.sleep(_EMPTY_POLL_S)

    async def told_to_leave(self) -> None:
        await self._leaving.wait()

    async def failed(self) -> None:
        """Waits until a background task ends, which only a bug makes it do, and raises what it raised."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in self._tasks:
            if task in done:
                task.result()

    def _leader_changed(self) -> None:
        self.scheduler.leader_changed()

    def _workers_changed(self) -> None:
        self.channels.retain([record.address for record in self.directory.workers.values()])

    async def _tell_metrics(self) -> None:
        guard, metrics, loop = self.calls.guard, self.calls.metrics, asyncio.get_running_loop()
        while True:
            metrics.standing(
                live=len(self.calls.live),
                workers=len(self.directory.workers),
                has_leader=self.scheduler.is_connected,
            )
            if self.ledger is not None:
                self.ledger.tell(metrics)
            metrics.budgets(self.budgets.without_effect)
            metrics.refusing(guard.circuits(loop.time()), guard.num_quarantined(loop.time()))
            await asyncio.sleep(RECORD_S)

    async def _keep_trials(self) -> None:
        """What was seen of versions in a rollout goes to the scheduler's leader, which judges."""
        calls, loop = self.calls, asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TRIALS_S)
            calls.metrics.rollouts_stand(self.directory.rollouts)
            calls.trials.stand(self.directory.trials)
            for answer in calls.feedback.due(loop.time()):
                calls.scored(answer)
            if self.scheduler.is_connected:
                for key, counts in calls.trials.take().items():
                    self.scheduler.tell_trial(trial_counts(*key, counts))

    async def _close_steps(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        self.calls.recent.samples.begin(due)
        while True:
            due += STEP_S
            await asyncio.sleep(due - loop.time())
            self.calls.close_step()

    async def _keep_token_keys(self) -> None:
        await self._token_keys.run()
        await asyncio.get_running_loop().create_future()  # where there are no issuers

    async def _keep_house(self) -> None:
        # Adapter files go that two looks in a row found unregistered: what was queued before the first could
        # still be loaded.
        registered_before: list[AdapterUid] | None = None
        while True:
            try:
                registered_before = await self._collect(registered_before)
            except (ServiceUnavailable, OSError, ValueError) as e:
                # Without the whole list nothing is known to be unused.
                _LOG.warning("adapter files are not collected this time: %s", e)
            await asyncio.sleep(HOUSEKEEPING_S)

    async def _collect(self, registered_before: list[AdapterUid] | None) -> list[AdapterUid]:
        now_unix_s = self._clock.now_unix_s()
        await self._files.sweep(now_unix_s=now_unix_s, older_than_s=FILES_GRACE_S)
        listing = await self._store.list(keys.ADAPTERS)
        records = [AdapterRecord.stored(kv) for kv in listing.kvs]
        lines = [record.line for record in records]
        registered = [
            adapter_uid(AdapterDigest(version.uid), TenantId(record.tenant_id))
            for record in records
            for version in record.line.served
        ]
        if registered_before is not None:
            in_use = [*registered, *registered_before]
            removed = await self._files.collect(in_use, now_unix_s=now_unix_s, older_than_s=FILES_GRACE_S)
            if removed:
                _LOG.info("removed %d unused adapters' files", len(removed))
            await self._collect_documents(lines, now_unix_s - FILES_GRACE_S)
        return registered

    async def _collect_documents(self, lines: Sequence[Line], before_unix_s: float) -> None:
        reports = {version.report for line in lines for version in line.versions}
        tenants = (await self._store.list(keys.TENANTS)).kvs
        tenant_ids = {kv.key.removeprefix(keys.TENANTS) for kv in tenants}
        for document in await self._documents.held():
            is_used = document.name in reports if document.kind == REPORTS else document.tenant_id in tenant_ids
            if not is_used and document.changed_unix_s < before_unix_s:
                await self._documents.delete(document.path)
