"""A JSON object of a request, read field by field: types are checked, what is wrong is gathered, and a field that
nobody asked for is an error. null means absent.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from manylora_shared.errors import FieldViolation, InvalidRequest, shown
from manylora_shared.sampling import MAX_LISTED

_MAX_NUMBER = 3.4e38  # the workers' numbers have single precision


class Fields:
    def __init__(self, document: Mapping[str, Any], path: str = "", found: list[FieldViolation] | None = None) -> None:
        """`found`: where what is wrong is gathered; None: here."""
        self._document = document
        self.path = path
        self._left = dict.fromkeys(document)
        self.found: list[FieldViolation] = [] if found is None else found

    def raw(self, name: str) -> Any:
        self._left.pop(name, None)
        return self._document.get(name)

    def peek(self, name: str) -> Any:
        return self._document.get(name)

    def members_of(self, name: str) -> dict[str, Any]:
        """An object's, as they are."""
        value = self.raw(name)
        if value is not None and not isinstance(value, dict):
            self.wrong(name, "must be an object")
        elif value is not None and not is_unicode(json.dumps(value, ensure_ascii=False)):
            self.wrong(name, "has half of a surrogate pair: it is no Unicode text")
        else:
            return value or {}
        return {}

    def wrong(self, name: str, description: str) -> None:
        """`name`: empty: of the object itself."""
        self.found.append(FieldViolation((self.path + name).rstrip("."), description))

    def text(self, name: str, default: str = "") -> str:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, str):
            self.wrong(name, "must be a string")
        elif not is_unicode(value):
            self.wrong(name, "has half of a surrogate pair: it is no Unicode text")
        else:
            return value
        return default

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.raw(name)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.wrong(name, "must be true or false")
        return default

    def integer(self, name: str, *, at_least: int = 0) -> int | None:
        value = self.raw(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None or (type(value) is int and value >= at_least):
            return value
        if type(value) is int:
            self.wrong(name, f"must be {at_least} or more, not {_digits(value)}")
        else:
            self.wrong(name, "must be a whole number")
        return None

    def number(self, name: str) -> float | None:
        value = self.raw(name)
        if value is None:
            return None
        if (number := _number(value)) is None:
            self.wrong(name, "must be a finite number")
        return number

    def texts(self, name: str, *, most: int) -> Sequence[str]:
        """A list of strings, or one."""
        value = self.raw(name)
        given = [value] if isinstance(value, str) else ([] if value is None else value)
        if not isinstance(given, list) or not all(isinstance(each, str) and is_unicode(each) for each in given):
            self.wrong(name, "must be a string or a list of strings")
            return ()
        return tuple(given[: most + 1])

    def token_ids(self, name: str, *, most: int) -> Sequence[int]:
        value = self.raw(name)
        if value is None:
            return ()
        if not is_token_ids(value, most):
            self.wrong(name, "must be a list of token ids")
            return ()
        ids: list[int] = value
        return ids[: most + 1]

    def biases(self, name: str, *, most: int) -> Mapping[int, float]:
        value = self.raw(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.wrong(name, "must be an object of numbers by token id")
            return {}
        found: dict[int, float] = {}
        for key, bias in itertools.islice(value.items(), most + 1):
            number = _number(bias)
            if not (key.isascii() and key.isdigit() and len(key) < 10) or number is None:
                self.wrong(f"{name}[{key[:20]}]", "must be a number by a token id")
                break
            found[int(key)] = number
        return found

    def inner(self, name: str) -> Fields:
        """Of an object; absent: an empty one. Close it too."""
        value = self.raw(name)
        if value is not None and not isinstance(value, dict):
            self.wrong(name, "must be an object")
            value = None
        return Fields(value or {}, f"{self.path}{name}.", self.found)

    def ignore(self, *names: str) -> None:
        for name in names:
            self._left.pop(name, None)

    def only(self, name: str, *neutral: Any) -> None:
        """A field that is known and does nothing here: what would have it do something is refused."""
        value = self.raw(name)
        if value is None or any(type(value) is type(each) and value == each for each in neutral):
            return
        self.wrong(name, "is not supported" + (f", except as {_words(neutral)}" if neutral else ""))

    def close(self) -> None:
        """What nobody read is wrong too."""
        for name in itertools.islice(self._left, MAX_LISTED):
            self.wrong(name if is_unicode(name) and len(name) <= 64 else shown(name), "is not known here")

    def check(self) -> None:
        """Raises InvalidRequest with all that was found."""
        if self.found:
            raise InvalidRequest.of_all(self.found)


def is_unicode(text: str) -> bool:
    """As against one with half a surrogate pair, which JSON can say."""
    try:
        text.encode()  # the quickest that there is: what is asked of has megabytes, on the event loop
    except UnicodeEncodeError:
        return False
    return True


def is_shallow(value: Any, most: int) -> bool:
    """Whether its lists and objects lie in at most so many of each other."""
    left = [(value, 1)]
    while left:
        each, depth = left.pop()
        if isinstance(each, dict | list):
            if depth > most:
                return False
            inner = each.values() if isinstance(each, dict) else each
            left += [(one, depth + 1) for one in inner if isinstance(one, dict | list)]
    return True


def is_token_ids(value: Any, most: int) -> bool:
    """As far as the first `most` and one more say."""
    if not isinstance(value, list):
        return False
    return all(type(each) is int and 0 <= each < 1 << 32 for each in itertools.islice(value, most + 1))


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -_MAX_NUMBER <= value <= _MAX_NUMBER else None


def _digits(value: int) -> str:
    return str(value) if abs(value) < 1 << 64 else "a number of many digits"


def _words(values: Sequence[Any]) -> str:
    return " or ".join("true" if v is True else "false" if v is False else repr(v) for v in values)
