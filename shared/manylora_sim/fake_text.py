"""A router's text for tests and the simulation: one token a byte, `first_byte_id` + byte; other ids have no text."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from manylora_shared.errors import FieldViolation
from manylora_shared.stores.adapter_tokenizer import BroughtTokenizer, differences


class FakeDetokenizer:
    def __init__(self, first_byte_id: int = 0) -> None:
        self._first_byte_id = first_byte_id
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        offsets = [token_id - self._first_byte_id for token_id in token_ids]
        return self._decoder.decode(bytes([offset for offset in offsets if 0 <= offset < 256]))

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


_REASONING = ("reasoning_effort", "enable_thinking")


class FakeText:
    has_text = True
    num_threads = 1
    end_token_ids: Sequence[int] = ()

    def __init__(self, *, first_byte_id: int = 3, chat_template: str = "") -> None:
        """`chat_template`: what it says of tools and reasoning counts. Names of tools are rendered, the effort of
        reasoning, and messages' further members.
        """
        self._first_byte_id = first_byte_id
        self.chat_template = chat_template

    def ids(self, text: str) -> list[int]:
        return [self._first_byte_id + byte for byte in text.encode()]

    async def encode(self, text: str, add_special_tokens: bool = True) -> Sequence[int]:
        return self.ids(text)

    async def encode_chat(
        self,
        messages: Sequence[tuple[str, str]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        tools: Sequence[Mapping[str, Any]] = (),
        more: Mapping[int, Mapping[str, Any]] = MappingProxyType({}),
    ) -> Sequence[int]:
        lines = [f"tool {tool['function']['name']}" for tool in tools]
        lines += [f"{name}: {value}" for name, value in template_kwargs.items() if name in _REASONING]
        for index, (role, content) in enumerate(messages):
            lines.append(f"{role}: {content}" + (json.dumps(more[index]) if index in more else ""))
        text = "".join(f"{line}\n" for line in lines)
        return self.ids(text.removesuffix("\n") if continue_final_message else text)

    async def encode_words(self, words: Sequence[str]) -> Sequence[Sequence[int]]:
        return [self.ids(word.lstrip() or word) for word in words]

    def stop_tokens(self, stops: Sequence[str]) -> Mapping[int, str]:
        return {}

    def mark(self, text: str) -> int | None:
        return None

    async def differences(self, brought: BroughtTokenizer) -> list[FieldViolation]:
        return differences(brought, "", {})

    def detokenizer(
        self, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True, kept: Sequence[str] = ()
    ) -> FakeDetokenizer:
        return FakeDetokenizer(self._first_byte_id)

    def token(self, token_id: int) -> str:
        return FakeDetokenizer(self._first_byte_id).push([token_id])

    @property
    def info(self) -> Mapping[str, Any]:
        return {"tokenizer_class": "FakeText", "eos_token": None, "chat_template": None}

    async def decode(self, token_ids: Sequence[int]) -> str:
        return FakeDetokenizer(self._first_byte_id).push(token_ids)

    async def close(self) -> None:
        pass
