"""Planted bugs: what the simulation must find. Each is a small change of one method of the product, as a colleague
could write it.

`MUTANTS` is the list; a mutant's `planted` puts it in for as long as a block runs. What it breaks is said in one line;
most need a fault or an interleaving to show. `first` names seeds that found it when it was last looked for: they are a
hint, and save the search. test_mutants.py plays the seeds.

A mutant is written against the product's own names. One whose method was renamed fails when this module is imported,
and one that raises what the simulation does not (TypeError, NameError) fails the gate: neither dies of itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from manylora_router.links.directory import Directory
from manylora_router.links.scheduler_client import SchedulerClient
from manylora_router.request.choices import Choices
from manylora_router.request.execution import Execution
from manylora_router.request.job import Job
from manylora_router.request.token_lease import TokenLease
from manylora_router.request.worker_stream import WorkerStream
from manylora_router.text.stop_strings import StopStringMatcher
from manylora_scheduler.app import SchedulerApp
from manylora_scheduler.core.core import Core
from manylora_scheduler.gates.quota import QuotaAuthority
from manylora_scheduler.serving.term import Term
from manylora_shared.coordination.session import Election, LeaseSession, Mirror
from manylora_shared.errors import WorkerLost
from manylora_shared.fairness.fair_queue import FairQueue
from manylora_shared.ids import adapter_uid
from manylora_shared.tenancy.policy import TenantPolicy
from manylora_shared.tenancy.quota import FlowAccount
from manylora_worker.adapters.cache import AdapterCache
from manylora_worker.adapters.room import Entry
from manylora_worker.engine.endings import Endings
from manylora_worker.hosting.runtime import Runtime
from manylora_worker.hosting.view import EngineView
from manylora_worker.kinds.api import EngineRequest
from manylora_worker.kinds.flow import CacheScope
from manylora_worker.memory.block_pool import BlockPool
from manylora_worker.memory.block_tables import BlockTables
from manylora_worker.memory.prefix_cache import PrefixCache, PrefixKeys
from manylora_worker.memory.swapping import Swapper
from manylora_worker.memory.tenant_shares import TenantShares
from manylora_worker.planning.parking import Parking
from manylora_worker.serving.control import ControlSession

Make = Callable[[Any], Any]


@dataclass(frozen=True)
class Change:
    owner: Any
    """The class or module that has the attribute."""
    attribute: str
    make: Make
    """What stands there to what is put in its place."""

    @property
    def standing(self) -> object:
        return vars(self.owner)[self.attribute]  # as it stands there: a property stays one

    @contextmanager
    def planted(self) -> Iterator[None]:
        before = self.standing
        setattr(self.owner, self.attribute, self.make(before))
        try:
            yield
        finally:
            setattr(self.owner, self.attribute, before)


@dataclass(frozen=True)
class Mutant:
    name: str
    kind: str
    """The part of the product's promises that it breaks."""
    breaks: str
    changes: tuple[Change, ...]
    first: tuple[int, ...] = ()

    @contextmanager
    def planted(self) -> Iterator[None]:
        with ExitStack() as stack:
            for change in self.changes:
                stack.enter_context(change.planted())
            yield


MUTANTS: list[Mutant] = []


def mutant(
    kind: str,
    name: str,
    owner: Any,
    attribute: str,
    breaks: str,
    *,
    first: Sequence[int] = (),
    also: Sequence[tuple[Any, str, Make]] = (),
) -> Callable[[Make], Make]:
    """Lists what is decorated: a function from the attribute as it stands to the one that is planted."""

    def add(make: Make) -> Make:
        changes = tuple(Change(*change) for change in ((owner, attribute, make), *also))
        assert all(change.attribute in vars(change.owner) for change in changes), f"{name}: there is no such attribute"
        MUTANTS.append(Mutant(name, kind, breaks, changes, tuple(first)))
        return make

    return add


IDENTITY = Mutant(
    "identity", "none", "nothing: the method does what it did", (Change(Core, "apply", lambda original: original),)
)


# ---- answers that another worker goes on with


@mutant(
    "resume",
    "lost-answer-is-given-up",
    Execution,
    "_resume",
    "an answer whose worker is lost goes on at another one",
    first=(1,),
)
def _given_up(original: Any) -> Any:
    def resume(self: Any, stream: Any, lost: Any) -> None:
        raise lost

    return resume


@mutant(
    "resume",
    "last-token-forgotten",
    Choices,
    "emitted",
    "the next worker is told every token that the caller has",
    first=(1,),
)
def _forgets_a_token(original: Any) -> Any:
    def emitted(self: Any) -> Any:
        return [tokens and tokens[:-1] for tokens in original(self)]

    return emitted


@mutant("resume", "resumed-with-another-seed", Job, "resumed", "an answer's seed stays what it was", first=(1,))
def _another_seed(original: Any) -> Any:
    def resumed(self: Any, emitted: Any) -> Any:
        job = original(self, emitted)
        return replace(job, sampling=replace(job.sampling, seed=(job.sampling.seed + 1) % 2**64))

    return resumed


@mutant(
    "resume",
    "computed-again-and-billed",
    TokenLease,
    "settle",
    "what is computed again for a resumed answer is billed to nobody",
    first=(1,),
)
def _billed_again(original: Any) -> Any:
    def settle(self: Any) -> None:
        self._least_output_tokens = self._choices.num_tokens + self._num_emitted
        original(self)

    return settle


@mutant(
    "resume",
    "emitted-tokens-drawn-again",
    EngineRequest,
    "emitted_of",
    "a worker goes on behind the tokens that were emitted",
    first=(1,),
)
def _drawn_again(original: Any) -> Any:
    def emitted_of(self: Any, choice: int) -> Any:
        return original(self, choice)[:1]

    return emitted_of


# ---- frames and text


@mutant(
    "frames",
    "rest-of-a-message-lost",
    TokenLease,
    "cover",
    "what a lease did not cover of a message never goes on",
    first=(0,),
)
def _rest_lost(original: Any) -> Any:
    async def cover(self: Any, read: Any, most_tokens: int) -> Any:
        message = await original(self, read, most_tokens)
        self._rest = None
        return message

    return cover


@mutant(
    "frames",
    "terminal-frame-doubles-a-number",
    Execution,
    "_take_frames",
    "of several frames the last has the number of the first",
    first=(2,),
)
def _doubled(original: Any) -> Any:
    def take_frames(self: Any) -> Any:
        before = self._next_frame
        frames = original(self)
        for frame in frames[-1:]:
            frame.number = before
        return frames

    return take_frames


@mutant(
    "frames",
    "lost-worker-told-as-a-bug",
    WorkerStream,
    "read",
    "a worker that is lost in mid-stream is an internal error",
    first=(17,),
)
def _as_a_bug(original: Any) -> Any:
    async def read(self: Any) -> Any:
        try:
            return await original(self)
        except WorkerLost as e:
            raise e.__cause__ or e from None

    return read


@mutant(
    "text",
    "stop-string-over-a-boundary",
    StopStringMatcher,
    "push",
    "each token's text is searched by itself for stop strings",
    first=(1,),
)
def _boundary(original: Any) -> Any:
    def push(self: Any, text: str, **more: bool) -> str:
        self._node = self._root
        return str(self.finish() + original(self, text, **more))

    return push


@mutant(
    "metering",
    "prompt-metered-unbegun",
    TokenLease,
    "used_prompt_tokens",
    "a request that no worker has begun is charged its prompt",
    first=(1,),
)
def _unbegun(original: Any) -> Any:
    return property(lambda self: self._num_prompt_tokens)


# ---- grants


@mutant(
    "grants",
    "grant-given-twice",
    Core,
    "_comes_anew",
    "what is granted is queued again when its router asks anew",
    first=(21,),
)
def _granted_twice(original: Any) -> Any:
    def comes_anew(self: Any, known: Any, event: Any) -> bool:
        if known.worker_id is not None and known.session != event.session:
            return True
        return bool(original(self, known, event))

    return comes_anew


@mutant(
    "grants",
    "lost-worker-not-settled",
    Core,
    "_on_worker_left",
    "what a lost worker ran stays reserved for its flows",
    first=(3,),
)
def _lost_worker(original: Any) -> Any:
    def on_worker_left(self: Any, worker_id: Any) -> None:
        worker = self._fleet.get(worker_id)
        if worker is not None:
            worker.running.clear()
        original(self, worker_id)

    return on_worker_left


@mutant(
    "grants",
    "dropped-grant-not-refunded",
    Core,
    "_drop_grant",
    "a grant that came to nothing keeps its reservation",
    first=(6,),
)
def _not_refunded(original: Any) -> Any:
    def drop_grant(self: Any, ticket: Any) -> None:
        worker = self._worker_of(ticket)
        worker.drop_grant(ticket)
        self._fleet.update(worker)
        if ticket.due_in is not None:
            self._moments.cancel(ticket)
        self._tickets.forget(ticket)

    return drop_grant


@mutant(
    "grants",
    "refunded-twice",
    FairQueue,
    "settle",
    "an item that did not use its reservation is refunded twice",
    first=(0,),
)
def _refunded_twice(original: Any) -> Any:
    def settle(self: Any, item: Any, cost: int = 0) -> None:
        flow = self._items[item]
        left = flow.unspent.get(item, 0)
        original(self, item, cost)
        if left and flow.reserved >= left:  # where others of its flow run
            flow.reserved -= left

    return settle


@mutant(
    "grants",
    "ended-while-away-runs-on",
    Core,
    "_on_report",
    "a snapshot names what runs, and what it no longer names is kept",
    first=(25,),
)
def _runs_on(original: Any) -> Any:
    def on_report(self: Any, event: Any) -> None:
        report = event.report
        if report.snapshot and (worker := self._fleet.get(event.worker_id)) is not None:
            missing = dict(worker.running)
            for started in report.started:
                missing.pop(started.request_id, None)
            for request_id in missing:
                del worker.running[request_id]
            original(self, event)
            worker.running.update(missing)
        else:
            original(self, event)

    return on_report


@mutant(
    "grants",
    "waiting-not-queued-again",
    SchedulerClient,
    "_exchange",
    "a new stream does not bring what waits",
    first=(3,),
)
def _not_again(original: Any) -> Any:
    async def exchange(self: Any, line: Any) -> None:
        self._outbox = deque(item for item in self._outbox if not hasattr(item, "grant"))
        await original(self, line)

    return exchange


# ---- leadership


@mutant(
    "leadership",
    "leads-past-its-lease",
    Election,
    "leads",
    "a leader leads until the store tells it that it does not",
    first=(110,),
)
def _leads_on(original: Any) -> Any:
    def leads(self: Any, now: float) -> bool:
        return self._epoch != 0

    return leads


@mutant("leadership", "clock-not-restored", SchedulerApp, "_load", "a new leader begins a new clock", first=(1,))
def _not_restored(original: Any) -> Any:
    async def load(self: Any, clock: Any, election: Any, epoch: int) -> None:
        await original(self, clock, election, epoch)

    return load


# ---- the store


@mutant(
    "store",
    "lost-lease-keeps-its-keys",
    LeaseSession,
    "_lose",
    "keys that went with a lost lease are thought to stand",
    first=(3,),
)
def _keys_stand(original: Any) -> Any:
    def lose(self: Any, why: str) -> None:
        self._lease.forget()

    return lose


@mutant(
    "store",
    "compaction-skips-changes",
    Mirror,
    "_replace",
    "what changed while the watch was compacted away is not read",
    first=(12,),
)
def _skips(original: Any) -> Any:
    def replace(self: Any, kvs: Any) -> None:
        if not self._revision:
            original(self, kvs)

    return replace


@mutant("store", "policy-read-once", Term, "policy_changed", "the leader reads a tenant's policy once", first=(4,))
def _once(original: Any) -> Any:
    def policy_changed(self: Any, tenant_id: Any) -> None:
        pass

    return policy_changed


@mutant("store", "adapter-known-for-ever", Directory, "line_of", "a router remembers what a name stood for", first=(6,))
def _known(original: Any) -> Any:
    def line_of(self: Any, tenant_id: Any, name: Any) -> Any:
        known = self.__dict__.setdefault("_known_lines", {})
        found = original(self, tenant_id, name)
        if found is None:
            return known.get((tenant_id, name))
        known[tenant_id, name] = found
        return found

    return line_of


# ---- endings


@mutant(
    "endings", "cancel-not-passed-on", Runtime, "abort", "a worker goes on with what its caller gave up", first=(1,)
)
def _goes_on(original: Any) -> Any:
    def abort(self: Any, request_id: Any) -> None:
        pass

    return abort


@mutant(
    "endings",
    "stream-left-open",
    WorkerStream,
    "close",
    "a router leaves the worker's stream open that it reads no more",
    first=(0,),
)
def _left_open(original: Any) -> Any:
    class Deaf:
        def cancel(self) -> None:
            pass

    def close(self: Any, **given: Any) -> None:
        self._stream = Deaf()
        original(self, **given)

    return close


@mutant(
    "endings", "deadline-not-enforced", WorkerStream, "_expire", "a request that runs outlives its deadline", first=(1,)
)
def _outlives(original: Any) -> Any:
    def expire(self: Any) -> None:
        pass

    return expire


@mutant(
    "endings", "lease-not-settled-at-a-deadline", TokenLease, "settle", "what ends unbegun keeps its lease", first=(1,)
)
def _not_settled(original: Any) -> Any:
    def settle(self: Any) -> None:
        if self._is_begun:
            original(self)

    return settle


# ---- quotas


@mutant("quotas", "extension-not-debited", FlowAccount, "serve", "a lease grows without a debit", first=(0,))
def _not_debited(original: Any) -> Any:
    def serve(self: Any, now_ns: int) -> Any:
        debit, self._debit = self._debit, lambda tokens, now_ns: None
        try:
            return original(self, now_ns)
        finally:
            self._debit = debit

    return serve


@mutant(
    "quotas",
    "rest-given-back-twice",
    FlowAccount,
    "settle",
    "what a request did not use returns to the bucket twice",
    first=(0,),
)
def _given_twice(original: Any) -> Any:
    def settle(self: Any, key: Any, used: int, now_ns: int) -> None:
        lease = self._leases[key]
        original(self, key, used, now_ns)
        if lease.tokens is not None and self.bucket is not None and used < lease.tokens:
            self.bucket.give_back(min(lease.tokens - used, lease.own_tokens), now_ns)

    return settle


@mutant(
    "quotas",
    "dead-routers-leases-kept",
    QuotaAuthority,
    "_write_off",
    "what a router had when it died stays leased",
    first=(12,),
)
def _dead_routers(original: Any) -> Any:
    def write_off(self: Any, lease: Any) -> None:
        if lease.is_queued:
            original(self, lease)

    return write_off


# ---- counters


@mutant(
    "counters",
    "counted-anew-after-a-reconnect",
    ControlSession,
    "__init__",
    "a new stream's counters begin at zero",
    first=(1,),
)
def _counted_anew(original: Any) -> Any:
    def init(self: Any, view: Any, **given: Any) -> None:
        original(self, view, **given)
        base = dict(view.flows)

        class Since:
            """The view, with counters since now."""

            def __getattr__(self, name: str) -> Any:
                return getattr(view, name)

            @property
            def flows(self) -> Any:
                zero = (0, 0)
                return {
                    flow: tokens._make(now - then for now, then in zip(tokens, base.get(flow, zero), strict=True))
                    for flow, tokens in view.flows.items()
                }

        self._view = Since()

    return init


# ---- memory


@mutant(
    "memory",
    "hard-cap-off-by-one",
    TenantShares,
    "hard",
    "a tenant may hold one block more than its hard cap",
    first=(9,),
)
def _cap(original: Any) -> Any:
    def hard(self: Any, tenant_id: Any) -> int:
        return min(self._num_blocks, int(original(self, tenant_id)) + 1)

    return hard


@mutant(
    "memory",
    "idle-block-not-cleared",
    BlockPool,
    "allocate",
    "a block of another's prefix cache is handed over uncleared",
    first=(0,),
)
def _uncleared(original: Any) -> Any:
    def allocate(self: Any, tenant_id: Any, count: int) -> Any:
        idle = self._cache.idle_blocks()
        taken = original(self, tenant_id, count)
        for block_id in taken:
            if block_id in idle:
                self._unclean.pop(block_id, None)
        return taken

    return allocate


@mutant(
    "memory", "evicted-blocks-leak", BlockTables, "lose", "an evicted sequence keeps a block that it shares", first=(9,)
)
def _evicted_leak(original: Any) -> Any:
    def lose(self: Any, sequence: Any) -> None:
        if not sequence.is_finished and any(self._pool.is_shared(block_id) for block_id in sequence.block_table):
            sequence.block_table = sequence.block_table[:-1]
        original(self, sequence)

    return lose


@mutant(
    "memory",
    "last-block-not-swapped",
    Swapper,
    "_num_computed_blocks",
    "of a swapped sequence only full blocks are copied",
    first=(3,),
)
def _last_block(original: Any) -> Any:
    def num_computed_blocks(self: Any, sequence: Any) -> int:
        return int(sequence.num_computed_tokens // self._pool.block_size)

    return num_computed_blocks


@mutant(
    "memory",
    "swap-in-reads-the-first-blocks",
    Swapper,
    "bring_back",
    "what was found in the cache comes from the host again, a shift away",
    first=(3,),
)
def _wrong_block(original: Any) -> Any:
    def bring_back(self: Any, sequence: Any, num_cached_blocks: int) -> None:
        swap = sequence.swap
        whole, behind = swap.host_blocks, len(swap.host_blocks) - num_cached_blocks
        swap.host_blocks = whole[behind:] + whole[:behind]
        original(self, sequence, num_cached_blocks)
        swap.host_blocks = whole

    return bring_back


@mutant(
    "memory",
    "prefix-of-another-adapter",
    PrefixKeys,
    "namespace",
    "what one adapter computed is found under another",
    first=(1,),
)
def _other_adapter(original: Any) -> Any:
    def namespace(self: Any, scope: Any, adapter_uid: Any) -> Any:
        return original(self, scope, None)

    return namespace


def _found_anywhere(original: Any) -> Any:
    def find(self: Any, scope: Any, key: bytes) -> Any:
        return next((published[key] for published in self._published.values() if key in published), None)

    return find


@mutant(
    "memory",
    "prefix-of-another-tenant",
    PrefixKeys,
    "namespace",
    "what one tenant computed is found by another (two guards stand before that: both are gone)",
    also=((PrefixCache, "find", _found_anywhere),),
    first=(2,),
)
def _other_tenant(original: Any) -> Any:
    def namespace(self: Any, scope: Any, adapter_uid: Any) -> Any:
        return original(self, CacheScope("everybody", is_group=True), adapter_uid)

    return namespace


@mutant(
    "memory",
    "resumes-one-token-off",
    Parking,
    "copy_ended",
    "a sequence that comes back from the host skips a token",
    first=(44,),
)
def _one_off(original: Any) -> Any:
    def copy_ended(self: Any, sequence: Any) -> None:
        is_prefill = sequence.swap.resumes_as.name == "PREFILL"
        original(self, sequence)
        if is_prefill and sequence.swap is None and sequence.num_uncomputed_tokens > 1:
            sequence.num_computed_tokens += 1

    return copy_ended


# ---- adapters


@mutant(
    "adapters", "pinned-adapter-evicted", Entry, "in_use", "only what requests use is kept on the device", first=(0,)
)
def _evicted_pin(original: Any) -> Any:
    return property(lambda self: bool(self.users))


@mutant(
    "adapters",
    "reference-of-a-waiter-leaks",
    AdapterCache,
    "release",
    "who gives up while its adapter loads still gets it",
    first=(0,),
)
def _waiter_leaks(original: Any) -> Any:
    def release(self: Any, holder: Any, now: float) -> None:
        hold = self._holds.get(holder)
        if hold is not None and holder in self._residency.entries[hold[1]].waiters:
            del self._holds[holder]
        else:
            original(self, holder, now)

    return release


@mutant(
    "adapters",
    "adapter-let-go-with-its-first-choice",
    Endings,
    "end_told_choice",
    "a request's first choice that ends lets its adapter go",
    first=(2,),
)
def _let_go(original: Any) -> Any:
    def end_told_choice(self: Any, sequence: Any, reason: Any, now: float, **given: Any) -> None:
        request = sequence.group.request
        original(self, sequence, reason, now, **given)
        if sequence.choice and sequence.group.leader is not None:
            self._adapters.release(request.request_id, now)

    return end_told_choice


@mutant(
    "memory",
    "cache-shared-without-opt-in",
    TenantShares,
    "cache_scope",
    "whose policy names no group shares no prefixes",
    first=(2,),
)
def _all_in_one_group(original: Any) -> Any:
    def cache_scope(self: Any, tenant_id: Any) -> Any:
        return CacheScope("friends", is_group=True)

    return cache_scope


@mutant(
    "adapters",
    "copies-by-content-alone",
    TenantPolicy,
    "copy_of",
    "tenants use one another's copies of an adapter, whatever their policies say",
)
def _copies_of_all(original: Any) -> Any:
    def copy_of(self: Any, digest: Any) -> Any:
        return adapter_uid(digest, None)

    return copy_of


# ---- leaders that are over, and readers


@mutant("readers", "reader-stays-paused", EngineView, "_resume", "who reads again goes on", first=(6,))
def _stays_paused(original: Any) -> Any:
    def resume(self: Any, stream: Any) -> None:
        stream.is_paused = False

    return resume


__all__ = ["IDENTITY", "MUTANTS", "Mutant"]
