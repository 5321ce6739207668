"""The fair-scheduling policy as its users see it: who is next, by one virtual clock.

Start-time fair queuing (Goyal, Vin, Cheng 1996; SFQ(D), Jin, Chase, Kaur 2004) over costs known only afterwards.
Bound and proof: docs/decisions/0008.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, Protocol, TypeVar

# virtual time of one unit of cost at weight 1; weights are far smaller, so that TAG_SCALE // weight is precise
TAG_SCALE = 1 << 40

F_contra = TypeVar("F_contra", bound=Hashable, contravariant=True)
I = TypeVar("I", bound=Hashable)  # noqa: E741
P = TypeVar("P")


class Share(NamedTuple):
    """What a flow is entitled to. Boosts are in units of cost."""

    weight: int
    base: int = 0  # from the beginning
    cap: int = 0  # the most by which a flow is ever preferred beyond its tag


class Rank(NamedTuple):
    """Lowest first; `order` is unique inside the flow."""

    urgency: int
    due_us: int
    order: int


class Pick(NamedTuple, Generic[I, P]):
    item: I
    place: P  # what the test returned for it
    floor: int  # the least un-boosted tag of a flow that could have been started
    passed_over: I | None  # what would have been chosen if it could be started


class Fairness(Protocol[F_contra, I]):
    """Items in flows. An item is queued, then either removed, or dispatched and settled.

    Flow f has weight phi_f, settled tag a_f, reserved cost R_f and tag vt_f = a_f + R_f / phi_f; ties go by age.
    In exact integers a cost c counts c * (TAG_SCALE // phi_f).

    1. push on a flow without queued items: V = max(V, a_g of the other queued g with the least vt_g), then
       vt_f = max(vt_f, V).
    2. select: argmin of vt_f over the flows whose first item can be started now.
    3. dispatch: V = max(V, that least vt_f), before the charge; then R_f += reserve.
    4. settle: what is left of the reservation leaves R_f, and the cost joins a_f.
    5. set_share: vt_f stays; R_f counts by the new weight, and a_f makes up for the difference.
    6. forgo: as a push on a flow without queued items: f keeps no credit.
    7. idle: f without items and with vt_f <= V is forgotten; when no item is left at all, V passes every tag.
    """

    @property
    def virtual_time(self) -> int:
        """Never falls."""

    @property
    def num_queued(self) -> int: ...

    @property
    def num_running(self) -> int: ...

    def tag_of(self, flow: F_contra) -> int:
        """V for a flow that is not remembered."""

    def has_come_as_far(self, flow: F_contra, as_other: F_contra) -> bool:
        """Whether a flow's tag is no less than another's settled one."""

    def reserved_by(self, flow: F_contra) -> int: ...

    def queued_in(self, flow: F_contra) -> int: ...

    def push(self, item: I, flow: F_contra, *, share: Share, rank: Rank) -> None:
        """The flow has this share from now on."""

    def remove(self, item: I) -> None:
        """Forgets a queued item."""

    def select(self, fits: Callable[[I], P | None]) -> Pick[I, P] | None:
        """The item to start next. `fits` returns where an item would start, or None. Changes nothing."""

    def dispatch(self, pick: Pick[I, P], reserve: int) -> None:
        """Starts what `select` chose just before."""

    def settle(self, item: I, cost: int = 0) -> None:
        """A flow whose next item is queued before this stays backlogged."""

    def set_share(self, flow: F_contra, share: Share) -> None:
        """Does nothing for a flow that is not remembered."""

    def forgo(self, flow: F_contra) -> None: ...

    def check_invariants(self) -> None: ...
