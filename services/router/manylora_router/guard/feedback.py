"""Which request was whose and what answered it, for the scores that come later. Pure; owns one router's memory of it.

A tenant takes a tenth of the memory at most. A score counts once, HOLD_S after the request's first one, with the value
that the last one then had.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from manylora_shared.errors import NotFound, shown
from manylora_shared.ids import TenantId

from manylora_router.guard.admission import Adapter

MAX_ANSWERS = 50_000
MAX_OF_TENANT = MAX_ANSWERS // 10
KEPT_S = 3600.0
HOLD_S = 5.0


@dataclass(eq=False, slots=True)
class Answer:
    tenant: TenantId
    request_id: str
    adapter: Adapter | None
    ended_at: float
    score: float | None = None
    is_counted: bool = False


class Feedback:
    def __init__(self) -> None:
        self._answers: dict[str, Answer] = {}  # oldest first
        self._of_tenant: dict[TenantId, deque[Answer]] = {}  # likewise
        self._held: deque[tuple[float, Answer]] = deque()  # scores, and when they count

    def __len__(self) -> int:
        return len(self._answers)

    def answered(self, tenant: TenantId, request_id: str, adapter: Adapter | None, now: float) -> None:
        """Once for a request."""
        self._expire(now)
        own = self._of_tenant.setdefault(tenant, deque())
        if len(own) >= MAX_OF_TENANT:
            self._forget(own[0])
        elif len(self._answers) >= MAX_ANSWERS:
            self._forget(next(iter(self._answers.values())))
        answer = Answer(tenant, request_id, adapter, now)
        self._answers[request_id] = answer
        self._of_tenant.setdefault(tenant, own).append(answer)

    def score(self, tenant: TenantId, request_id: str, score: float, now: float) -> Answer:
        """Raises NotFound, in the same words whether it is another's or none."""
        self._expire(now)
        answer = self._answers.get(request_id)
        if answer is None or answer.tenant != tenant:
            raise NotFound(f"request_id: no answer {shown(request_id)} of this tenant is remembered")
        if answer.score is None:
            self._held.append((now + HOLD_S, answer))
        if not answer.is_counted:
            answer.score = score
        return answer

    def due(self, now: float) -> list[Answer]:
        """Whose scores count now."""
        found: list[Answer] = []
        while self._held and self._held[0][0] <= now:
            _, answer = self._held.popleft()
            answer.is_counted = True
            found.append(answer)
        return found

    def _expire(self, now: float) -> None:
        while self._answers and (oldest := next(iter(self._answers.values()))).ended_at <= now - KEPT_S:
            self._forget(oldest)

    def _forget(self, answer: Answer) -> None:
        del self._answers[answer.request_id]
        own = self._of_tenant[answer.tenant]
        assert own[0] is answer
        own.popleft()
        if not own:
            del self._of_tenant[answer.tenant]
