"""The requests in the engine until nothing of them is left, and what keeps each:

    load       its adapter is not on the device yet
    be paused  its reader does not read
    linger     a finished choice's blocks are in a step or copy
    close      all choices are finished, and one lingers

EngineCore writes it.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Set as AbstractSet

from manylora_shared.ids import RequestId, TenantId

from manylora_worker.engine.outbox import RequestEnd
from manylora_worker.kinds.api import EngineRequest
from manylora_worker.kinds.flow import CacheScope
from manylora_worker.kinds.sequence import GroupTimes, Sequence, SequenceGroup, SequenceStatus

_CHOICES_BOUND = 64  # sequence ids: arrival x this + choice


class RequestTable:
    def __init__(self, *, shares_prompts: bool = True) -> None:
        """shares_prompts: a request's choices share the prompt's blocks."""
        self._shares_prompts = shares_prompts
        self._groups: dict[RequestId, SequenceGroup] = {}
        self._sequences: dict[int, Sequence] = {}
        self._arrivals = 0
        self._num_unfinished = 0
        self._num_paused = 0
        self._loading: dict[RequestId, SequenceGroup] = {}
        self._loading_version = 0
        self._lingering: dict[Sequence, None] = {}
        self._closing: dict[RequestId, RequestEnd] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._groups

    def __getitem__(self, request_id: RequestId) -> SequenceGroup:
        return self._groups[request_id]

    def find(self, request_id: RequestId) -> SequenceGroup | None:
        return self._groups.get(request_id)

    def sequence(self, sequence_id: int) -> Sequence:
        return self._sequences[sequence_id]

    @property
    def ids(self) -> list[RequestId]:
        """Oldest first."""
        return list(self._groups)

    @property
    def groups(self) -> Collection[SequenceGroup]:
        """Oldest first."""
        return self._groups.values()

    @property
    def sequences(self) -> Collection[Sequence]:
        """Oldest first; finished ones too."""
        return self._sequences.values()

    @property
    def num_unfinished(self) -> int:
        return self._num_unfinished

    @property
    def num_active(self) -> int:
        """Requests that are not paused."""
        return len(self._groups) - self._num_paused

    def add(self, request: EngineRequest, cache_scope: CacheScope, max_output_tokens: int, now: float) -> SequenceGroup:
        assert request.request_id not in self._groups
        self._arrivals += 1
        group = SequenceGroup(request, cache_scope, self._arrivals, GroupTimes(added_s=now), self._shares_prompts)
        for choice in range(request.n):
            sequence = Sequence(self._arrivals * _CHOICES_BOUND + choice, group, choice, max_output_tokens)
            if request.emitted and request.emitted[choice] is None:
                sequence.move_to(SequenceStatus.FINISHED)
            group.sequences.append(sequence)
            self._sequences[sequence.sequence_id] = sequence
        self._groups[request.request_id] = group
        self._num_unfinished += group.num_unfinished
        return group

    def leave_scope(self, tenant_id: TenantId) -> None:
        """Its requests that are here find nothing in the prefix cache any more, and leave nothing there."""
        for group in self._groups.values():
            group.has_left_scope |= group.request.tenant_id == tenant_id

    def remove(self, group: SequenceGroup) -> None:
        del self._groups[group.request.request_id]
        self._num_paused -= group.is_paused
        self.load_over(group)
        for sequence in group.sequences:
            del self._sequences[sequence.sequence_id]

    # -- what keeps a request from going on

    @property
    def loading(self) -> Collection[SequenceGroup]:
        return self._loading.values()

    @property
    def loading_version(self) -> int:
        """Grows with each change of `loading`."""
        return self._loading_version

    def load_begun(self, group: SequenceGroup) -> None:
        self._loading[group.request.request_id] = group
        self._loading_version += 1

    def load_over(self, group: SequenceGroup) -> None:
        if self._loading.pop(group.request.request_id, None) is not None:
            self._loading_version += 1

    def set_paused(self, group: SequenceGroup, *, is_paused: bool) -> None:
        assert group.is_paused != is_paused
        group.is_paused = is_paused
        self._num_paused += 1 if is_paused else -1

    # -- what keeps a request from being let go

    @property
    def lingering(self) -> AbstractSet[Sequence]:
        return self._lingering.keys()

    @property
    def closing(self) -> AbstractSet[RequestId]:
        """`let_go` will tell their end."""
        return self._closing.keys()

    def finished(self, sequence: Sequence) -> bool:
        """Whether the choice lingers."""
        self._num_unfinished -= 1
        lingers = bool(sequence.num_steps_in_flight or sequence.is_copying)
        if lingers:
            self._lingering[sequence] = None
        return lingers

    def all_finished(self, group: SequenceGroup, end: RequestEnd) -> bool:
        """Whether none lingers; else `let_go` tells the end."""
        lingers = self._lingers(group)
        if lingers:
            self._closing[end.request_id] = end
        return not lingers

    def linger_no_more(self) -> list[Sequence]:
        """Whose steps and copies are over."""
        return [s for s in self._lingering if not (s.num_steps_in_flight or s.is_copying)]

    def let_go(self, sequence: Sequence) -> RequestEnd | None:
        """Its blocks are free. Returns its request's end if that was the last."""
        del self._lingering[sequence]
        group = sequence.group
        return None if self._lingers(group) else self._closing.pop(group.request.request_id, None)

    def _lingers(self, group: SequenceGroup) -> bool:
        return any(sequence in self._lingering for sequence in group.sequences)

    def check_invariants(self) -> None:
        for group in self._groups.values():
            assert (group.leader is None) == (group.request.request_id in self._closing), "an ended request was kept"
            assert all(self._sequences.get(s.sequence_id) is s for s in group.sequences)
        assert len(self._sequences) == sum(len(g.sequences) for g in self._groups.values())
        assert self._num_paused == sum(g.is_paused for g in self._groups.values())
        assert self._num_unfinished == sum(g.num_unfinished for g in self._groups.values())
        assert self._loading.keys() <= self._groups.keys()
