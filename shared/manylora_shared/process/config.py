"""Settings: flags, environment and a file become one frozen dataclass, once, in a service's `__main__`.

Owns nothing at run time; the only module that touches `os.environ`. Where a setting comes from, the first wins:

    --block-size 16              a flag, the field's name in kebab case; booleans also take --no-<name>
    MANYLORA_BLOCK_SIZE=16       the environment
    block_size: 16               a YAML file named by --config (or MANYLORA_CONFIG)
    block_size: int = 16         the field's default; a field without one must be set

Unknown flags and unknown file keys are errors. Environment variables are shared by all processes of a machine, so an
unknown MANYLORA_ variable is an error only where it looks like a misspelt field.

Field types: str, int, float, bool, Path, an Enum, Literal[...] of strings or integers, tuple[T, ...] of these
(comma-separated, or a list in the file), and `T | None` (the word `none` or an empty value gives None). A field's
`metadata={"help": ...}` is its line in --help. A dataclass checks its own values in `__post_init__` by raising
ValueError; the message reaches the operator.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import os
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import (
    Any,
    ClassVar,
    Literal,
    NoReturn,
    Protocol,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import yaml

PREFIX = "MANYLORA_"
CONFIG_FLAG = "config"
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_TYPO_SIMILARITY = 0.85
"""Above this ratio (difflib) an unknown environment variable counts as a misspelling."""


class ConfigError(ValueError):
    """A setting that is unknown, missing or malformed; the message names the setting and where it came from."""


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


C = TypeVar("C", bound=_Dataclass)


def load(config: type[C], argv: Sequence[str] | None = None, env: Mapping[str, str] | None = None) -> C:
    """The settings of this process, for a `__main__`: exits with 2 and what is wrong, or with 0 after --help.

    Args:
        config: a frozen dataclass.
        argv: the arguments without the program's name; default: this process's.
        env: the environment; default: this process's.
    """
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
    """This process's environment, for code outside this module that passes it on."""
    return dict(os.environ)


def set_default(variable: str, value: str) -> None:
    """In this process's environment, for a library that has no other way to be set; what is set already stays."""
    os.environ.setdefault(variable, value)


def parse(config: type[C], argv: Sequence[str], env: Mapping[str, str]) -> C:
    """As `load`, without exits: raises ConfigError."""
    fields = {f.name: f for f in dataclasses.fields(config) if f.init}
    assert CONFIG_FLAG not in fields, "--config names the file"
    kinds = get_type_hints(config)
    flags = _read_flags(argv, fields, kinds)
    variables = _read_environment(env, fields)
    path = flags.pop(CONFIG_FLAG, None) or variables.pop(CONFIG_FLAG, None)
    found = _read_file(Path(cast(str, path.value)), fields) if path is not None else {}
    found |= variables
    found |= flags
    values = {name: _convert(raw.value, kinds[name], raw.source) for name, raw in found.items()}
    missing = [f.name for f in fields.values() if f.name not in values and not _has_default(f)]
    if missing:
        raise ConfigError(", ".join(f"{_flag(name)} ({PREFIX}{name.upper()})" for name in missing) + ": must be set")
    try:
        return config(**values)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error


def help_text(config: type[_Dataclass]) -> str:
    """One line a setting: flag, type, default, meaning."""
    kinds = get_type_hints(config)
    lines = [(config.__doc__ or config.__name__).strip().splitlines()[0], "", "settings:"]
    rows = [("--config FILE", "a YAML file of settings; flags and environment come before it")]
    for field in dataclasses.fields(config):
        flag = _flag(field.name)
        left = f"{flag}, --no-{flag[2:]}" if kinds[field.name] is bool else f"{flag} {_describe(kinds[field.name])}"
        text = str(field.metadata.get("help", "")).strip()
        if field.default is not dataclasses.MISSING:
            shown = _render(field.default)
            default = f"default {shown}" if shown else ""
        else:
            default = "required" if not _has_default(field) else ""
        rows.append((left, f"{text} [{default}]".strip() if default else text))
    width = max(len(left) for left, _ in rows)
    lines += [f"  {left:<{width}}  {right}".rstrip() for left, right in rows]
    lines += ["", f"Every setting is also read from {PREFIX}<NAME>, e.g. {PREFIX}{next(iter(kinds)).upper()}."]
    return "\n".join(lines)


def check_listen(listen: str) -> None:
    """For `__post_init__`: raises ConfigError where `listen` is no `host:port`."""
    host, separator, port = listen.rpartition(":")
    if not separator or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--listen: {listen!r} is not host:port")


@dataclass(frozen=True)
class _Raw:
    """A value as it was found, and how to name the place to the operator."""

    value: object
    source: str


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _read_flags(
    argv: Sequence[str], fields: Mapping[str, dataclasses.Field[Any]], kinds: Mapping[str, Any]
) -> dict[str, _Raw]:
    found: dict[str, _Raw] = {}
    switches = {_flag(name): name for name in [*fields, CONFIG_FLAG]}
    negations = {"--no-" + _flag(name)[2:]: name for name in fields if kinds[name] is bool}
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        name: str
        if flag in negations and flag not in switches:
            if equals:
                raise ConfigError(f"{flag}: takes no value")
            name, value = negations[flag], "false"
        elif flag not in switches:
            _refuse_flag(word, flag, [*switches, *negations])
        else:
            name = switches[flag]
            if not equals:
                if kinds.get(name) is bool:
                    value = "true"
                elif words:
                    value = words.pop(0)
                else:
                    raise ConfigError(f"{flag}: needs a value")
        if name in found:
            raise ConfigError(f"{flag}: given more than once")
        found[name] = _Raw(value, flag)
    return found


def _refuse_flag(word: str, flag: str, known: Sequence[str]) -> NoReturn:
    if not word.startswith("--"):
        raise ConfigError(f"{word!r}: unexpected argument")
    close = difflib.get_close_matches(flag, known, n=1)
    raise ConfigError(f"{flag}: unknown setting" + (f"; did you mean {close[0]}?" if close else "; see --help"))


def _read_environment(env: Mapping[str, str], fields: Mapping[str, dataclasses.Field[Any]]) -> dict[str, _Raw]:
    known = {f"{PREFIX}{name.upper()}": name for name in [*fields, CONFIG_FLAG]}
    found: dict[str, _Raw] = {}
    for variable in sorted(v for v in env if v.startswith(PREFIX)):
        if variable in known:
            found[known[variable]] = _Raw(env[variable], variable)
            continue
        close = difflib.get_close_matches(variable[len(PREFIX) :].lower(), fields, n=1, cutoff=_TYPO_SIMILARITY)
        if close:
            raise ConfigError(f"{variable}: unknown setting; did you mean {PREFIX}{close[0].upper()}?")
    return found


def _read_file(path: Path, fields: Mapping[str, dataclasses.Field[Any]]) -> dict[str, _Raw]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
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
    """`value` (text from a flag or the environment, or what YAML made of it) as an object of type `kind`."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _convert_optional(value, kind, source)
    if origin is tuple:
        return _convert_tuple(value, kind, source)
    if origin is Literal:
        return _choose(value, {str(option): option for option in get_args(kind)}, source)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _choose(value, {str(member.value): member for member in kind}, source)
    if kind is bool:
        return _convert_bool(value, source)
    if kind in (int, float):
        return _convert_number(value, kind, source)
    if kind in (str, Path):
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise ConfigError(f"{source}: {value!r} is not text")
        return Path(str(value)).expanduser() if kind is Path else str(value)
    raise TypeError(f"{source}: settings cannot have the type {kind!r}")


def _convert_optional(value: object, kind: Any, source: str) -> object:
    others = [option for option in get_args(kind) if option is not type(None)]
    if len(others) != 1 or len(others) == len(get_args(kind)):
        raise TypeError(f"{source}: settings cannot have the type {kind!r}")
    if value is None or (isinstance(value, str) and value.lower() in ("", "none")):
        return None
    return _convert(value, others[0], source)


def _convert_tuple(value: object, kind: Any, source: str) -> tuple[object, ...]:
    arguments = get_args(kind)
    if len(arguments) != 2 or arguments[1] is not Ellipsis:
        raise TypeError(f"{source}: settings cannot have the type {kind!r}")
    if isinstance(value, str):
        items: Sequence[object] = [item.strip() for item in value.split(",") if item.strip()]
    elif isinstance(value, list):
        items = value
    else:
        items = [value]
    return tuple(_convert(item, arguments[0], source) for item in items)


def _choose(value: object, options: Mapping[str, object], source: str) -> object:
    if str(value) not in options:
        raise ConfigError(f"{source}: {value!r} is not one of {', '.join(options)}")
    return options[str(value)]


def _convert_bool(value: object, source: str) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word not in _TRUE | _FALSE:
        raise ConfigError(f"{source}: {value!r} is not one of true, false")
    return word in _TRUE


def _convert_number(value: object, kind: type[int] | type[float], source: str) -> int | float:
    name = "a whole number" if kind is int else "a number"
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{source}: {value!r} is not {name}")
    if kind is int and isinstance(value, float):
        raise ConfigError(f"{source}: {value!r} is not {name}")
    try:
        number = kind(value)
    except ValueError:
        raise ConfigError(f"{source}: {value!r} is not {name}") from None
    if number != number or number in (float("inf"), float("-inf")):
        raise ConfigError(f"{source}: {value!r} is not a finite number")
    return number


def _describe(kind: Any) -> str:
    """The type as --help shows it."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _describe(next(option for option in get_args(kind) if option is not type(None)))
    if origin is tuple:
        return f"{_describe(get_args(kind)[0])},..."
    if origin is Literal:
        return "|".join(str(option) for option in get_args(kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "|".join(str(member.value) for member in kind)
    return {str: "TEXT", int: "INT", float: "NUMBER", Path: "PATH"}.get(kind, str(kind))


def _render(value: object) -> str:
    """The text that `_convert` turns back into `value`."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, tuple):
        return ",".join(_render(item) for item in value)
    return str(value)
