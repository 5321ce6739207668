"""A prompt and options as callers give them, checked and put into a request; what is wrong is refused by its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from manylora_shared.errors import Code, FieldViolation, shown

from manylora.client.answers import RequestFailed
from manylora.v1 import inference_pb2

# text, token ids, or chat messages ({"role": ..., "content": ...})
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
_MAX_TOKEN_ID = 2**32 - 1
_WORDS = {
    FieldDescriptor.CPPTYPE_UINT32: f"a whole number from 0 to {2**32 - 1}",
    FieldDescriptor.CPPTYPE_UINT64: f"a whole number from 0 to {2**64 - 1}",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
    FieldDescriptor.CPPTYPE_STRING: "text",
}

M = TypeVar("M", bound=Message)


def refuse(violations: list[FieldViolation]) -> None:
    """Raises RequestFailed where there is one."""
    if violations:
        message = "; ".join(f"{v.field}: {v.description}" for v in violations)
        raise RequestFailed(Code.INVALID_ARGUMENT.name, message, violations=violations)


def message_of(kind: type[M], given: Mapping[str, Any], path: str = "") -> M:
    """Raises RequestFailed, INVALID_ARGUMENT.

    Args:
        path: before the fields' names in what is said.
    """
    letters = [name for name, value in given.items() if isinstance(value, str) and _is_several(kind, name)]
    try:
        if not letters:
            return kind(**given)
    except (TypeError, ValueError):
        pass  # which of them, protobuf does not say
    wrong = [name for name, value in given.items() if name in letters or not _fits(kind, name, value)]
    refuse([FieldViolation(path + name, f"must be {_needs(kind, name)}, not {_told(given[name])}") for name in wrong])
    raise AssertionError(f"every field of {kind.__name__} fits, and all of them together do not")


def check_kind(name: str, value: object, *kinds: type) -> None:
    """None is absent. Raises RequestFailed, INVALID_ARGUMENT."""
    if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
        needs = " or ".join(kind.__name__ for kind in kinds)
        refuse([FieldViolation(name, f"must be {needs}, not {_told(value)}")])


def _fits(kind: type[Message], name: str, value: Any) -> bool:
    try:
        kind(**{name: value})
    except (TypeError, ValueError):
        return False
    return True


def _is_several(kind: type[Message], name: str) -> bool:
    return bool(kind.DESCRIPTOR.fields_by_name[name].is_repeated)


def _needs(kind: type[Message], name: str) -> str:
    field = kind.DESCRIPTOR.fields_by_name[name]
    if not field.is_repeated:
        return _WORDS[field.cpp_type]
    if field.message_type is not None:
        return "numbers by token id"
    return f"a list of which each is {_WORDS[field.cpp_type]}"


def _told(value: object) -> str:
    return shown(value) if isinstance(value, str) else f"{str(value)[:64]} ({type(value).__name__})"


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


def set_chat_options(
    request: inference_pb2.GenerateRequest,
    *,
    continue_final_message: bool,
    add_generation_prompt: bool | None,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> None:
    """Raises RequestFailed, INVALID_ARGUMENT, where the prompt is no chat."""
    given = {
        "continue_final_message": continue_final_message or None,
        "add_generation_prompt": add_generation_prompt,
        "chat_template_kwargs": chat_template_kwargs or None,
    }
    asked = [name for name, value in given.items() if value is not None]
    if not asked:
        return
    if request.WhichOneof("prompt") != "chat":
        refuse([FieldViolation(name, "is for a prompt of chat messages") for name in asked])
    request.chat.continue_final_message = continue_final_message
    if add_generation_prompt is not None:
        request.chat.add_generation_prompt = add_generation_prompt
    if chat_template_kwargs:
        try:
            request.chat.chat_template_kwargs.update(dict(chat_template_kwargs))
        except (TypeError, ValueError) as error:
            refuse([FieldViolation("chat_template_kwargs", f"must be JSON: {error}")])


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
