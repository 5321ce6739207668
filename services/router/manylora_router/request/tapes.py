"""What a request asked and was answered, as it goes by, for tenants whose policies keep it. Holds nothing of others."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from manylora_shared.ids import TenantId
from manylora_shared.tenancy.policy import TenantPolicy

from manylora_router.guard.admission import ChatPrompt, RequestInput, TextPrompt
from manylora_router.request.frames import Frame

MAX_TEXT_CHARS = 1 << 18  # of a prompt, and of each answer; what is beyond is not kept
MAX_USER_CHARS = 256


@dataclass(frozen=True)
class KeptText:
    """user: as the caller named its end user. prompt: empty where it was token ids."""

    tenant: TenantId
    request_id: str
    at_unix_s: float
    user: str
    adapter: str
    prompt: str
    answers: tuple[str, ...]  # by choice
    is_whole: bool  # the answer ended, and nothing of either was cut off


class Tapes:
    """take: None: nothing is kept, whatever policies say."""

    def __init__(
        self,
        policy_of: Callable[[TenantId], TenantPolicy | None],
        now_unix_s: Callable[[], float],
        take: Callable[[KeptText], None] | None,
    ) -> None:
        self._policy_of = policy_of
        self._now_unix_s = now_unix_s
        self._take = take

    def begin(self, tenant: str, request: RequestInput, request_id: str) -> Tape | None:
        """None: it is not kept."""
        policy = self._policy_of(TenantId(tenant)) if self._take is not None and not request.is_own else None
        if policy is None or self._take is None or not policy.security.data_retention_days:
            return None
        return Tape(policy.tenant_id, request, request_id, self._now_unix_s(), self._take)


class Tape:
    def __init__(
        self,
        tenant: TenantId,
        request: RequestInput,
        request_id: str,
        at_unix_s: float,
        take: Callable[[KeptText], None],
    ) -> None:
        self._tenant = tenant
        self._request = request
        self._request_id = request_id
        self._at_unix_s = at_unix_s
        self._take = take
        self._answers: dict[int, list[str]] = {}
        self._chars: dict[int, int] = {}
        self._has_ended = False

    def told(self, frames: Sequence[Frame]) -> None:
        for frame in frames:
            delta = frame.delta
            if delta is not None and delta.text:
                before = self._chars.get(delta.choice, 0)
                self._chars[delta.choice] = before + len(delta.text)
                if before < MAX_TEXT_CHARS:
                    self._answers.setdefault(delta.choice, []).append(delta.text[: MAX_TEXT_CHARS - before])
            self._has_ended |= frame.finished is not None

    def end(self) -> None:
        prompt = _text_of(self._request)
        cut = len(prompt) > MAX_TEXT_CHARS or any(chars > MAX_TEXT_CHARS for chars in self._chars.values())
        answers = [self._answers.get(choice, []) for choice in range(max(self._answers, default=-1) + 1)]
        self._take(
            KeptText(
                self._tenant,
                self._request_id,
                self._at_unix_s,
                self._request.user[:MAX_USER_CHARS],
                self._request.adapter,
                prompt[:MAX_TEXT_CHARS],
                tuple("".join(parts) for parts in answers),
                self._has_ended and not cut,
            )
        )


def _text_of(request: RequestInput) -> str:
    if isinstance(request.prompt, TextPrompt):
        return request.prompt.text
    if isinstance(request.prompt, ChatPrompt):
        return json.dumps(
            [{"role": role, "content": content} for role, content in request.prompt.messages], ensure_ascii=False
        )
    return ""
