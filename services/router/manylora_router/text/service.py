"""Text for the router: a TextService turns prompts into token ids and gives detokenizers.

Owns the tokenizer and the threads it runs in. Tokenizing never runs on the event loop, and on `threads` threads at
most; callers wait their turn in order. How long a text may be is admission's to say, before it comes here. Detokenizers
are plain objects for the event loop: a step costs well under a microsecond with TokenBytes, some microseconds without.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from manylora_shared.errors import InvalidRequest, Unready

from manylora_router.text.detokenizer import BytesDetokenizer, Detokenizer, NoText, TokenBytes, WindowDetokenizer

_LOG = logging.getLogger(__name__)


class TextService(Protocol):
    @property
    def has_text(self) -> bool:
        """False: the router knows token ids only; `encode` and `encode_chat` raise Unready, all text is empty."""

    async def encode(self, text: str) -> Sequence[int]:
        """The tokens of a plain prompt, with what the tokenizer puts around one (begin-of-sequence)."""

    async def encode_chat(self, messages: Sequence[tuple[str, str]]) -> Sequence[int]:
        """The tokens of a conversation of (role, content) in the model's chat template, ready for the answer.

        Raises:
            Unready: the model has no chat template.
            InvalidRequest: the template refuses the messages.
        """

    def detokenizer(self) -> Detokenizer:
        """A fresh one, for one choice."""

    async def close(self) -> None: ...


class TokenIdsOnlyText:
    """The TextService of a router without a tokenizer."""

    has_text = False

    async def encode(self, text: str) -> Sequence[int]:
        raise Unready("prompt.text: this router has no tokenizer; send prompt.token_ids")

    async def encode_chat(self, messages: Sequence[tuple[str, str]]) -> Sequence[int]:
        raise Unready("prompt.chat: this router has no tokenizer; send prompt.token_ids")

    def detokenizer(self) -> Detokenizer:
        return NoText()

    async def close(self) -> None:
        pass


class FakeText:
    """A TextService for tests and the simulation: one token a byte, `first_byte_id` + byte; other ids have no text."""

    has_text = True

    def __init__(self, *, first_byte_id: int = 3) -> None:
        self._first_byte_id = first_byte_id
        self._tokens = TokenBytes([b""] * first_byte_id + [bytes([b]) for b in range(256)])

    def ids(self, text: str) -> list[int]:
        return [self._first_byte_id + byte for byte in text.encode()]

    async def encode(self, text: str) -> Sequence[int]:
        return self.ids(text)

    async def encode_chat(self, messages: Sequence[tuple[str, str]]) -> Sequence[int]:
        return self.ids("".join(f"{role}: {content}\n" for role, content in messages))

    def detokenizer(self) -> Detokenizer:
        return BytesDetokenizer(self._tokens)

    async def close(self) -> None:
        pass


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
    "vocab.txt",
)


def has_tokenizer(folder: Path) -> bool:
    """Whether a model folder holds any file of a tokenizer. A broken one counts: it is an error, not an absence."""
    return any((folder / name).exists() for name in _TOKENIZER_FILES)


class HfTextService:
    """The tokenizer of a Hugging Face model folder."""

    has_text = True

    def __init__(self, tokenizer: Any, *, threads: int = 2) -> None:
        """
        Args:
            tokenizer: a transformers tokenizer.
            threads: how many texts are tokenized at a time.
        """
        self._tokenizer = tokenizer
        self._executor = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="tokenizer")
        self._decode = _decode_function(tokenizer)
        self._token_bytes = read_token_bytes(tokenizer)

    @classmethod
    def load(cls, folder: Path, *, threads: int = 2) -> HfTextService:
        """Reads the tokenizer; blocks for seconds. Raises OSError or ValueError where there is none to read."""
        from transformers import AutoTokenizer  # here: the import costs seconds, and token-id routers do without

        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: is no folder with a tokenizer")
        return cls(AutoTokenizer.from_pretrained(str(folder), local_files_only=True), threads=threads)

    async def encode(self, text: str) -> Sequence[int]:
        return await self._in_thread(self._encode, text, True)

    async def encode_chat(self, messages: Sequence[tuple[str, str]]) -> Sequence[int]:
        if not getattr(self._tokenizer, "chat_template", None):
            raise Unready("prompt.chat: the model's tokenizer has no chat template; send prompt.text")
        return await self._in_thread(self._encode_chat, messages)

    def detokenizer(self) -> Detokenizer:
        if self._token_bytes is not None:
            return BytesDetokenizer(self._token_bytes)
        return WindowDetokenizer(self._decode)

    async def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, function: Callable[..., list[int]], *arguments: object) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # `verbose=False`: no warning about model_max_length; admission checks the length.
        found = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        return list(found["input_ids"])

    def _encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        import jinja2

        conversation = [{"role": role, "content": content} for role, content in messages]
        try:
            text = self._tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        except (jinja2.TemplateError, TypeError, ValueError) as e:
            raise InvalidRequest.of("prompt.chat", f"the model's chat template refuses it: {e}") from e
        return self._encode(text, False)


def _decode_function(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """The text of token ids, without special tokens and without the clean-up of spaces that some tokenizers ask for:
    it moves text that was already given out."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return lambda ids: str(backend.decode(list(ids), skip_special_tokens=True))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def read_token_bytes(tokenizer: Any) -> TokenBytes | None:
    """The bytes of every token, where the tokenizer is of a kind that has them; None: use its `decode`.

    Which kind it is follows from the decoder in its description. What comes out is tried against its own `decode`.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    decoder = json.loads(backend.to_str())["decoder"]
    steps = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder] if decoder else []
    kinds = [s["type"] for s in steps]
    if kinds == ["ByteLevel"]:
        to_bytes, strips = _byte_level_bytes, False
    elif kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and steps[0]["pattern"] == {"String": "\u2581"}:
        to_bytes = _byte_fallback_bytes
        if kinds[3:] == ["Strip"] and (steps[3]["content"], steps[3]["start"], steps[3]["stop"]) == (" ", 1, 0):
            strips = True
        elif kinds[3:]:
            return None
        else:
            strips = False
    else:
        return None
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    pieces: list[bytes] = []
    for token_id in range(backend.get_vocab_size(with_added_tokens=True)):
        token = backend.id_to_token(token_id)
        pieces.append(b"" if token is None or token_id in special else to_bytes(token))
    found = TokenBytes(pieces, strips)
    decode = _decode_function(tokenizer)
    if not all(_agrees(found, decode, ids) for ids in _samples(pieces)):
        _LOG.warning("this tokenizer's decode is not the bytes of its tokens; the slower way is taken")
        return None
    return found


_GOLDEN = 0x9E3779B1
_SAMPLES = 256
_SAMPLE_TOKENS = 8


def _samples(pieces: Sequence[bytes]) -> list[list[int]]:
    """Token sequences to try a TokenBytes with: all over the vocabulary, the same at every start.

    Only of tokens that are whole characters: how bytes that are not UTF-8 are shown may differ, harmlessly.
    """
    whole = [token_id for token_id, piece in enumerate(pieces) if _is_utf8(piece)]
    drawn = [whole[(i * _GOLDEN) % (1 << 32) % len(whole)] for i in range(_SAMPLES * _SAMPLE_TOKENS)] if whole else []
    return [drawn[i : i + _SAMPLE_TOKENS] for i in range(0, len(drawn), _SAMPLE_TOKENS)]


def _is_utf8(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def _agrees(tokens: TokenBytes, decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> bool:
    detokenizer = BytesDetokenizer(tokens)
    return "".join([detokenizer.push(token_id) for token_id in ids]) + detokenizer.finish() == decode(ids)


def _byte_level_alphabet() -> dict[str, int]:
    """The characters by which byte-level BPE writes bytes: printable Latin-1 as itself, all else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_LEVEL = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_LEVEL[character] for character in token])
    except KeyError:
        return token.encode()  # an added token stands for itself


def _byte_fallback_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return token.encode()
    return token.replace("\u2581", " ").encode()
