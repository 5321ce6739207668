"""A prompt as callers give it, checked and put into a request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from manylora_shared.errors import Code, FieldViolation

from manylora.client.answers import RequestFailed
from manylora.v1 import inference_pb2

# text, token ids, or chat messages ({"role": ..., "content": ...})
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
_MAX_TOKEN_ID = 2**32 - 1


def refuse(violations: list[FieldViolation]) -> None:
    """Raises RequestFailed where there is one."""
    if violations:
        message = "; ".join(f"{v.field}: {v.description}" for v in violations)
        raise RequestFailed(Code.INVALID_ARGUMENT.name, message, violations=violations)


def set_prompt(request: inference_pb2.GenerateRequest, prompt: Prompt) -> None:
    """Raises RequestFailed, INVALID_ARGUMENT."""
    if isinstance(prompt, str):
        request.text = prompt
        return
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        found = type(prompt).__name__
        refuse([FieldViolation("prompt", f"must be text, token ids or chat messages, not {found}")])
    if prompt and isinstance(prompt[0], Mapping):
        refuse([violation for index, message in enumerate(prompt) for violation in _wrong_message(index, message)])
        request.chat.SetInParent()
        for message in prompt:
            assert isinstance(message, Mapping)
            request.chat.messages.add(role=message["role"], content=message["content"])
        return
    wrong = next((index for index, token in enumerate(prompt) if not _is_token_id(token)), None)
    if wrong is not None:
        refuse([FieldViolation(f"prompt[{wrong}]", "must be a token id, as the prompt is neither text nor messages")])
    request.token_ids.SetInParent()
    request.token_ids.ids.extend(token for token in prompt if isinstance(token, int))


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_TOKEN_ID


def _wrong_message(index: int, message: object) -> Iterator[FieldViolation]:
    if not isinstance(message, Mapping):
        yield FieldViolation(f"prompt[{index}]", "must be a chat message as the first is")
        return
    for name in ("role", "content"):
        value = message.get(name)
        if not isinstance(value, str):
            found = f"be text, not {type(value).__name__}" if name in message else "be given"
            yield FieldViolation(f"prompt[{index}].{name}", f"must {found}")
    for name in sorted(message.keys() - {"role", "content"}, key=str):
        yield FieldViolation(f"prompt[{index}].{name}", "is not known, only role and content")
