"""What the scheduler knows of one request, and its life here. Prompts and tokens never come here.

queued --grant--> granted --the worker reports it--> running --its end--> gone
  |                  |--given back; not reported in time; worker lost---> gone
  |--withdrawn; refused; its router's stream lost-----------------------> gone
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from manylora_shared.fairness.seam import Rank
from manylora_shared.ids import DEFAULT_POOL, AdapterKey, QosClass, RequestId, RouterId, TenantId, WorkerId
from manylora_shared.tenancy.key_limits import KeyLimits

from manylora_scheduler.core.timers import Timed

if TYPE_CHECKING:
    from manylora_scheduler.core.flows import KnownFlow

_AT_THE_HEAD = -1_000_000  # of its flow, whatever the priorities are
PATIENCE_S = 60.0  # the deadline of a request without one, as to its place in its flow


class FlowKey(NamedTuple):
    tenant_id: TenantId
    qos_class: QosClass


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    request_id: RequestId
    router_id: RouterId
    flow: FlowKey
    prompt_tokens: int
    max_new_tokens: int  # over all choices
    sequences: int = 1
    priority: int = 0  # higher is sooner, inside its flow
    adapter_uid: AdapterKey | None = None
    adapter_id: str = ""  # for traces
    deadline: float | None = None  # by the clock that `Core.apply` is given
    is_resumed: bool = False  # a worker had begun it: its prompt is charged already
    traceparent: str = ""
    enqueued_ns: int = 0  # Unix time, for traces; 0 while they are off
    pool: str = DEFAULT_POOL
    limits: KeyLimits | None = None  # of the key that asked; None: it has none of its own
    adapter_rank: int = 0  # 0: it is not known, or the base model


class Phase(enum.Enum):
    QUEUED = "queued"
    GRANTED = "granted"  # the worker has not reported it yet
    CLOSING = "closing"  # as GRANTED, and the router is done with it: the worker may never have seen it
    RUNNING = "running"  # only the worker's own word ends it


QUEUED, GRANTED, CLOSING, RUNNING = Phase  # at hand: asking an enum for a member takes longer than a call


class Ticket(Timed):
    """One attempt at one request: the item of the fair queue and of the other books."""

    __slots__ = ("attempt", "blocks", "enqueued_at", "granted_at", "is_wanted", "known", "order", "phase", "request",
                 "session", "waits_since", "worker_id")  # fmt: skip

    def __init__(
        self,
        request: QueuedRequest,
        known: KnownFlow,
        session: int,
        order: int,
        attempt: int,
        enqueued_at: float,
        waits_since: float,
    ) -> None:
        self.request = request
        self.known = known  # read by `Flows.known_of`
        self.session = session  # the router's stream that asked for it, or got its grant last
        self.order = order  # its place inside its flow; an attempt after an unused grant keeps the first's
        self.attempt = attempt
        self.enqueued_at = enqueued_at
        self.waits_since = waits_since
        self.phase = QUEUED
        self.is_wanted = True  # its router is not done with it; written by `Tickets` alone
        self.due_in = None
        self.worker_id: WorkerId | None = None
        self.blocks = 0  # while it is granted: KV blocks to begin with
        self.granted_at = 0.0


class Need(NamedTuple):
    """What it takes to start a request. Requests of equal need are placed alike."""

    sequences: int
    prompt_tokens: int  # rounded up to four significant bits, so that there are few distinct needs
    router_id: RouterId


def need_of(request: QueuedRequest) -> Need:
    prompt_tokens = request.prompt_tokens
    if prompt_tokens > 15:
        step = 1 << (prompt_tokens.bit_length() - 4)
        prompt_tokens = -(-prompt_tokens // step) * step
    return _need(request.sequences, prompt_tokens, request.router_id)


@functools.lru_cache(maxsize=16_384)
def _need(sequences: int, prompt_tokens: int, router_id: RouterId) -> Need:
    return Need(sequences, prompt_tokens, router_id)


def to_us(seconds: float) -> int:
    return int(1e6 * seconds)


def rank_of(ticket: Ticket) -> Rank:
    deadline = ticket.request.deadline
    due = ticket.waits_since + PATIENCE_S
    if deadline is not None and deadline < due:
        due = deadline
    place = -ticket.request.priority if not ticket.request.is_resumed else _AT_THE_HEAD
    return tuple.__new__(Rank, (place, int(1e6 * due), ticket.order))  # one a request: no call more


def urgent_us_of(ticket: Ticket) -> int | None:
    # A request is urgent once half of the time that its caller gave it has gone by in the queue.
    deadline = ticket.request.deadline
    if deadline is None:
        return None
    return int(1e6 * (ticket.enqueued_at + (deadline - ticket.enqueued_at) / 2))


class OutputEstimate:
    """Two sums that fade with each finished request."""

    __slots__ = ("_finished", "_tokens")

    _UNIT: ClassVar = 1 << 16
    _MEMORY: ClassVar = 16  # requests after which an old one has faded to a third

    def __init__(self) -> None:
        self._tokens = 0
        self._finished = 0

    def count_tokens(self, tokens: int) -> None:
        self._tokens += tokens * self._UNIT

    def count_finished(self) -> None:
        self._finished += self._UNIT
        if self._finished > self._MEMORY * self._UNIT:
            self._tokens -= self._tokens // self._MEMORY
            self._finished -= self._finished // self._MEMORY

    def expect(self, max_new_tokens: int) -> int:
        # Where nothing is known yet, all that the request may have is expected.
        if not self._finished:
            return max_new_tokens
        expected = -(-self._tokens // self._finished)
        if expected < 1:
            return min(1, max_new_tokens)
        return expected if expected < max_new_tokens else max_new_tokens
