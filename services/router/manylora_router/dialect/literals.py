"""Values in other notations than JSON: Python's literals, and Gemma's objects with bare keys."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from manylora_router.dialect.json_scan import is_literal

MAX_DEPTH = 32
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[\w.-]{1,256}")
_WORDS: Mapping[str, Any] = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", "\\": "\\", "'": "'", '"': '"'}
_NUMBER = re.compile(r"-?\d{1,300}(?:\.\d{1,300})?(?:[eE][+-]?\d{1,3})?")


class NotReadable(ValueError):
    pass


@dataclass(frozen=True)
class Notation:
    string: re.Pattern[str]
    read_string: Callable[[str], str]
    has_bare_keys: bool = False


def _python_string(text: str) -> str:
    return _ESCAPE.sub(_unescaped, text[1:-1])


def _unescaped(escape: re.Match[str]) -> str:
    code, character = escape[1] or escape[2] or escape[3], escape[4]
    if code is None:
        return _ESCAPED.get(character, escape[0])
    if int(code, 16) > sys.maxunicode:
        raise NotReadable(f"no character {code}")
    return chr(int(code, 16))


PYTHON = Notation(re.compile(r"""'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*\"""", re.DOTALL), _python_string)


def quoted_by(mark: str) -> Notation:
    """Strings stand between two marks, and have no escapes."""
    quote = re.escape(mark)
    pattern = re.compile(f"{quote}.*?{quote}", re.DOTALL)
    return Notation(pattern, lambda text: text[len(mark) : -len(mark)], has_bare_keys=True)


class Reader:
    """Over a whole text. Its methods raise NotReadable."""

    def __init__(self, text: str, notation: Notation) -> None:
        self._text = text
        self._notation = notation
        self.at = 0

    @property
    def is_at_end(self) -> bool:
        self._skip()
        return self.at == len(self._text)

    def has(self, mark: str) -> bool:
        """Takes it where it stands next."""
        self._skip()
        found = self._text.startswith(mark, self.at)
        self.at += len(mark) * found
        return found

    def need(self, mark: str) -> None:
        if not self.has(mark):
            raise NotReadable(f"no {mark} at {self.at}")

    def name(self) -> str:
        return self._match(_NAME)

    def members(self, separator: str, close: str, depth: int = 1) -> dict[str, Any]:
        """After the opening mark: named values, to the closing one."""
        found: dict[str, Any] = {}
        while not self.has(close):
            is_name = separator == "=" or (self._notation.has_bare_keys and not self._is_at_string())
            key = self.name() if is_name else self._string()
            self.need(separator)
            found[key] = self._value(depth)
            if not self.has(","):
                self.need(close)
                break
        return found

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise NotReadable("too deep")
        if self._is_at_string():
            return self._string()
        if self.has("{"):
            return self.members(":", "}", depth + 1)
        if self.has("["):
            return self._items(depth + 1)
        if number := _NUMBER.match(self._text, self.at):
            if not is_literal(number[0]):
                raise NotReadable(f"no number at {self.at}")
            self.at = number.end()
            return json.loads(number[0])
        word = self.name()
        if word not in _WORDS:
            raise NotReadable(f"no value at {self.at}")
        return _WORDS[word]

    def _items(self, depth: int) -> list[Any]:
        found: list[Any] = []
        while not self.has("]"):
            found.append(self._value(depth))
            if not self.has(","):
                self.need("]")
                break
        return found

    def _is_at_string(self) -> bool:
        self._skip()
        return self._notation.string.match(self._text, self.at) is not None

    def _string(self) -> str:
        return self._notation.read_string(self._match(self._notation.string))

    def _match(self, pattern: re.Pattern[str]) -> str:
        self._skip()
        found = pattern.match(self._text, self.at)
        if found is None:
            raise NotReadable(f"nothing that is known at {self.at}")
        self.at = found.end()
        return found[0]

    def _skip(self) -> None:
        found = _SPACE.match(self._text, self.at)
        assert found is not None
        self.at = found.end()
