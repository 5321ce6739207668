"""A TextService turns prompts into token ids, off the event loop, and gives detokenizers."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from manylora_shared.errors import FieldViolation, InvalidRequest, NoChatTemplate, Unready, shown
from manylora_shared.stores.adapter_tokenizer import BroughtTokenizer, differences

from manylora_router.text.detokenizer import Detokenizer, WindowDetokenizer

_T = TypeVar("_T")
_CACHED_TOKENS = 1 << 16
_TOLD_OTHERWISE = frozenset(("user", "assistant", "tool"))
_MAX_TEMPLATE_WORDS = 512  # characters of what a template says when it refuses
NO_KWARGS: Mapping[str, Any] = MappingProxyType({})
NO_MORE: Mapping[int, Mapping[str, Any]] = MappingProxyType({})


class TextService(Protocol):
    @property
    def has_text(self) -> bool:
        """False: `encode` and `encode_chat` raise Unready, and all text is empty."""

    @property
    def num_threads(self) -> int:
        """Texts that are encoded at a time."""

    @property
    def chat_template(self) -> str:
        """With all that the model has, one behind the other; empty: none."""

    @property
    def end_token_ids(self) -> Sequence[int]:
        """Ends of an answer, for a model whose configuration names none."""

    @property
    def info(self) -> Mapping[str, Any]:
        """Of the tokenizer, as its tokenizer_config.json names it. Raises Unready."""

    async def encode(self, text: str, add_special_tokens: bool = True) -> Sequence[int]:
        """Begin-of-sequence included, where it is to be."""

    async def encode_chat(
        self,
        messages: Sequence[tuple[str, str]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] = NO_KWARGS,
        tools: Sequence[Mapping[str, Any]] = (),
        more: Mapping[int, Mapping[str, Any]] = NO_MORE,
    ) -> Sequence[int]:
        """messages: (role, content), and `more` of them by index; the rest as transformers' apply_chat_template has it.

        Raises Unready without a template, InvalidRequest where it refuses them or changes what is to be continued.
        """

    async def encode_words(self, words: Sequence[str]) -> Sequence[Sequence[int]]:
        """Each word as it is, and behind a space where that does not end in the same tokens. Raises Unready."""

    def stop_tokens(self, stops: Sequence[str]) -> Mapping[int, str]:
        """Those that are a token of their own, by its id. Raises InvalidRequest for what no answer's text can have."""

    def mark(self, text: str) -> int | None:
        """The token that it is and that no other text is made of; None: there is none."""

    async def differences(self, brought: BroughtTokenizer) -> list[FieldViolation]:
        """Between the base model's tokenizer and an adapter's."""

    def detokenizer(
        self, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True, kept: Sequence[str] = ()
    ) -> Detokenizer:
        """A fresh one, for one choice of this prompt. `kept`: special tokens that are not skipped."""

    def token(self, token_id: int) -> str:
        """By itself, special ones too: part of a character is U+FFFD."""

    async def decode(self, token_ids: Sequence[int]) -> str:
        """With special tokens."""

    async def close(self) -> None: ...


class _NoText:
    def push(self, token_ids: Sequence[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


class TokenIdsOnlyText:
    has_text = False
    chat_template = ""
    num_threads = 1
    end_token_ids: Sequence[int] = ()

    async def encode(self, text: str, add_special_tokens: bool = True) -> Sequence[int]:
        raise Unready("prompt.text: this router has no tokenizer; send prompt.token_ids")

    async def encode_chat(
        self,
        messages: Sequence[tuple[str, str]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] = NO_KWARGS,
        tools: Sequence[Mapping[str, Any]] = (),
        more: Mapping[int, Mapping[str, Any]] = NO_MORE,
    ) -> Sequence[int]:
        raise Unready("prompt.chat: this router has no tokenizer; send prompt.token_ids")

    async def encode_words(self, words: Sequence[str]) -> Sequence[Sequence[int]]:
        raise Unready("sampling.bad_words: this router has no tokenizer")

    def stop_tokens(self, stops: Sequence[str]) -> Mapping[int, str]:
        return {}

    def mark(self, text: str) -> int | None:
        return None

    async def differences(self, brought: BroughtTokenizer) -> list[FieldViolation]:
        return []  # there is no text that it could change

    def detokenizer(
        self, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True, kept: Sequence[str] = ()
    ) -> Detokenizer:
        return _NoText()

    def token(self, token_id: int) -> str:
        return f"token_id:{token_id}"

    @property
    def info(self) -> Mapping[str, Any]:
        raise Unready("tokenizer_info: this router has no tokenizer")

    async def decode(self, token_ids: Sequence[int]) -> str:
        raise Unready("tokens: this router has no tokenizer")

    async def close(self) -> None:
        pass


def word_sequences(words: Sequence[str], encode: Callable[[str], list[int]]) -> list[list[int]]:
    found: list[list[int]] = []
    for word in words:
        bare = word.lstrip() or word
        own, spaced = encode(bare), encode(" " + bare)
        found.append(own)
        if spaced[-len(own) :] != own:
            found.append(spaced)
    return found


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
    "vocab.txt",
)


def has_tokenizer(folder: Path) -> bool:
    """A broken one counts."""
    return any((folder / name).exists() for name in _TOKENIZER_FILES)


class HfTextService:
    has_text = True

    def __init__(self, tokenizer: Any, *, threads: int = 2) -> None:
        """`tokenizer`: of transformers."""
        self._tokenizer = tokenizer
        self.num_threads = threads
        self._executor = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="tokenizer")
        self._decode = _decode_function(tokenizer, skip_special_tokens=True)
        self._decode_all = _decode_function(tokenizer, skip_special_tokens=False)
        self.token = functools.lru_cache(_CACHED_TOKENS)(lambda token_id: self._decode_all([token_id]))
        end = tokenizer.eos_token_id
        self.end_token_ids: Sequence[int] = () if end is None else (end,)
        added = tokenizer.added_tokens_decoder
        self._added = {token.content: token_id for token_id, token in added.items()}
        self._special_ids = {token.content: each for each, token in added.items() if token.special and token.content}
        self._special = re.compile("|".join(map(re.escape, self._special_ids)) or "(?!)")
        template = getattr(tokenizer, "chat_template", None) or ""
        self.chat_template = "\n".join(template.values()) if isinstance(template, dict) else template

    @classmethod
    def load(cls, folder: Path, *, threads: int = 2) -> HfTextService:
        """Blocks for seconds. Raises OSError or ValueError."""
        from transformers import AutoTokenizer  # here: the import costs seconds, and token-id routers do without

        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: is no folder with a tokenizer")
        return cls(AutoTokenizer.from_pretrained(str(folder), local_files_only=True), threads=threads)

    async def encode(self, text: str, add_special_tokens: bool = True) -> Sequence[int]:
        return await self._in_thread(self._encode, text, add_special_tokens)

    async def encode_chat(
        self,
        messages: Sequence[tuple[str, str]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] = NO_KWARGS,
        tools: Sequence[Mapping[str, Any]] = (),
        more: Mapping[int, Mapping[str, Any]] = NO_MORE,
    ) -> Sequence[int]:
        if not getattr(self._tokenizer, "chat_template", None):
            raise NoChatTemplate("prompt.chat: the model's tokenizer has no chat template; send prompt.text")
        options = {
            **template_kwargs,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": list(tools) or None,
        }
        conversation = [
            {"role": role, "content": content, **more.get(index, {})} for index, (role, content) in enumerate(messages)
        ]
        return await self._in_thread(self._encode_chat, conversation, options)

    async def encode_words(self, words: Sequence[str]) -> Sequence[Sequence[int]]:
        return await self._in_thread(word_sequences, words, lambda text: self._encode(text, False))

    def stop_tokens(self, stops: Sequence[str]) -> Mapping[int, str]:
        # A special token has no text in an answer: a string with one in it would never match.
        found = {self._added[stop]: stop for stop in stops if stop in self._added}
        wrong: list[FieldViolation] = []
        for index, stop in enumerate(stops):
            special = self._special.search(stop)
            if stop not in self._added and special is not None:
                message = f"contains the special token {shown(special[0])}, which can be a stop string alone"
                wrong.append(FieldViolation(f"stop[{index}]", message))
        if wrong:
            raise InvalidRequest.of_all(wrong)
        return found

    def mark(self, text: str) -> int | None:
        return self._added.get(text)

    async def differences(self, brought: BroughtTokenizer) -> list[FieldViolation]:
        return await self._in_thread(self._differences, brought)

    def detokenizer(
        self, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True, kept: Sequence[str] = ()
    ) -> Detokenizer:
        decode = self._decode_all
        if skip_special_tokens:
            decode = self._decode_but(frozenset(kept) & self._special_ids.keys())
        return WindowDetokenizer(decode, prompt_token_ids)

    def _decode_but(self, kept: frozenset[str]) -> Callable[[Sequence[int]], str]:
        if not kept:
            return self._decode
        skipped = frozenset(token_id for token, token_id in self._special_ids.items() if token not in kept)
        return lambda ids: self._decode_all([token_id for token_id in ids if token_id not in skipped])

    async def decode(self, token_ids: Sequence[int]) -> str:
        return await self._in_thread(self._decode_all, token_ids)

    @property
    def info(self) -> Mapping[str, Any]:
        template = self._template
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        specials = {name: None if (token := getattr(self._tokenizer, name)) is None else str(token) for name in names}
        return {"tokenizer_class": type(self._tokenizer).__name__, **specials, "chat_template": template}

    @property
    def _template(self) -> str | None:
        template = getattr(self._tokenizer, "chat_template", None)
        return template.get("default") if isinstance(template, dict) else template

    async def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, function: Callable[..., _T], *arguments: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    def _differences(self, brought: BroughtTokenizer) -> list[FieldViolation]:
        known = brought.added_tokens.keys() <= self._added.keys()
        return differences(brought, self._template or "", self._added if known else self._tokenizer.get_vocab())

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # `verbose=False`: no warning about model_max_length; admission checks the length.
        found = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        return list(found["input_ids"])

    def _encode_chat(self, conversation: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        import jinja2

        try:
            text = self._tokenizer.apply_chat_template(conversation, tokenize=False, **options)
        except Exception as e:  # a template is a program: it may raise anything, by what the messages are
            words = str(e) if isinstance(e, jinja2.TemplateError) else f"{type(e).__name__}: {e}"
            raise InvalidRequest.of(
                "prompt.chat", f"the model's chat template refuses it: {words[:_MAX_TEMPLATE_WORDS]}"
            ) from e
        _check_all_rendered(conversation, text)
        return self._encode(text, False)


def _check_all_rendered(conversation: Sequence[Mapping[str, Any]], text: str) -> None:
    """Templates leave out messages of roles that they do not know, without a word, and some a system's that is not the
    first. What assistants and tools said they may write otherwise. Raises InvalidRequest.
    """
    behind = 0
    for index, message in enumerate(conversation):
        if message["role"] in _TOLD_OTHERWISE:
            continue
        content = message["content"].strip()
        at = text.find(content, behind)
        if at < 0 and (at := text.find(content)) < 0:
            field = f"prompt.chat.messages[{index}].role"
            raise InvalidRequest.of(
                field, f"the model's chat template leaves out this message of {shown(message['role'])}"
            )
        behind = at + len(content)


def _decode_function(tokenizer: Any, *, skip_special_tokens: bool) -> Callable[[Sequence[int]], str]:
    # without the clean-up of spaces: it moves text that was already given out
    skips = skip_special_tokens
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return lambda ids: str(backend.decode(list(ids), skip_special_tokens=skips))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=skips, clean_up_tokenization_spaces=False))
