"""Whose blocks a sequence gets beyond free ones; takes nothing itself. From parked sequences, in this order:

1. its own tenant's, the least recently run first;
2. for a tenant within its soft share: those of tenants above theirs, in proportion to the excess;
3. those of flows that lead by THETA times the recompute, the greatest tag first.

Reserves and the taker's hard cap stand; paused sequences give way first (decision 15). Where parked sequences are too
few, and those with slots would be enough, what is free is kept for the first in order until their quanta end.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from manylora_shared.fairness.costs import PROMPT_TOKEN_COST
from manylora_shared.fairness.seam import TAG_SCALE, Fairness
from manylora_shared.ids import TenantId

from manylora_worker.kinds.flow import FlowKey
from manylora_worker.kinds.sequence import Sequence
from manylora_worker.memory.block_pool import BlockPool
from manylora_worker.memory.swapping import Swapper
from manylora_worker.memory.tenant_shares import TenantShares
from manylora_worker.planning.slots import Slots

THETA = 3  # lower follows the shares faster, higher computes less again
# A twenty-fifth of all blocks stays free when a sequence is admitted beside others, for these to grow into. With a
# hundredth, nearly twice as much is computed again.
_WATERMARK_DIVISOR = 25


class Room(NamedTuple):
    num_blocks: int
    victims: SequenceOf[Sequence]  # who gives its own up
    is_now: bool = True  # there as soon as the victims are evicted; if not: when copies to the host are over


class _Rights(NamedTuple):
    """Of a taker's tenant, with what is taken."""

    is_within_reserve: bool
    is_within_soft: bool


class Reclaim:
    """queue: for tags; parked: who can give up blocks; paused: who gives way to anybody; slots: whose quanta end."""

    def __init__(
        self,
        pool: BlockPool,
        shares: TenantShares,
        swapper: Swapper,
        queue: Fairness[FlowKey, int],
        parked: Iterable[Sequence],
        paused: Set[Sequence],
        slots: Slots,
    ) -> None:
        self._pool = pool
        self._shares = shares
        self._swapper = swapper
        self._queue = queue
        self._parked = parked
        self._paused = paused
        self._slots = slots
        self.claims: dict[TenantId, int] = {}  # blocks that are kept for a tenant's reserve
        self.awaited: dict[Sequence, int] = {}  # blocks that are kept for sequences that wait for copies to be over
        self.claimant: Sequence | None = None  # that waits for quanta to end
        self.num_claimed = 0  # free blocks that are kept for it, as far as they are there
        self.waits = False  # the next one takes from a step in flight: nothing more is started in this plan
        self.is_forced = False  # whoever asks gets what it asks for, reserves and leads aside
        self._is_short = False  # a sequence without blocks was refused those of others
        self.was_short = False  # in this plan somebody wanted more blocks than are free

    def begin_plan(self) -> None:
        """Who still wants what was kept asks again."""
        self.forget_kept()
        self.waits = self.is_forced = self._is_short = self.was_short = False

    def forget_kept(self) -> None:
        self.claims, self.awaited = {}, {}
        self.claimant, self.num_claimed = None, 0

    def will_hold(self, tenant_id: TenantId) -> int:
        """Without what leaves for the host."""
        return self._pool.held_by(tenant_id) - self._swapper.num_leaving_of(tenant_id)

    def room(
        self,
        taker: Sequence,
        num_blocks: int,
        *,
        num_joined: int,
        may_evict: bool,
        may_swap: bool,
        is_beside_others: bool,
    ) -> Room | None:
        """None: not in this plan. Takes nothing.

        Args:
            num_joined: blocks of other tenants that it will hold too.
            is_beside_others: a new sequence leaves others room to grow.
        """
        victims = self._choose_victims(
            taker, num_blocks, num_joined=num_joined, may_evict=may_evict, is_beside_others=is_beside_others
        )
        if victims is None:
            return None
        if any(victim.num_steps_in_flight for victim in victims):
            self.waits = True
            return None
        if self.is_forced or not num_blocks:
            return Room(num_blocks, victims)
        if may_swap and any(self._swapper.pays(victim) for victim in victims):
            return Room(num_blocks, victims, is_now=False)
        freed = sum(self._freed_by(victim) for victim in victims)
        given_up = sum(self._given_up_by(victim) for victim in victims if victim.tenant_id == taker.tenant_id)
        pool = self._pool
        held = pool.held_by(taker.tenant_id) + num_joined + num_blocks - given_up
        is_now = num_blocks <= pool.num_free + freed and held <= self._shares.hard(taker.tenant_id)
        return Room(num_blocks, victims, is_now)

    def _choose_victims(
        self, taker: Sequence, num_blocks: int, *, num_joined: int, may_evict: bool, is_beside_others: bool
    ) -> list[Sequence] | None:
        """In the module's order, those in flight too; None: impossible."""
        pool, shares = self._pool, self._shares
        tenant_id = taker.tenant_id
        held = self.will_hold(tenant_id) + num_joined
        is_new = taker.is_out
        kept = sum(blocks for claimer, blocks in self.claims.items() if claimer != tenant_id) if self.claims else 0
        kept += sum(blocks for other, blocks in self.awaited.items() if other is not taker) if self.awaited else 0
        is_within_reserve = held + num_blocks <= shares.reserve(tenant_id)
        if is_new and not is_within_reserve and is_beside_others:
            kept += min(pool.num_blocks // _WATERMARK_DIVISOR, pool.num_blocks - num_blocks)
        over = held + num_blocks - shares.hard(tenant_id)
        num_free = pool.num_free + self._swapper.num_leaving
        if not is_within_reserve and taker is not self.claimant:  # nobody evicts for the claimant but itself
            num_free = max(0, num_free - self.num_claimed)
        short = num_blocks + kept - num_free if num_blocks else 0
        self.was_short |= short > 0
        if over <= 0 and short <= 0:
            return []
        if not may_evict or not num_blocks:
            return None
        first = (self._queue.tag_of(taker.flow), taker.order)
        own: list[Sequence] = []
        others: list[Sequence] = []
        for parked in self._parked:
            if parked is taker:
                continue
            if parked.tenant_id != tenant_id:
                others.append(parked)
            elif self.is_forced or parked in self._paused or (self._queue.tag_of(parked.flow), parked.order) > first:
                own.append(parked)
        victims: list[Sequence] = []
        own.sort(key=lambda s: (s not in self._paused, least_recent(s)))
        for victim in own:
            if over <= 0 and short <= 0:
                return victims
            over, short = over - self._given_up_by(victim), short - self._freed_by(victim)
            victims.append(victim)
        if over > 0 and not self.is_forced:
            return None
        # Who comes later in the order leads by less, so after one refusal there is nothing for them. Only a soft share
        # gives a right that does not follow the order, and only paused sequences give way to anybody.
        follows_order = is_new and not (is_within_reserve or shares.has_soft or self._paused or self.is_forced)
        if short > 0 and not (follows_order and self._is_short):
            rights = _Rights(is_within_reserve, is_within_soft=held + num_blocks <= shares.soft(tenant_id))
            short = self._take_from_others(taker, others, short, victims, rights)
            if short > 0 and is_new and not is_within_reserve and self.claimant is None:
                self._claim(taker, num_blocks, short, rights)
        self._is_short |= follows_order and short > 0
        # Blocks that victims share with one another come free only with the last of them, and are not counted: where
        # nothing else runs, all of them go.
        return victims if self.is_forced or (over <= 0 and short <= 0) else None

    def _claim(self, taker: Sequence, num_blocks: int, short: int, rights: _Rights) -> None:
        """Else small requests would take what comes free, quantum by quantum, and it would wait for ever."""
        running = [unit.sequence for unit in self._slots.units if not unit.num_held_up]
        first = (self._queue.tag_of(taker.flow), taker.order)
        own = [s for s in running if s.tenant_id == taker.tenant_id and (self._queue.tag_of(s.flow), s.order) > first]
        short -= sum(map(self._freed_by, own))
        others = [sequence for sequence in running if sequence.tenant_id != taker.tenant_id]
        if self._take_from_others(taker, others, short, [], rights) <= 0:
            self.claimant, self.num_claimed = taker, num_blocks

    def _take_from_others(
        self,
        taker: Sequence,
        others: SequenceOf[Sequence],
        short: int,
        victims: list[Sequence],
        rights: _Rights,
    ) -> int:
        """Returns how many blocks are still short."""
        left = {tenant: self.will_hold(tenant) for tenant in {s.tenant_id: None for s in others}}
        excess = {tenant: held - self._shares.soft(tenant) for tenant, held in left.items()}
        taken = dict.fromkeys(left, 0)
        tags = {flow: self._queue.tag_of(flow) for flow in {s.flow: None for s in others}}
        eligible = others if self.is_forced else []
        if not self.is_forced:
            tag = self._queue.tag_of(taker.flow)
            eligible = [
                other
                for other in others
                if rights.is_within_reserve
                or other in self._paused
                or (rights.is_within_soft and excess[other.tenant_id] > 0 and other.has_worked)
                or self._is_behind(other, tags[other.flow], taker, tag)
            ]
        # Stable: inside a tenant, paused ones first, then the flow with the greatest tag, and of that the youngest.
        eligible = sorted(eligible, key=lambda s: (s in self._paused, tags[s.flow], s.order), reverse=True)
        while short > 0 and eligible:
            # Proportional: next is the tenant of whose excess the least share was taken, then the greatest excess.
            above = [s for s in eligible if excess[s.tenant_id] > taken[s.tenant_id]]
            victim = (
                min(above, key=lambda s: (taken[s.tenant_id] / excess[s.tenant_id], -excess[s.tenant_id]))
                if above
                else eligible[0]
            )
            eligible.remove(victim)
            given_up = self._given_up_by(victim)
            tenant, reserve = victim.tenant_id, self._shares.reserve(victim.tenant_id)
            # Between two reserves the sequence is the grain: one that stands partly above its tenant's may go.
            is_protected = left[tenant] <= reserve if rights.is_within_reserve else left[tenant] - given_up < reserve
            if reserve and is_protected and not self.is_forced:
                continue
            victims.append(victim)
            left[tenant] -= given_up
            taken[tenant] += given_up
            short -= self._freed_by(victim)
        return short

    def _is_behind(self, other: Sequence, other_tag: int, taker: Sequence, tag: int) -> bool:
        if not taker.is_out:
            return (other_tag, other.order) > (tag, taker.order)
        recompute = other.num_computed_tokens * PROMPT_TOKEN_COST
        return other_tag - tag > THETA * recompute * TAG_SCALE // self._shares.weight(other.flow)

    def _given_up_by(self, sequence: Sequence) -> int:
        """Blocks that its tenant is charged for no more."""
        tenant_id, pool = sequence.tenant_id, self._pool
        return sum(pool.is_given_up_by_holder(tenant_id, block_id) for block_id in sequence.block_table)

    def _freed_by(self, sequence: Sequence) -> int:
        return sum(self._pool.is_freed_by_holder(block_id) for block_id in sequence.block_table)


def least_recent(sequence: Sequence) -> tuple[int, int, int]:
    """Of equals, the youngest first."""
    arrival, choice = sequence.order
    return (sequence.parked_at, -arrival, -choice)
