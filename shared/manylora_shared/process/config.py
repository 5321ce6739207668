"""Flags, MANYLORA_* variables and the file that --config names become one frozen dataclass; the first named wins.

The only module that touches `os.environ`. All processes of a machine share the environment, so an unknown variable is
an error only where it looks like a misspelt field.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, Protocol, TypeVar, get_args, get_origin, get_type_hints

import yaml

PREFIX = "MANYLORA_"
CONFIG_FLAG = "config"
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
# PyYAML lets through what Python's types say of a value: a date of month 99, `!!bool 7`
_OF_YAML = (ValueError, ArithmeticError, LookupError, AttributeError, TypeError, RecursionError)
_TYPO_SIMILARITY = 0.85  # difflib's ratio


class ConfigError(ValueError):
    """The message names the setting and where it came from."""


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


C = TypeVar("C", bound=_Dataclass)


def setting(default: Any, help: str, *, at_least: float | None = None, above: float | None = None) -> Any:
    """A dataclass's field, with its line in --help and its bounds."""
    return dataclasses.field(default=default, metadata={"help": help, "at_least": at_least, "above": above})


def check_bounds(config: _Dataclass) -> None:
    """For `__post_init__`: raises ConfigError."""
    for field in dataclasses.fields(config):
        value, low, above = getattr(config, field.name), field.metadata.get("at_least"), field.metadata.get("above")
        if low is not None and not value >= low:
            raise ConfigError(f"{flag_of(field.name)}: must be at least {low:g}")
        if above is not None and not value > above:
            raise ConfigError(f"{flag_of(field.name)}: must be greater than {above:g}")


def load(config: type[C], argv: Sequence[str] | None = None, env: Mapping[str, str] | None = None) -> C:
    """Exits with 2 and what is wrong, or with 0 after --help."""
    arguments = sys.argv[1:] if argv is None else argv
    if "--help" in arguments or "-h" in arguments:
        print(help_text(config))
        raise SystemExit(0)
    try:
        return parse(config, arguments, environment() if env is None else env)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def environment() -> Mapping[str, str]:
    """This process's, to pass on."""
    return dict(os.environ)


def python_environment() -> Mapping[str, str]:
    """For a Python process of this one's packages."""
    return {**environment(), "PYTHONPATH": os.pathsep.join(sys.path)}


def set_default(variable: str, value: str) -> None:
    """For a library that has no other way to be set."""
    os.environ.setdefault(variable, value)


def parse(config: type[C], argv: Sequence[str], env: Mapping[str, str]) -> C:
    """As `load`, without exits. Raises ConfigError, also for a ValueError of `__post_init__`."""
    kinds = get_type_hints(config)
    fields = {f.name: kinds[f.name] for f in dataclasses.fields(config)}
    assert CONFIG_FLAG not in fields, "--config names the file"
    found = _read_environment(env, fields) | _read_flags(argv, fields)
    path = found.pop(CONFIG_FLAG, None)
    if path is not None:
        found = _read_file(Path(str(path.value)), fields) | found
    values = {name: _convert(raw.value, fields[name], raw.source) for name, raw in found.items()}
    missing = [f.name for f in dataclasses.fields(config) if f.name not in values and _is_required(f)]
    if missing:
        raise ConfigError(", ".join(f"{flag_of(name)} ({PREFIX}{name.upper()})" for name in missing) + ": must be set")
    try:
        return config(**values)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error


def help_text(config: type[_Dataclass]) -> str:
    kinds = get_type_hints(config)
    rows = [("--config FILE", "a YAML file of settings; flags and environment come before it")]
    for field in dataclasses.fields(config):
        flag, kind = flag_of(field.name), kinds[field.name]
        shown = str(field.default).lower() if kind is bool else str(field.default)
        default = "[required]" if _is_required(field) else f"[default {shown}]" if shown else ""
        left = f"{flag}, --no-{flag[2:]}" if kind is bool else f"{flag} {_describe(kind)}"
        rows.append((left, f"{field.metadata.get('help', '')} {default}".strip()))
    width = max(len(left) for left, _ in rows)
    lines = [(config.__doc__ or config.__name__).strip().splitlines()[0], "", "settings:"]
    lines += [f"  {left:<{width}}  {right}".rstrip() for left, right in rows]
    lines += ["", f"Every setting is also read from {PREFIX}<NAME>, e.g. {PREFIX}{next(iter(kinds)).upper()}."]
    return "\n".join(lines)


def check_listen(listen: str, flag: str = "--listen") -> None:
    """Raises ConfigError: it is no `host:port`."""
    host, separator, port = listen.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{flag}: {listen!r} is not host:port")


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class _Raw:
    value: object
    source: str  # as the operator is told


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING


def _read_flags(argv: Sequence[str], fields: Mapping[str, Any]) -> dict[str, _Raw]:
    found: dict[str, _Raw] = {}
    switches = {flag_of(name): name for name in [*fields, CONFIG_FLAG]}
    negations = {"--no-" + flag_of(name)[2:]: name for name, kind in fields.items() if kind is bool}
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        name = negations.get(flag) or switches.get(flag)
        if name is None:
            _refuse_flag(word, flag, [*switches, *negations])
        if flag in negations:
            if equals:
                raise ConfigError(f"{flag}: takes no value")
            value = "false"
        elif not equals and fields.get(name) is bool:
            value = "true"
        elif not equals:
            if not words:
                raise ConfigError(f"{flag}: needs a value")
            value = words.pop(0)
        if name in found:
            raise ConfigError(f"{flag}: given more than once")
        found[name] = _Raw(value, flag)
    return found


def _refuse_flag(word: str, flag: str, known: Sequence[str]) -> NoReturn:
    if not word.startswith("--"):
        raise ConfigError(f"{word!r}: unexpected argument")
    close = difflib.get_close_matches(flag, known, n=1)
    raise ConfigError(f"{flag}: unknown setting" + (f"; did you mean {close[0]}?" if close else "; see --help"))


def _read_environment(env: Mapping[str, str], fields: Mapping[str, Any]) -> dict[str, _Raw]:
    found: dict[str, _Raw] = {}
    for variable in sorted(v for v in env if v.startswith(PREFIX)):
        name = variable[len(PREFIX) :].lower()
        if name in fields or name == CONFIG_FLAG:
            found[name] = _Raw(env[variable], variable)
        elif close := difflib.get_close_matches(name, fields, n=1, cutoff=_TYPO_SIMILARITY):
            raise ConfigError(f"{variable}: unknown setting; did you mean {PREFIX}{close[0].upper()}?")
    return found


def _read_file(path: Path, fields: Mapping[str, Any]) -> dict[str, _Raw]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: {path}: {error.strerror}") from error
    except (yaml.YAMLError, *_OF_YAML) as error:
        raise ConfigError(f"--config: {path}: is not YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config: {path}: must be a mapping of settings")
    for key in content:
        if key not in fields:
            close = difflib.get_close_matches(str(key), fields, n=1)
            raise ConfigError(f"{path}: {key}: unknown setting" + (f"; did you mean {close[0]}?" if close else ""))
    return {key: _Raw(value, f"{path}: {key}") for key, value in content.items()}


def _convert(value: object, kind: Any, source: str) -> object:
    """value: a text, or what YAML made of one."""
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ConfigError(f"{source}: {value!r} is not one of {', '.join(get_args(kind))}")
        return value
    if kind is bool:
        word = str(value).strip().lower()
        if word not in _WORDS or isinstance(value, int) is not isinstance(value, bool):
            raise ConfigError(f"{source}: {value!r} is not one of true, false")
        return _WORDS[word]
    if kind in (int, float):
        return _convert_number(value, kind, source)
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise ConfigError(f"{source}: {value!r} is not text")
    try:
        return Path(str(value)).expanduser() if kind is Path else str(value)
    except RuntimeError as error:  # `~somebody` whom the machine does not know
        raise ConfigError(f"{source}: {value!r}: {error}") from error


def _convert_number(value: object, kind: type[int] | type[float], source: str) -> int | float:
    name = "a whole number" if kind is int else "a number"
    if isinstance(value, bool) or not isinstance(value, str | int | float) or (kind is int and type(value) is float):
        raise ConfigError(f"{source}: {value!r} is not {name}")
    try:
        number = kind(value)
    except (ValueError, OverflowError):
        raise ConfigError(f"{source}: {value!r} is not {name}") from None
    if isinstance(number, float) and not math.isfinite(number):
        raise ConfigError(f"{source}: {value!r} is not a finite number")
    return number


def _describe(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return {str: "TEXT", int: "INT", float: "NUMBER", Path: "PATH"}[kind]
