"""JSON text (RFC 8259) checked one character at a time: what came so far is the beginning of a value, or is not."""

from __future__ import annotations

import json
import math
from enum import Enum, auto

MAX_DEPTH = 64
_MAX_NUMBER_CHARS = 400
_HEX = frozenset("0123456789abcdefABCDEF")
_LITERAL = frozenset("0123456789+-.eEaflnrstu")
_STARTS = frozenset("-0123456789tfn")
_CLOSES = {"}": "{", "]": "["}


class _State(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    LITERAL = auto()
    DONE = auto()


class JsonScanner:
    """Of one value. One that is no object, list or string is done with the character after it, which is not taken."""

    __slots__ = ("_hex_left", "_is_key", "_literal", "_stack", "_state")

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._state = _State.VALUE
        self._is_key = False
        self._hex_left = 0
        self._literal = ""

    @property
    def is_done(self) -> bool:
        return self._state is _State.DONE

    def scan(self, text: str, start: int = 0) -> int:
        """Returns where it stopped: at the end of the text or of the value, or before what cannot be."""
        for position in range(start, len(text)):
            if self._state is _State.DONE or not self._take(text[position]):
                return position
        return len(text)

    def _take(self, character: str) -> bool:
        match self._state:
            case _State.STRING:
                if character == '"':
                    self._end_string()
                elif character == "\\":
                    self._state = _State.ESCAPE
                return character >= " "
            case _State.ESCAPE:
                self._state, self._hex_left = (_State.HEX, 4) if character == "u" else (_State.STRING, 0)
                return character in '"\\/bfnrtu'
            case _State.HEX:
                self._hex_left -= 1
                if not self._hex_left:
                    self._state = _State.STRING
                return character in _HEX
            case _State.LITERAL:
                if character in _LITERAL:
                    self._literal += character
                    return len(self._literal) <= _MAX_NUMBER_CHARS
                if not is_literal(self._literal):
                    return False
                self._end_value()
        return self._state is not _State.DONE and (character in " \t\r\n" or self._take_mark(character))

    def _take_mark(self, character: str) -> bool:
        match self._state:
            case _State.VALUE | _State.VALUE_OR_END if character == "]":
                return self._state is _State.VALUE_OR_END and self._close(character)
            case _State.VALUE | _State.VALUE_OR_END:
                return self._begin_value(character)
            case _State.KEY | _State.KEY_OR_END if character == "}":
                return self._state is _State.KEY_OR_END and self._close(character)
            case _State.KEY | _State.KEY_OR_END:
                self._state, self._is_key = _State.STRING, True
                return character == '"'
            case _State.COLON:
                self._state = _State.VALUE
                return character == ":"
        if character == ",":
            self._state = _State.KEY if self._stack[-1] == "{" else _State.VALUE
            return True
        return self._close(character)

    def _begin_value(self, character: str) -> bool:
        if character in "{[":
            self._stack.append(character)
            self._state = _State.KEY_OR_END if character == "{" else _State.VALUE_OR_END
            return len(self._stack) <= MAX_DEPTH
        if character == '"':
            self._state, self._is_key = _State.STRING, False
            return True
        self._state, self._literal = _State.LITERAL, character
        return character in _STARTS

    def _close(self, character: str) -> bool:
        if _CLOSES.get(character) != self._stack[-1]:
            return False
        self._stack.pop()
        self._end_value()
        return True

    def _end_string(self) -> None:
        if self._is_key:
            self._state = _State.COLON
        else:
            self._end_value()

    def _end_value(self) -> None:
        self._state = _State.COMMA_OR_END if self._stack else _State.DONE


def is_literal(text: str) -> bool:
    """A finite number, true, false or null."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return not isinstance(value, float) or math.isfinite(value)
