"""Admission: may this request be queued, and as what? Owns no state.

Tenants learn nothing of one another: an adapter that another owns is refused in the same bytes as one that does not
exist.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from manylora_shared.adapter_reference import AdapterPart, ReferenceProblem, format_reference, parse_reference
from manylora_shared.composition import RANKS_AT_ONCE, Part, content_of, key_of
from manylora_shared.constraints.constraint import Constraint
from manylora_shared.errors import FieldViolation, InvalidRequest, NotFound, shown
from manylora_shared.ids import DEFAULT_POOL, AdapterDigest, AdapterKey, AdapterName, QosClass, TenantId, is_valid_name
from manylora_shared.metadata import ADAPTER_KEY, CLASS_KEY, IDEMPOTENCY_KEY, PRIORITY_KEY, TENANT_KEY
from manylora_shared.sampling import MAX_LISTED, Sampling
from manylora_shared.tenancy.adapter_line import AdapterVersion, Line, StickyKeys
from manylora_shared.tenancy.identity import Principal
from manylora_shared.tenancy.key_limits import KeyLimits
from manylora_shared.tenancy.policy import TenantPolicy
from manylora_shared.tenancy.roles import Scope

MAX_CHOICES = 8
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 64
MAX_STOP_TOKEN_IDS = 64
MAX_PROMPT_LOGPROBS = 1 << 17  # told of one prompt: its tokens' and the alternatives'
MAX_PRIORITY = 100
MAX_IDEMPOTENCY_KEY_CHARS = 128
MAX_KEEP_S = 60
MAX_CHAT_MESSAGES = 4096
TEMPLATE_TOKENS = 256  # that a chat template may add
BYTES_PER_CONTEXT_TOKEN = 16  # longer text is refused unread; tokens of real text are shorter
MAX_TEXT_BYTES = 1 << 20
MAX_TEMPLATE_KWARGS_BYTES = 1 << 14
MAX_TEMPLATE_DEPTH = 16  # of lists in lists in a template's variables
TEMPLATE_KWARGS = "prompt.chat.chat_template_kwargs"
# Other words of a template's rendering, in transformers too: they choose another template or form, or are not built.
_TEMPLATE_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
_COMPOSES = re.compile(r"[+:]")
_CLASSES = frozenset(qos_class.value for qos_class in QosClass)


@dataclass(frozen=True)
class TextPrompt:
    text: str
    add_special_tokens: bool = True  # the model's begin-of-sequence


@dataclass(frozen=True)
class TokenPrompt:
    ids: Sequence[int]


@dataclass(frozen=True)
class ChatPrompt:
    messages: Sequence[tuple[str, str]]  # (role, content)
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None  # None: unless the final message is continued
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # JSON
    tools: Sequence[Mapping[str, Any]] = ()  # JSON
    more: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)  # JSON: further members of messages, by index

    @property
    def has_generation_prompt(self) -> bool:
        asked = self.add_generation_prompt
        return not self.continue_final_message if asked is None else asked


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True)
class Resume:
    """What a caller that lost its answer shows, and has of each choice: tokens, and characters of text. It has nothing
    where only who has the answer is to tell it.
    """

    token: str
    next_frame: int
    emitted: Sequence[tuple[Sequence[int], int]]


@dataclass(frozen=True)
class RequestInput:
    """As a front read it: 0 and "" mean absent, and nothing has been checked."""

    prompt: Prompt | None
    max_tokens: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    constraint: Constraint | None = None  # of the answer's text
    constraint_after: Callable[[Sequence[int]], Constraint] | None = None  # in its place, by the prompt's tokens
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    n: int = 0
    request_class: str = ""
    priority: str = ""
    idempotency_key: str = ""
    ignore_eos: bool = False
    skip_special_tokens: bool = True  # in the answer's text
    kept_tokens: Sequence[str] = ()  # that it skips not
    authorization: str = ""  # `Bearer <key>`
    tenant: str = ""
    adapter: str = ""
    model: str = ""  # a base model's or a pool's name; empty: as the adapter has it, or the tenant's policy
    conversation: str = ""  # and user: whose version a rollout keeps the same
    user: str = ""
    is_movable: bool = False  # another pool's tokens may answer: the front tells of none of this one's
    traceparent: str | None = None
    time_remaining_s: float | None = None  # until the caller's deadline
    request_id: str = ""  # 32 hexadecimal digits that the front drew; empty: it draws none
    joins: bool = False  # that id is of another call's answer, and never of new work
    fingerprint: bytes = b""  # of all that was asked, where an idempotency key stands beside it
    part: int = 0  # of several with one idempotency key
    is_resumable: bool = False
    keep_s: int = 0  # that the answer outlives its caller's connection
    resume: Resume | None = None  # it goes on with an answer
    charged_tokens: int = 0  # of that one, with its prompt, as far as is known: the caller may have less
    is_again: bool = False  # of an answer that some router keeps, and no new one
    is_hedge: bool = False
    limits: KeyLimits | None = None  # of the key that it came with
    is_own: bool = False  # the router's, of samples: its texts stand in the store already
    candidate: Adapter | None = None  # in place of `adapter`: what no front can name, the quality gate's alone

    @property
    def qos_class(self) -> QosClass | None:
        """None: there is no such class."""
        name = self.request_class or QosClass.STANDARD.value
        return QosClass(name) if name in _CLASSES else None


@dataclass(frozen=True)
class ModelLimits:
    vocab_size: int
    max_context_tokens: int
    max_lora_rank: int
    max_sequences: int  # slots of the largest worker: a request's choices all run on one worker
    longest_context_tokens: int = 0  # of adapters that stretch the model's; 0: none does

    @property
    def longest(self) -> int:
        """Of any request's context."""
        return max(self.max_context_tokens, self.longest_context_tokens)

    def with_adapter(self, adapter: Adapter | None) -> Self:
        """Of a request with it."""
        return self if adapter is None else self.stretched(adapter.max_context_tokens)

    def stretched(self, context_tokens: int) -> Self:
        """By an adapter's own context; 0: it has none."""
        return replace(self, max_context_tokens=min(context_tokens, self.longest)) if context_tokens else self


@dataclass(frozen=True)
class Adapter:
    """As a request keeps it to its end, whatever becomes of the names meanwhile."""

    name: str  # as the caller may write it: several with their weights
    uid: AdapterKey  # the copies that serve it
    parts: tuple[AdapterPart, ...]  # with the versions that answer
    trial: str = ""  # of the rollout that chose its one version; empty: none stands, or the request named it
    is_canary: bool = False  # it is the one that is tried
    pool: str = DEFAULT_POOL
    base_digest: str = ""  # of its base model, where that is known
    rank: int = 0  # of several the sum; 0: not known
    max_context_tokens: int = 0  # 0: the model's

    @property
    def digest(self) -> AdapterDigest:
        return content_of(self.uid)

    @property
    def version(self) -> int:
        """0: of several."""
        return self.parts[0].version or 0 if len(self.parts) == 1 else 0

    @property
    def reference(self) -> str:
        return format_reference(self.parts)


@dataclass(frozen=True)
class Admitted:
    qos_class: QosClass
    priority: int
    prompt_token_ids: Sequence[int]
    max_tokens: int  # per choice
    n: int


def not_found_tenant(tenant: str) -> NotFound:
    return NotFound(f"{TENANT_KEY}: tenant {shown(tenant)} is not known")


def not_found_adapter(adapter: str) -> NotFound:
    return NotFound(f"{ADAPTER_KEY}: adapter {shown(adapter)} is not known to this tenant")


def tenant_of(principal: Principal, named: str) -> str:
    """The key's tenant; a gateway's key lets the request name one (`named`, maybe empty). Raises PermissionDenied."""
    if principal.may(Scope.GATEWAY):
        return named
    principal.require(Scope.GENERATE)
    if principal.tenant_id is None or named not in ("", principal.tenant_id):
        raise principal.denied()
    return principal.tenant_id


def alone(name: AdapterName, uid: AdapterKey, pool: str = DEFAULT_POOL) -> Adapter:
    """Of no version."""
    return Adapter(name, uid, (AdapterPart(name),), pool=pool)


def admit_caller(
    tenant: str,
    adapter: str,
    policy_of: Callable[[TenantId], TenantPolicy | None],
    line_of: Callable[[TenantId, AdapterName], Line | None],
    sticky: StickyKeys,
    max_lora_rank: Callable[[str], int],
) -> tuple[TenantPolicy, Adapter | None]:
    """The caller's policy and its adapter; None: the base model. `tenant` and `adapter` may be empty.

    Args:
        max_lora_rank: of a pool's workers.

    Raises:
        InvalidRequest: no tenant is named, or adapters that do not go together.
        NotFound: tenant or adapter.
    """
    if not tenant:
        raise InvalidRequest.of(TENANT_KEY, "is missing: a key of no tenant names with it whose request this is")
    policy = policy_of(TenantId(tenant)) if is_valid_name(tenant) else None
    if policy is None:
        raise not_found_tenant(tenant)
    if not adapter:
        return policy, None
    composed = policy.compositions.get(AdapterName(adapter))
    if composed is not None and line_of(policy.tenant_id, AdapterName(adapter)) is not None:
        composed = None  # an adapter of this name comes first
    try:
        asked = parse_reference(composed or adapter)
    except ReferenceProblem as problem:
        if not _COMPOSES.search(adapter):
            raise not_found_adapter(adapter) from None
        raise InvalidRequest.of(ADAPTER_KEY, str(problem)) from None
    lines: list[Line] = []
    found: list[AdapterVersion] = []
    for part in asked:
        line = line_of(policy.tenant_id, part.name)
        version = line.choose(part.version, sticky) if line is not None else None
        if line is None or version is None:
            raise not_found_adapter(str(replace(part, weight=1.0)))
        lines.append(line)
        found.append(version)
    pool, rank = found[0].pool, sum(version.max_lora_rank for version in found)
    _check_together(asked, found, max_lora_rank(pool))
    key = key_of(
        Part(policy.copy_of(AdapterDigest(each.uid)), part.weight) for each, part in zip(found, asked, strict=True)
    )
    parts = tuple(replace(part, version=each.number) for each, part in zip(found, asked, strict=True))
    name = adapter if composed else format_reference(tuple(replace(part, version=None) for part in asked))
    # An answer of several says nothing of one of them.
    context_tokens = found[0].max_context_tokens
    rollout = lines[0].rollout if len(lines) == 1 and asked[0].version is None and asked[0].weight == 1.0 else None
    if rollout is None:
        return policy, Adapter(name, key, parts, "", False, pool, found[0].base_digest, rank, context_tokens)
    is_canary = found[0].number == rollout.to
    digest = found[0].base_digest
    return policy, Adapter(name, key, parts, rollout.trial, is_canary, pool, digest, rank, context_tokens)


def _check_together(parts: Sequence[AdapterPart], found: Sequence[AdapterVersion], max_lora_rank: int) -> None:
    uids = [version.uid for version in found]
    for i, uid in enumerate(uids):
        if (first := uids.index(uid)) < i:
            message = f"{parts[first].name!r} and {parts[i].name!r} are the same adapter; name one, with one weight"
            raise InvalidRequest.of(ADAPTER_KEY, message)
    for part, version in zip(parts, found, strict=True):
        if version.pool != found[0].pool:
            message = f"{parts[0].name!r} is of pool {found[0].pool} and {part.name!r} of {version.pool}"
            raise InvalidRequest.of(ADAPTER_KEY, message)
    for part, version in zip(parts, found, strict=True):
        if version.goes_alone and (len(parts) > 1 or part.weight != 1.0):
            message = f"{part.name!r} scales or shifts what layers give (DoRA, biases): it goes with no other or weight"
            raise InvalidRequest.of(ADAPTER_KEY, message)
    if other := next((i for i, version in enumerate(found) if version.rope != found[0].rope), 0):
        message = f"{parts[0].name!r} and {parts[other].name!r} rotate positions differently: they go not together"
        raise InvalidRequest.of(ADAPTER_KEY, message)
    ranks = [_whole_rank(version.max_lora_rank) for version in found]
    if len(ranks) > 1 and sum(ranks) > _whole_rank(max_lora_rank):
        each = " + ".join(f"{part.name} {rank}" for part, rank in zip(parts, ranks, strict=True))
        message = f"takes more rank than {max_lora_rank} (each in steps of {RANKS_AT_ONCE}): {each}"
        raise InvalidRequest.of(ADAPTER_KEY, message)


def _whole_rank(rank: int) -> int:
    return -(-rank // RANKS_AT_ONCE) * RANKS_AT_ONCE


def check(request: RequestInput, model: ModelLimits) -> list[FieldViolation]:
    """Before the prompt is tokenized."""
    found: list[FieldViolation] = []
    _check_metadata(request, found)
    _check_prompt(request.prompt, model, found)
    found += request.sampling.violations(model.vocab_size)
    _check_stops(request, model, found)
    if request.constraint is not None:
        found += request.constraint.violations()
    is_constrained = request.constraint is not None or request.constraint_after is not None
    if is_constrained and request.sampling.allowed_token_ids:
        found.append(FieldViolation("sampling.allowed_token_ids", "is given beside a constraint: one is kept"))
    if request.n > MAX_CHOICES:
        found.append(FieldViolation("n", f"must be at most {MAX_CHOICES}, not {request.n}"))
    elif request.n > model.max_sequences:
        found.append(FieldViolation("n", f"must be at most {model.max_sequences} (a worker's slots), not {request.n}"))
    return found


def json_bytes(prompt: ChatPrompt) -> int:
    """Of tools, and of what messages have besides their contents."""
    return sum(len(json.dumps(each, ensure_ascii=False).encode()) for each in [*prompt.tools, *prompt.more.values()])


def prompt_field(prompt: Prompt | None) -> str:
    match prompt:
        case TextPrompt():
            return "prompt.text"
        case TokenPrompt():
            return "prompt.token_ids"
        case ChatPrompt():
            return "prompt.chat"
        case None:
            return "prompt"


def admit(
    request: RequestInput,
    prompt_token_ids: Sequence[int] | None,
    violations: Sequence[FieldViolation],
    policy: TenantPolicy,
    model: ModelLimits,
    *,
    default_max_tokens: int,
) -> Admitted:
    """Raises InvalidRequest with all violations.

    Args:
        prompt_token_ids: None where `check` found the prompt itself wrong.
        violations: of `check`.
        default_max_tokens: less where less fits.
    """
    found = list(violations)
    room_tokens = model.max_context_tokens - 1
    if prompt_token_ids is not None:
        room_tokens = _check_length(request, prompt_token_ids, policy, model, found)
    limit_tokens = policy.limits.max_output_tokens
    if limit_tokens is not None and request.max_tokens > limit_tokens:
        found.append(
            FieldViolation("max_tokens", f"must be at most {limit_tokens} for this tenant, not {request.max_tokens}")
        )
    elif request.max_tokens > room_tokens > 0:
        taken = f" less {len(prompt_token_ids)} prompt tokens" if prompt_token_ids else ""
        found.append(
            FieldViolation(
                "max_tokens",
                f"must be at most {room_tokens} (the context of {model.max_context_tokens} tokens{taken}), "
                f"not {request.max_tokens}",
            )
        )
    bounds = [default_max_tokens, room_tokens] + ([limit_tokens] if limit_tokens is not None else [])
    max_tokens, min_tokens = request.max_tokens or min(bounds), request.sampling.min_tokens
    if prompt_token_ids is not None and (wrong := _too_many_scored(request.sampling, len(prompt_token_ids))):
        found.append(wrong)
    if min_tokens > max_tokens > 0:
        message = f"must be at most max_tokens ({max_tokens}), not {min_tokens}"
        found.append(FieldViolation("sampling.min_tokens", message))
    if found:
        raise InvalidRequest.of_all(found)
    assert prompt_token_ids is not None
    assert request.qos_class is not None
    return Admitted(
        qos_class=request.qos_class,
        priority=int(request.priority) if request.priority else 0,
        prompt_token_ids=prompt_token_ids,
        max_tokens=max_tokens,
        n=request.n or 1,
    )


def seed_of_key(tenant: str, idempotency_key: str, part: int = 0) -> int:
    """64 bits, the same for the same tenant, key and part."""
    digest = hashlib.sha256(b"manylora-seed-v1\0" + tenant.encode() + b"\0" + idempotency_key.encode())
    if part:  # a call with one prompt has the seed that it always had
        digest.update(b"\0%d" % part)
    return int.from_bytes(digest.digest()[:8], "big")


def max_text_bytes(model: ModelLimits) -> int:
    return min(MAX_TEXT_BYTES, BYTES_PER_CONTEXT_TOKEN * model.max_context_tokens)


def _check_length(
    request: RequestInput,
    prompt_token_ids: Sequence[int],
    policy: TenantPolicy,
    model: ModelLimits,
    found: list[FieldViolation],
) -> int:
    """Returns how many tokens the prompt leaves for output, maybe none."""
    name = prompt_field(request.prompt)
    num_tokens = len(prompt_token_ids)
    limit_tokens = policy.limits.max_prompt_tokens
    room_tokens = model.max_context_tokens - num_tokens
    if num_tokens == 0:
        found.append(FieldViolation(name, "has no tokens"))
    elif room_tokens < 1:
        most = model.max_context_tokens - 1
        found.append(FieldViolation(name, f"has {num_tokens} tokens; the model's context takes at most {most}"))
    elif limit_tokens is not None and num_tokens > limit_tokens:
        found.append(FieldViolation(name, f"has {num_tokens} tokens; this tenant's limit is {limit_tokens}"))
    elif not isinstance(request.prompt, TokenPrompt) and max(prompt_token_ids) >= model.vocab_size:
        found.append(FieldViolation(name, f"gives a token beyond the model's vocabulary of {model.vocab_size}"))
    return room_tokens


def _too_many_scored(sampling: Sampling, num_tokens: int) -> FieldViolation | None:
    """What is told of a prompt stands in routers' memory until it is read."""
    if sampling.prompt_logprobs is None or num_tokens * (1 + sampling.prompt_logprobs) <= MAX_PROMPT_LOGPROBS:
        return None
    most = MAX_PROMPT_LOGPROBS // num_tokens - 1
    return FieldViolation(
        "sampling.prompt_logprobs",
        f"of a prompt of {num_tokens} tokens {f'at most {most} may be asked for' if most >= 0 else 'none are told'}, "
        f"not {sampling.prompt_logprobs}: {MAX_PROMPT_LOGPROBS} in all",
    )


def _check_metadata(request: RequestInput, found: list[FieldViolation]) -> None:
    classes = [c.value for c in QosClass]
    if request.request_class and request.request_class not in classes:
        message = f"{shown(request.request_class)} is not one of {', '.join(classes)}"
        found.append(FieldViolation(CLASS_KEY, message))
    if request.keep_s > MAX_KEEP_S:
        found.append(FieldViolation("keep_s", f"must be at most {MAX_KEEP_S}, not {request.keep_s}"))
    digits = request.priority.removeprefix("-")
    if request.priority and not (
        digits.isascii() and digits.isdigit() and len(digits) <= 3 and abs(int(digits)) <= MAX_PRIORITY
    ):
        message = f"{shown(request.priority)} is not a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}"
        found.append(FieldViolation(PRIORITY_KEY, message))
    key = request.idempotency_key
    if key and not (len(key) <= MAX_IDEMPOTENCY_KEY_CHARS and key.isascii() and key.isprintable()):
        message = f"must be 1 to {MAX_IDEMPOTENCY_KEY_CHARS} printable ASCII characters"
        found.append(FieldViolation(IDEMPOTENCY_KEY, message))


def _check_prompt(prompt: Prompt | None, model: ModelLimits, found: list[FieldViolation]) -> None:
    most_bytes = max_text_bytes(model)
    match prompt:
        case None:
            found.append(FieldViolation("prompt", "is missing: give text, token_ids or chat"))
        case TextPrompt(text):
            if not text:
                found.append(FieldViolation("prompt.text", "is empty"))
            elif (size_bytes := len(text.encode())) > most_bytes:
                message = f"has {size_bytes} bytes; at most {most_bytes} are read"
                found.append(FieldViolation("prompt.text", message))
        case TokenPrompt(ids):
            if not ids:
                found.append(FieldViolation("prompt.token_ids", "is empty"))
            elif len(ids) < model.max_context_tokens:
                _check_token_ids("prompt.token_ids", ids, model, found)
        case ChatPrompt():
            _check_chat(prompt, most_bytes, found)


def _check_chat(prompt: ChatPrompt, most_bytes: int, found: list[FieldViolation]) -> None:
    messages = prompt.messages
    if not messages:
        found.append(FieldViolation("prompt.chat.messages", "is empty"))
    if len(messages) > MAX_CHAT_MESSAGES:
        message = f"has more than {MAX_CHAT_MESSAGES} messages"
        found.append(FieldViolation("prompt.chat.messages", message))
        return
    without_role = [index for index, (role, _) in enumerate(messages) if not role]
    for index in without_role[:MAX_LISTED]:
        found.append(FieldViolation(f"prompt.chat.messages[{index}].role", "is empty"))
    size_bytes = sum(len(role.encode()) + len(content.encode()) for role, content in messages)
    size_bytes += json_bytes(prompt)
    if size_bytes > most_bytes:
        found.append(FieldViolation("prompt.chat", f"has {size_bytes} bytes; at most {most_bytes} are read"))
    if prompt.continue_final_message and messages and messages[-1][0] != "assistant":
        message = f"the last message is {shown(messages[-1][0])}'s; the assistant's can be continued"
        found.append(FieldViolation("prompt.chat.continue_final_message", message))
    if prompt.continue_final_message and prompt.has_generation_prompt:
        message = "opens a new turn; with continue_final_message the last one goes on"
        found.append(FieldViolation("prompt.chat.add_generation_prompt", message))
    found += _wrong_template_kwargs(prompt.template_kwargs)


def _wrong_template_kwargs(kwargs: Mapping[str, Any]) -> list[FieldViolation]:
    reserved = sorted(_TEMPLATE_RESERVED & kwargs.keys())
    found = [
        FieldViolation(f"{TEMPLATE_KWARGS}.{name}", "is not a template's variable that a caller sets")
        for name in reserved
    ]
    size_bytes = 0
    left: list[tuple[Any, int]] = [(kwargs, 1)]
    while left:
        value, depth = left.pop()
        size_bytes += len(value.encode()) if isinstance(value, str) else 8
        if depth > MAX_TEMPLATE_DEPTH or size_bytes > MAX_TEMPLATE_KWARGS_BYTES:
            limit = f"has more than {MAX_TEMPLATE_KWARGS_BYTES} bytes, or is deeper than {MAX_TEMPLATE_DEPTH}"
            return [*found, FieldViolation(TEMPLATE_KWARGS, limit)]
        if isinstance(value, Mapping):
            left += [(each, depth + 1) for pair in value.items() for each in pair]
        elif isinstance(value, list | tuple):
            left += [(each, depth + 1) for each in value]
    return found


def is_movable(request: RequestInput, model: ModelLimits) -> bool:
    """Whether another model may answer instead: the request names no token of its own, and surely fits."""
    sampling, prompt = request.sampling, request.prompt
    names_tokens = request.stop_token_ids or sampling.logit_bias or sampling.allowed_token_ids or sampling.bad_words
    if not request.is_movable or names_tokens or sampling.top_logprobs is not None:
        return False
    if sampling.prompt_logprobs is not None or request.constraint_after is not None or request.n > model.max_sequences:
        return False
    match prompt:
        case TextPrompt(text):
            size_bytes = len(text.encode())
        case ChatPrompt():
            size_bytes = json_bytes(prompt) + sum(len(role) + len(text.encode()) for role, text in prompt.messages)
            size_bytes += TEMPLATE_TOKENS
        case _:
            return False
    return size_bytes + request.max_tokens < model.max_context_tokens  # a token has a byte at least


def prompt_is_readable(prompt: Prompt | None, violations: Sequence[FieldViolation]) -> bool:
    return prompt is not None and not any(v.field == "prompt" or v.field.startswith("prompt.") for v in violations)


def _check_token_ids(name: str, ids: Sequence[int], model: ModelLimits, found: list[FieldViolation]) -> None:
    if max(ids) < model.vocab_size:
        return
    wrong = [index for index, token_id in enumerate(ids) if token_id >= model.vocab_size]
    for index in wrong[:MAX_LISTED]:
        message = f"{ids[index]} is outside the model's vocabulary of {model.vocab_size} tokens"
        found.append(FieldViolation(f"{name}[{index}]", message))
    if len(wrong) > MAX_LISTED:
        found.append(FieldViolation(name, f"{len(wrong) - MAX_LISTED} more are outside the vocabulary"))


def _check_stops(request: RequestInput, model: ModelLimits, found: list[FieldViolation]) -> None:
    if len(request.stop) > MAX_STOP_STRINGS:
        found.append(FieldViolation("stop", f"has {len(request.stop)} strings, more than {MAX_STOP_STRINGS}"))
    for index, stop in enumerate(request.stop[:MAX_STOP_STRINGS]):
        size_bytes = len(stop.encode())
        if not stop:
            found.append(FieldViolation(f"stop[{index}]", "is empty"))
        elif size_bytes > MAX_STOP_BYTES:
            found.append(FieldViolation(f"stop[{index}]", f"has {size_bytes} bytes, more than {MAX_STOP_BYTES}"))
    if len(request.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        message = f"has {len(request.stop_token_ids)} ids, more than {MAX_STOP_TOKEN_IDS}"
        found.append(FieldViolation("stop_token_ids", message))
    elif request.stop_token_ids:
        _check_token_ids("stop_token_ids", request.stop_token_ids, model, found)
