"""Admission: every wrong field is named, all at once, and nothing of other tenants shows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from manylora_router.guard.admission import (
    MAX_TEXT_BYTES,
    Adapter,
    ChatPrompt,
    ModelLimits,
    Prompt,
    RequestInput,
    TextPrompt,
    TokenPrompt,
    admit,
    admit_caller,
    alone,
    check,
    prompt_is_readable,
    seed_of_key,
)
from manylora_shared.errors import Code, InvalidRequest, NotFound
from manylora_shared.ids import AdapterName, AdapterUid, QosClass, TenantId
from manylora_shared.sampling import Sampling
from manylora_shared.tenancy.adapter_line import AdapterVersion, Line, StickyKeys
from manylora_shared.tenancy.policy import TenantLimits, TenantPolicy

MODEL = ModelLimits(vocab_size=100, max_context_tokens=32, max_lora_rank=32, max_sequences=4)
ACME = TenantPolicy(TenantId("acme"))
GOOD = TokenPrompt([1, 2, 3])


def fields_of(request: RequestInput, *, policy: TenantPolicy = ACME, tokens: list[int] | None = None) -> list[str]:
    """The names of the fields at fault; empty: admitted."""
    violations = check(request, MODEL)
    readable = prompt_is_readable(request.prompt, violations)
    ids = tokens if tokens is not None else list(getattr(request.prompt, "ids", [1]))
    try:
        admit(request, ids if readable else None, violations, policy, MODEL, default_max_tokens=8)
    except InvalidRequest as e:
        return [v.field for v in e.violations]
    return []


NAN = math.nan
INF = math.inf


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"temperature": -0.1}, "sampling.temperature"),
        ({"temperature": NAN}, "sampling.temperature"),
        ({"temperature": 1e-38}, "sampling.temperature"),
        ({"temperature": INF}, "sampling.temperature"),
        ({"top_p": 0.0}, "sampling.top_p"),
        ({"top_p": 1.01}, "sampling.top_p"),
        ({"top_p": NAN}, "sampling.top_p"),
        ({"min_p": -0.01}, "sampling.min_p"),
        ({"min_p": 1.01}, "sampling.min_p"),
        ({"repetition_penalty": 1e-38}, "sampling.repetition_penalty"),
        ({"repetition_penalty": 3e38}, "sampling.repetition_penalty"),
        ({"repetition_penalty": 0.0}, "sampling.repetition_penalty"),
        ({"repetition_penalty": INF}, "sampling.repetition_penalty"),
        ({"presence_penalty": 2.1}, "sampling.presence_penalty"),
        ({"frequency_penalty": -2.1}, "sampling.frequency_penalty"),
        ({"frequency_penalty": NAN}, "sampling.frequency_penalty"),
        ({"top_logprobs": 21}, "sampling.top_logprobs"),
        ({"logit_bias": {100: 1.0}}, "sampling.logit_bias[100]"),
        ({"logit_bias": {5: 100.5}}, "sampling.logit_bias[5]"),
        ({"logit_bias": {5: NAN}}, "sampling.logit_bias[5]"),
        ({"logit_bias": dict.fromkeys(range(2000), 0.0)}, "sampling.logit_bias"),
        ({"bad_words": ["x", ""]}, "sampling.bad_words[1]"),
        ({"bad_words": ["x"] * 65}, "sampling.bad_words"),
        ({"min_tokens": 1000}, "sampling.min_tokens"),
    ],
)
def test_bad_sampling(sampling: dict[str, Any], field: str) -> None:
    assert fields_of(RequestInput(GOOD, sampling=Sampling(**sampling))) == [field]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "seed": 2**64 - 1},
        {"min_p": 1.0, "top_logprobs": 20, "presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"logit_bias": {0: -100.0, 99: 100.0}, "repetition_penalty": 0.01, "temperature": 1e3},
    ],
)
def test_good_sampling(sampling: dict[str, Any]) -> None:
    assert fields_of(RequestInput(GOOD, sampling=Sampling(**sampling))) == []


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"n": 9}, "n"),
        ({"n": 5}, "n"),
        ({"max_tokens": 30}, "max_tokens"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x", ""]}, "stop[1]"),
        ({"stop": ["é" * 33]}, "stop[0]"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
        ({"stop_token_ids": [1, 100]}, "stop_token_ids[1]"),
        ({"request_class": "urgent"}, "x-request-class"),
        ({"request_class": "BATCH"}, "x-request-class"),
        ({"priority": "101"}, "x-priority"),
        ({"priority": "1.5"}, "x-priority"),
        ({"priority": "-"}, "x-priority"),
        ({"priority": "٣"}, "x-priority"),
        ({"idempotency_key": "x" * 129}, "idempotency-key"),
        ({"idempotency_key": "a\tb"}, "idempotency-key"),
    ],
)
def test_bad_fields(more: dict[str, Any], field: str) -> None:
    assert fields_of(RequestInput(GOOD, **more)) == [field]


def _asking(**kwargs: Any) -> ChatPrompt:
    return ChatPrompt([("user", "a")], template_kwargs=kwargs)


def _nested(depth: int) -> list[Any]:
    return [_nested(depth - 1)] if depth else []


@pytest.mark.parametrize(
    ("prompt", "tokens", "field"),
    [
        (None, None, "prompt"),
        (TextPrompt(""), None, "prompt.text"),
        (TextPrompt("x" * (16 * 32 + 1)), None, "prompt.text"),
        (TextPrompt("x"), [], "prompt.text"),
        (TextPrompt("x"), [1] * 32, "prompt.text"),
        (TextPrompt("x"), [100], "prompt.text"),
        (TokenPrompt([]), None, "prompt.token_ids"),
        (TokenPrompt([1] * 32), None, "prompt.token_ids"),
        (TokenPrompt([1, 2, 3, 100]), None, "prompt.token_ids[3]"),
        (ChatPrompt([]), None, "prompt.chat.messages"),
        (ChatPrompt([("user", "a"), ("", "b")]), None, "prompt.chat.messages[1].role"),
        (ChatPrompt([("user", "x" * 600)]), None, "prompt.chat"),
        (ChatPrompt([("user", "")] * 5000), None, "prompt.chat.messages"),
        (ChatPrompt([("user", "a")]), [1] * 40, "prompt.chat"),
        (ChatPrompt([("user", "a")], True), None, "prompt.chat.continue_final_message"),
        (ChatPrompt([("assistant", "a")], True, True), None, "prompt.chat.add_generation_prompt"),
        (_asking(tokenize=True), None, "prompt.chat.chat_template_kwargs.tokenize"),
        (_asking(messages=[]), None, "prompt.chat.chat_template_kwargs.messages"),
        (_asking(deep=_nested(40)), None, "prompt.chat.chat_template_kwargs"),
        (_asking(long=["x" * 5000] * 4), None, "prompt.chat.chat_template_kwargs"),
        (_asking(many=[0] * 5000), None, "prompt.chat.chat_template_kwargs"),
    ],
)
def test_bad_prompts(prompt: Prompt | None, tokens: list[int] | None, field: str) -> None:
    assert fields_of(RequestInput(prompt), tokens=tokens) == [field]


def test_a_chat_that_goes_on_is_admitted() -> None:
    for more in ((True,), (True, False), (False, False), (False, None, {"enable_thinking": False, "n": [1, {"a": 2}]})):
        assert fields_of(RequestInput(ChatPrompt([("user", "a"), ("assistant", "b")], *more))) == []


def test_many_bad_token_ids_are_listed_in_part() -> None:
    assert fields_of(RequestInput(TokenPrompt([100] * 30))) == [
        *(f"prompt.token_ids[{i}]" for i in range(8)),
        "prompt.token_ids",
    ]


def test_all_violations_at_once() -> None:
    request = RequestInput(
        TextPrompt("x"),
        max_tokens=99,
        sampling=Sampling(top_p=2.0, temperature=-1.0),
        stop=[""],
        n=9,
        request_class="x",
        priority="x",
    )
    found = fields_of(request, tokens=[1] * 50)
    assert sorted(found) == sorted(
        ["x-request-class", "x-priority", "sampling.temperature", "sampling.top_p", "stop[0]", "n", "prompt.text"]
    )


def test_defaults() -> None:
    admitted = admit(RequestInput(GOOD), GOOD.ids, [], ACME, MODEL, default_max_tokens=8)
    assert (admitted.qos_class, admitted.priority, admitted.max_tokens, admitted.n) == (QosClass.STANDARD, 0, 8, 1)
    assert admit(RequestInput(GOOD), GOOD.ids, [], ACME, MODEL, default_max_tokens=99).max_tokens == 29
    limited = TenantPolicy(TenantId("acme"), limits=TenantLimits(max_output_tokens=3))
    assert admit(RequestInput(GOOD), GOOD.ids, [], limited, MODEL, default_max_tokens=99).max_tokens == 3


def test_the_context_takes_prompt_and_output() -> None:
    assert fields_of(RequestInput(TokenPrompt([1] * 31), max_tokens=1)) == []
    assert fields_of(RequestInput(TokenPrompt([1] * 31), max_tokens=2)) == ["max_tokens"]


def test_limits_of_the_tenant() -> None:
    policy = TenantPolicy(TenantId("acme"), limits=TenantLimits(max_prompt_tokens=3, max_output_tokens=4))
    assert fields_of(RequestInput(GOOD, max_tokens=4), policy=policy) == []
    assert fields_of(RequestInput(TokenPrompt([1] * 4), max_tokens=5), policy=policy) == [
        "prompt.token_ids",
        "max_tokens",
    ]


def test_text_of_a_megabyte_is_never_read() -> None:
    large = ModelLimits(vocab_size=100, max_context_tokens=1 << 20, max_lora_rank=32, max_sequences=1)
    request = RequestInput(TextPrompt("x" * (MAX_TEXT_BYTES + 1)))
    assert [v.field for v in check(request, large)] == ["prompt.text"]


def test_priority_and_class() -> None:
    request = RequestInput(GOOD, priority="-100", request_class="batch")
    admitted = admit(request, GOOD.ids, check(request, MODEL), ACME, MODEL, default_max_tokens=8)
    assert (admitted.priority, admitted.qos_class) == (-100, QosClass.BATCH)


def line(uid: str, rank: int = 16) -> Line:
    return Line(AdapterVersion(1, uid * 64, rank, 1, (), 0.0))


LINES = {
    ("acme", "upper"): line("a"),
    ("acme", "lower"): line("c", 8),
    ("acme", "wide"): line("d", 32),
    ("acme", "twin"): line("a"),
    ("other", "secret"): line("b"),
}


def caller(tenant: str, adapter: str = "") -> Any:
    return admit_caller(
        tenant,
        adapter,
        lambda t: {"acme": ACME}.get(t),
        lambda t, name: LINES.get((t, name)),
        StickyKeys("r"),
        lambda pool: 32,
    )


def test_callers() -> None:
    assert caller("acme") == (ACME, None)
    policy, adapter = caller("acme", "upper")
    assert (policy, adapter.name, adapter.digest) == (ACME, AdapterName("upper"), "a" * 64)
    assert adapter.uid == f"{adapter.digest}@acme"
    with pytest.raises(InvalidRequest, match="x-tenant-id"):
        caller("")


def test_a_name_of_the_policy_stands_for_several() -> None:
    policy = replace(
        ACME,
        compositions={AdapterName("both"): "upper+lower:0.5", AdapterName("twin"): "lower", AdapterName("gone"): "x"},
    )

    def asked(adapter: str) -> Any:
        return admit_caller(
            "acme", adapter, lambda t: policy, lambda t, name: LINES.get((t, name)), StickyKeys("r"), lambda pool: 32
        )[1]

    both, written = asked("both"), caller("acme", "upper+lower:0.5")[1]
    assert (both.name, both.uid, both.parts) == ("both", written.uid, written.parts)
    assert both.reference == "upper@1+lower@1:0.5", "what answers is told"
    assert asked("twin").uid == f"{'a' * 64}@acme", "an adapter of the name comes first"
    with pytest.raises(NotFound, match="'x'"):
        asked("gone")
    with pytest.raises(NotFound, match="'both'"):
        asked("both+upper")


def test_compositions() -> None:
    _, adapter = caller("acme", "upper+lower:0.5")
    assert (adapter.name, adapter.uid) == ("upper+lower:0.5", f"{'a' * 64}@acme+{'c' * 64}@acme:0.5")
    assert adapter.digest == f"{'a' * 64}+{'c' * 64}:0.5"
    assert (adapter.reference, adapter.version) == ("upper@1+lower@1:0.5", 0)
    assert caller("acme", "lower:0.50+upper")[1].uid == adapter.uid, "whatever the order"
    assert caller("acme", "upper:1")[1].uid == f"{'a' * 64}@acme", "as the adapter alone"
    assert caller("acme", "wide:-2")[1].uid == f"{'d' * 64}@acme:-2.0"


@pytest.mark.parametrize(("adapter", "message"), [
    ("upper+lower+wide+twin+upper", "names 5 adapters"),
    ("upper+lower:nan", "lower:'nan': a weight is"),
    ("upper:0+lower", "upper:'0': a weight is"),
    ("upper+upper:2", "names 'upper' twice"),
    ("upper+twin:2", "'upper' and 'twin' are the same adapter"),
    ("upper+", "is missing"),
    ("upper+wide", "more rank than 32 (each in steps of 16): upper 16 + wide 32"),
])  # fmt: skip
def test_compositions_that_are_refused(adapter: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        caller("acme", adapter)
    assert message in error.value.message
    assert error.value.message.startswith("x-adapter-id: ")


def test_an_unknown_part_is_named() -> None:
    with pytest.raises(NotFound, match="'nobody' is not known"):
        caller("acme", "upper+nobody:0.5")


@pytest.mark.parametrize("tenant", ["nobody", "../acme", "ACME", "x" * 5000, "acme/upper", "a\nb"])
def test_unknown_tenants(tenant: str) -> None:
    with pytest.raises(NotFound) as error:
        caller(tenant)
    assert error.value.message.startswith("x-tenant-id: ")
    assert len(error.value.message) < 200
    assert error.value.code is Code.NOT_FOUND


@pytest.mark.parametrize("adapter", ["../secret", "UPPER", "x" * 5000, "other/secret", "secret/../upper"])
def test_unknown_adapters(adapter: str) -> None:
    with pytest.raises(NotFound) as error:
        caller("acme", adapter)
    assert error.value.message.startswith("x-adapter-id: ")


def test_foreign_adapter_is_as_one_that_does_not_exist() -> None:
    with pytest.raises(NotFound) as foreign:
        caller("acme", "secret")
    del LINES["other", "secret"]
    with pytest.raises(NotFound) as absent:
        caller("acme", "secret")
    assert (foreign.value.message, foreign.value.violations) == (absent.value.message, absent.value.violations)


def test_seed_of_key() -> None:
    assert seed_of_key("acme", "k") == seed_of_key("acme", "k")
    assert len({seed_of_key(t, k) for t in ("a", "b") for k in ("1", "2")}) == 4
    assert seed_of_key("a", "bc") != seed_of_key("ab", "c")
    assert 0 <= seed_of_key("acme", "k") < 2**64
    assert len({seed_of_key("acme", "k", part) for part in range(64)}) == 64, "equal prompts are different samples"
    assert seed_of_key("acme", "k", 0) == seed_of_key("acme", "k")
    assert seed_of_key("acme", "k", 1) != seed_of_key("acme", "k1")


def test_an_adapter_that_stretches_the_context_has_its_own_limit() -> None:
    """Up to what the workers serve; the base model's and other adapters' stay."""
    model = replace(MODEL, longest_context_tokens=64)
    long = TokenPrompt([1] * 50)

    def admits(limits: ModelLimits) -> bool:
        request = RequestInput(long)
        try:
            admit(request, long.ids, check(request, limits), ACME, limits, default_max_tokens=8)
        except InvalidRequest:
            return False
        return True

    def adapter(context: int) -> Adapter:
        return replace(alone(AdapterName("a"), AdapterUid("b" * 64)), max_context_tokens=context)

    assert not admits(model.with_adapter(None))
    assert not admits(model.with_adapter(adapter(0)))
    assert not admits(model.with_adapter(adapter(50)))
    assert admits(model.with_adapter(adapter(51)))
    assert model.with_adapter(adapter(1000)).max_context_tokens == 64
    assert replace(MODEL).with_adapter(adapter(1000)) == MODEL


def test_adapters_that_rotate_positions_differently_go_not_together() -> None:
    def version(digit: str, rope: str) -> Line:
        return Line(AdapterVersion(1, digit * 64, 8, 1, (), 0.0, rope=rope, max_context_tokens=100 if rope else 0))

    lines = {"plain": version("a", ""), "long": version("b", "{}"), "longer": version("c", "{}")}

    def admitted(reference: str) -> Adapter:
        _, found = admit_caller(
            "acme", reference, lambda _: ACME, lambda _, name: lines.get(name), StickyKeys("r"), lambda _: 32
        )
        assert found is not None
        return found

    assert admitted("long+longer").max_context_tokens == 100
    assert admitted("plain").max_context_tokens == 0
    for reference in ("plain+long", "long+longer+plain"):
        with pytest.raises(InvalidRequest, match="rotate positions differently"):
            admitted(reference)


def test_an_adapter_that_scales_outputs_goes_alone() -> None:
    def line(digit: str, *, goes_alone: bool) -> Line:
        return Line(AdapterVersion(1, digit * 64, 8, 1, (), 0.0, goes_alone=goes_alone))

    lines = {"plain": line("a", goes_alone=False), "dora": line("b", goes_alone=True)}

    def admitted(reference: str) -> str:
        _, found = admit_caller(
            "acme", reference, lambda _: ACME, lambda _, name: lines.get(name), StickyKeys("r"), lambda _: 32
        )
        assert found is not None
        return found.name

    assert admitted("dora") == "dora"
    for reference in ("dora+plain", "plain+dora:0.5", "dora:0.5"):
        with pytest.raises(InvalidRequest, match="it goes with no other or weight"):
            admitted(reference)
