"""The fair-scheduling policy as its users see it: who is next, by one virtual clock.

Start-time fair queuing (Goyal, Vin, Cheng 1996; with several servers SFQ(D), Jin, Chase, Kaur 2004) over costs that are
known only afterwards. `reference.py` is for some hundred flows (the worker's units, the router's loop, the adapters'
loads), `fair_queue.py` for tens of thousands (the scheduler). Their bound and its proof: docs/decisions/0008.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, Protocol, TypeVar

TAG_SCALE = 1 << 40
"""Virtual time of one unit of cost at weight 1. Weights are far smaller, so TAG_SCALE // weight is as good as exact."""

F_contra = TypeVar("F_contra", bound=Hashable, contravariant=True)
I = TypeVar("I", bound=Hashable)  # noqa: E741
P = TypeVar("P")


class Share(NamedTuple):
    """What a flow is entitled to. Boosts are in units of cost, and the fast queue's alone: `base` is there from the
    beginning; `cap` is the most by which a flow is ever preferred beyond its tag, and what that adds to the bound."""

    weight: int
    base: int = 0
    cap: int = 0


class Rank(NamedTuple):
    """An item's place inside its flow: lowest first. `order` is unique inside the flow."""

    urgency: int
    due_us: int
    order: int


class Pick(NamedTuple, Generic[I, P]):
    """What `select` chose; `dispatch` takes it."""

    item: I
    place: P
    """What the test returned for it."""
    floor: int
    """The least un-boosted tag of a flow that could have been started."""
    passed_over: I | None
    """The item that would have been chosen if it could be started."""


class Fairness(Protocol[F_contra, I]):
    """Items in flows. An item is queued, then either removed, or dispatched and settled.

    A flow f has a weight phi_f, a settled tag a_f and the cost R_f that its running items have reserved. Flows are
    compared by vt_f = a_f + R_f / phi_f, then by who came first. Exact integers: a cost c counts
    c * (TAG_SCALE // phi_f).

        push      on a flow without queued items: V = max(V, a_g of the other queued flow g with the least vt_g), and
                  vt_f = max(vt_f, V), so that idling saves nothing up
        select    argmin of vt_f over the flows whose first item can be started now
        dispatch  V = max(V, that least vt_f), before the charge; then R_f += reserve
        settle    what is left of the item's reservation leaves R_f, and what it cost joins a_f
        share     a new weight leaves vt_f as it is: R_f counts by the new weight, and a_f makes up for the difference
        forgo     as a push on a flow without queued items: f could not start any by its own doing, and keeps no credit
        idle      a flow without items and with vt_f <= V is forgotten; when no item is left at all, V passes every tag
    """

    @property
    def virtual_time(self) -> int:
        """The clock V. Never falls."""

    @property
    def num_queued(self) -> int: ...

    @property
    def num_running(self) -> int: ...

    def tag_of(self, flow: F_contra) -> int:
        """V for a flow that is not remembered: it would start there."""

    def has_come_as_far(self, flow: F_contra, as_other: F_contra) -> bool:
        """Whether a flow's tag is no less than another's settled one, which is that one's tag if nothing of it ran."""

    def reserved_by(self, flow: F_contra) -> int: ...

    def queued_in(self, flow: F_contra) -> int: ...

    def push(self, item: I, flow: F_contra, *, share: Share, rank: Rank) -> None:
        """Queues an item; the flow has this share from now on."""

    def remove(self, item: I) -> None:
        """Forgets a queued item."""

    def select(self, fits: Callable[[I], P | None]) -> Pick[I, P] | None:
        """The item to start next. `fits` returns where an item would start, or None. Changes nothing."""

    def dispatch(self, pick: Pick[I, P], reserve: int) -> None:
        """Starts what `select` chose just before, and reserves its cost."""

    def settle(self, item: I, cost: int = 0) -> None:
        """A running item has ended, however it did. Who queues the flow's next item before that keeps it backlogged."""

    def set_share(self, flow: F_contra, share: Share) -> None:
        """Of a flow that is not remembered: nothing."""

    def forgo(self, flow: F_contra) -> None: ...

    def check_invariants(self) -> None: ...
