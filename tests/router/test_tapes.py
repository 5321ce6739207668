"""What goes by of a request whose tenant keeps texts."""

from __future__ import annotations

import pytest
from manylora_router.guard.admission import ChatPrompt, Prompt, RequestInput, TextPrompt, TokenPrompt
from manylora_router.request import tapes
from manylora_router.request.frames import Delta, Frame
from manylora_router.request.tapes import MAX_USER_CHARS, KeptText, Tapes
from manylora_shared.ids import TenantId
from manylora_shared.tenancy.policy import TenantPolicy, TenantSecurity

ACME = TenantId("acme")


def taken(prompt: Prompt, frames: list[Frame], *, days: int = 7, user: str = "ann") -> list[KeptText]:
    policy = TenantPolicy(ACME, security=TenantSecurity(data_retention_days=days))
    kept: list[KeptText] = []
    policies = {ACME: policy}
    tape = Tapes(policies.get, lambda: 5.0, kept.append).begin(
        "acme", RequestInput(prompt, user=user, adapter="support"), "r1"
    )
    if tape is not None:
        tape.told(frames)
        tape.end()
    return kept


def says(text: str, choice: int = 0) -> Frame:
    return Frame(delta=Delta(choice, 0, (1,), text))


def test_a_prompt_and_its_answers_by_choice() -> None:
    frames = [says("he"), says("yo", 1), says("llo"), Frame(finished=object())]  # type: ignore[arg-type]
    (kept,) = taken(TextPrompt("hi"), frames, user="u" * 999)
    assert (kept.prompt, kept.answers, kept.is_whole, kept.at_unix_s) == ("hi", ("hello", "yo"), True, 5.0)
    assert len(kept.user) == MAX_USER_CHARS
    (kept,) = taken(ChatPrompt([("user", "名")]), [says("x")])
    assert (kept.prompt, kept.is_whole) == ('[{"role": "user", "content": "名"}]', False)
    (kept,) = taken(TokenPrompt([1, 2]), [])
    assert (kept.prompt, kept.answers) == ("", ())


def test_nothing_of_a_tenant_that_keeps_nothing() -> None:
    assert taken(TextPrompt("hi"), [says("x")], days=0) == []
    assert Tapes(lambda tenant: None, lambda: 0.0, lambda text: None).begin("none", RequestInput(None), "r") is None


def test_no_more_than_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tapes, "MAX_TEXT_CHARS", 5)
    finished = Frame(finished=object())  # type: ignore[arg-type]
    (kept,) = taken(TextPrompt("123456"), [says("1234"), says("5678"), says("9"), finished])
    assert (kept.prompt, kept.answers, kept.is_whole) == ("12345", ("12345",), False)
