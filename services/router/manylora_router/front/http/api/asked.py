"""What completions and chat completions ask alike: from headers and a body's fields to the router's request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from manylora_shared.metadata import (
    ADAPTER_KEY,
    CLASS_KEY,
    CONVERSATION_KEY,
    IDEMPOTENCY_KEY,
    PRIORITY_KEY,
    TENANT_KEY,
    TRACEPARENT_KEY,
    USER_KEY,
)
from manylora_shared.sampling import MAX_TOP_LOGPROBS, PARAMETERS, Kind, Parameter, Sampling
from manylora_shared.tenancy.identity import AUTHORIZATION_KEY

from manylora_router.front.http.api.constraints import read_constraint
from manylora_router.front.http.fields import Fields
from manylora_router.guard.admission import (
    MAX_CHOICES,
    MAX_PRIORITY,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    RequestInput,
)
from manylora_router.guard.pools import NO_NAMES, ModelNames

API_KEY = "x-api-key"

# They change no answer: read by nobody here, and no error.
HARMLESS = (
    "metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "session_id",
    "spaces_between_special_tokens",
    "stream_interval",
    "verbosity",
)
# Known to others' servers, and not built: with the values that ask for nothing.
NOT_BUILT: Mapping[str, tuple[Any, ...]] = {
    "store": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "logprob_token_ids": ([],),
    "truncate_prompt_tokens": (-1,),
    "cache_salt": (),
    "return_token_offsets": (False,),
    "thinking_token_budget": (),
}
# What an answer of one choice, told as parts, has no place for.
UNTOLD: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "include_stop_str_in_output": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
}
_COUNTS = ("top_logprobs", "prompt_logprobs")  # that endpoints name in their own ways


@dataclass(frozen=True)
class Caller:
    """What the headers say, as RequestInput's fields."""

    authorization: str
    tenant: str
    adapter: str
    conversation: str
    user: str
    request_class: str
    priority: str
    idempotency_key: str
    traceparent: str | None


@dataclass(frozen=True)
class Form:
    """How the answer is to look."""

    model: str
    is_stream: bool = False
    has_usage: bool = True
    has_usage_always: bool = False  # in every event
    has_token_ids: bool = False
    has_logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None  # where they are told by themselves
    has_output: bool = True  # False: the answer is the prompt alone
    are_tokens_ids: bool = False  # a token is told as `token_id:7`
    includes_stop: bool = False
    names: Mapping[str, str] = field(default_factory=dict)  # what this caller calls a field of the router's


def caller_of(headers: Mapping[str, str]) -> Caller:
    key = headers.get(API_KEY, "")
    return Caller(
        authorization=headers.get(AUTHORIZATION_KEY) or (f"Bearer {key}" if key else ""),
        tenant=headers.get(TENANT_KEY, ""),
        adapter=headers.get(ADAPTER_KEY, ""),
        conversation=headers.get(CONVERSATION_KEY, ""),
        user=headers.get(USER_KEY, ""),
        request_class=headers.get(CLASS_KEY, ""),
        priority=headers.get(PRIORITY_KEY, ""),
        idempotency_key=headers.get(IDEMPOTENCY_KEY, ""),
        traceparent=headers.get(TRACEPARENT_KEY),
    )


def nameless(caller: Caller, model: str = "", names: ModelNames = NO_NAMES) -> RequestInput:
    """For what asks for no generation. A model that is none and no adapter's counts for none."""
    base = names.split(model)[0]
    return RequestInput(
        None, authorization=caller.authorization, tenant=caller.tenant, adapter=caller.adapter, model=base
    )


def read(
    fields: Fields, caller: Caller, names: ModelNames, *, max_tokens: int | None, top_logprobs: int | None
) -> tuple[RequestInput, Form]:
    """The request without its prompt, and its answer's form. What is wrong is gathered in `fields`."""
    model = fields.text("model")
    base, adapter = _named(fields, model, caller.adapter, names)
    constraint, constraint_name = read_constraint(fields)
    request = RequestInput(
        None,
        max_tokens=max_tokens or 0,
        sampling=_sampling(fields, top_logprobs),
        constraint=constraint,
        stop=fields.texts("stop", most=MAX_STOP_STRINGS),
        stop_token_ids=fields.token_ids("stop_token_ids", most=MAX_STOP_TOKEN_IDS),
        n=_num_choices(fields),
        request_class=caller.request_class,
        priority=_priority(fields, caller.priority),
        idempotency_key=caller.idempotency_key,
        ignore_eos=fields.flag("ignore_eos"),
        skip_special_tokens=fields.flag("skip_special_tokens", True),
        authorization=caller.authorization,
        tenant=caller.tenant,
        adapter=adapter,
        model=base,
        conversation=caller.conversation,
        user=caller.user or fields.text("user"),
        traceparent=caller.traceparent,
    )
    called = {ADAPTER_KEY: "model"} if model else {}
    if constraint is not None:
        called[constraint.field] = constraint_name
    form = _form(fields, model or names.own, top_logprobs, called)
    for name, neutral in NOT_BUILT.items():
        fields.only(name, *neutral)
    fields.ignore(*HARMLESS)
    return request, form


def refuse_untold(fields: Fields) -> None:
    for name, neutral in UNTOLD.items():
        fields.only(name, *neutral)


def read_prompt_logprobs(fields: Fields, form: Form) -> int | None:
    count = read_logprobs_count(fields, "prompt_logprobs")
    if count is not None and form.is_stream:
        fields.wrong("prompt_logprobs", "are told in whole answers: leave out stream")
    return count


def read_logprobs_count(fields: Fields, name: str) -> int | None:
    count = fields.integer(name)
    if count is not None and count > MAX_TOP_LOGPROBS:
        fields.wrong(name, f"must be from 0 to {MAX_TOP_LOGPROBS}, not {count}")
    return count


def _form(fields: Fields, model: str, top_logprobs: int | None, names: Mapping[str, str]) -> Form:
    is_stream = fields.flag("stream")
    has_options = fields.raw("stream_options") is not None
    options = fields.inner("stream_options")
    if has_options and not is_stream:
        fields.wrong("stream_options", "is for streams: set stream as well")
    include_usage = options.flag("include_usage")
    has_usage_always = options.flag("continuous_usage_stats")
    options.ignore("include_obfuscation")
    options.close()
    return Form(
        model=model,
        is_stream=is_stream,
        has_usage=include_usage or not is_stream,
        has_usage_always=include_usage and has_usage_always,
        has_token_ids=fields.flag("return_token_ids"),
        has_logprobs=top_logprobs is not None,
        top_logprobs=top_logprobs or 0,
        are_tokens_ids=fields.flag("return_tokens_as_token_ids"),
        includes_stop=fields.flag("include_stop_str_in_output"),
        names=names,
    )


def _named(fields: Fields, model: str, named: str, names: ModelNames) -> tuple[str, str]:
    """The base's name, and an adapter's. `named`: by the header."""
    base, found = names.split(model)
    if found and named and found != named:
        fields.wrong("model", f"names another adapter than the header {ADAPTER_KEY}")
    return base, found or named


def _num_choices(fields: Fields) -> int:
    n = fields.integer("n", at_least=1) or 1
    if n > MAX_CHOICES:
        fields.wrong("n", f"must be at most {MAX_CHOICES}")
    return min(n, MAX_CHOICES)


def _priority(fields: Fields, named: str) -> str:
    """vLLM's is sooner the lower it is, and the router's, which the header names, the higher."""
    lowest_first = fields.integer("priority", at_least=-MAX_PRIORITY)
    if lowest_first is None:
        return named
    if named:
        fields.wrong("priority", f"is given as the header {PRIORITY_KEY} too")
    return str(-lowest_first)


def _sampling(fields: Fields, top_logprobs: int | None) -> Sampling:
    given: dict[str, Any] = {"top_logprobs": top_logprobs}
    for row in PARAMETERS:
        if row.name not in _COUNTS and (value := _value(fields, row)) is not None:
            given[row.name] = value
    return Sampling(**given)


def _value(fields: Fields, row: Parameter) -> Any:
    match row.kind:
        case Kind.NUMBER:
            return fields.number(row.name)
        case Kind.COUNT if row.name == "seed":
            seed = fields.integer("seed", at_least=-(1 << 63))
            return seed if seed is None or seed >= 0 else seed + (1 << 64)
        case Kind.COUNT if row.name == "top_k":
            top_k = fields.integer("top_k", at_least=-1)
            return None if top_k is None else max(0, top_k)  # -1 is vLLM's word for all
        case Kind.COUNT:
            return fields.integer(row.name)
        case Kind.TOKENS:
            return fields.token_ids(row.name, most=row.max_entries)
        case Kind.BIASES:
            return fields.biases(row.name, most=row.max_entries)
        case Kind.WORDS:
            return fields.texts(row.name, most=row.max_entries)
