"""What an adapter's folder brings beside its own files, as trainers save it: a tokenizer, against the base model's,
which alone counts, and a rotation of positions (adapter_rope.py).
"""

from __future__ import annotations

import json
import logging
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manylora_shared.errors import FieldViolation, InvalidRequest, ServiceUnavailable, shown
from manylora_shared.process.config import python_environment
from manylora_shared.stores.adapter_rope import rope_beside

_LOG = logging.getLogger(__name__)
TEMPLATE_NAME = "chat_template.jinja"
_MODEL_CONFIG = "config.json"
FILE_NAMES = (TEMPLATE_NAME, "tokenizer_config.json", "tokenizer.json", "added_tokens.json", _MODEL_CONFIG)
MAX_TEMPLATE_BYTES = 1 << 20
MAX_TOKENS = 16_384
MAX_TOKENS_CHARS = 1 << 20
MAX_FILE_BYTES = 64 << 20
MAX_IN_PLACE_BYTES = 1 << 16
_APART_S = 30.0
_APART_BYTES = 1 << 30
_APART = threading.BoundedSemaphore(2)  # processes at a time: they have the host's memory
_MAX_TOLD = 3
_MAX_TOLD_BYTES = 2000


@dataclass(frozen=True)
class BroughtTokenizer:
    chat_template: str = ""  # empty: none
    added_tokens: Mapping[str, int] = field(default_factory=dict)  # ids by content
    rope: str = ""  # JSON; empty: none


def brought_by(folder: Path, *, follows_links: bool) -> BroughtTokenizer:
    """Blocks. Raises InvalidRequest, naming the file, and ServiceUnavailable."""
    linked = [name for name in FILE_NAMES if (folder / name).is_symlink()]
    if linked and not follows_links:
        raise InvalidRequest.of(linked[0], "is a symbolic link; the store follows none")
    sizes_bytes = [path.stat().st_size for name in FILE_NAMES if (path := folder / name).is_file()]
    return _read_apart(folder) if max(sizes_bytes, default=0) > MAX_IN_PLACE_BYTES else _read(folder)


def _read_apart(folder: Path) -> BroughtTokenizer:
    """By another process: a parser of a large file holds the interpreter, and with it everybody's requests."""
    command = [sys.executable, "-m", __name__, str(folder)]
    try:
        with _APART:
            found = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_APART_S,
                check=False,
                env=python_environment(),
            )
    except subprocess.TimeoutExpired as e:
        raise InvalidRequest.of("tokenizer.json", f"takes more than {_APART_S:g} s to read") from e
    except OSError as e:
        raise ServiceUnavailable(f"no process reads the tokenizer: {e.strerror}", retry_after_s=1.0) from e
    if found.returncode:
        _LOG.error("a tokenizer was not read: %s", found.stderr[-_MAX_TOLD_BYTES:].decode(errors="replace"))
        problem = f"the process that reads the tokenizer ended with status {found.returncode}"
        raise ServiceUnavailable(problem, retry_after_s=1.0)
    answer = json.loads(found.stdout)
    if "problem" in answer:
        raise InvalidRequest.of(*answer["problem"])
    return BroughtTokenizer(**answer)


def _main(folder: Path) -> None:
    if sys.platform != "darwin":  # which has no such limit
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = _APART_BYTES if most == resource.RLIM_INFINITY else min(most, _APART_BYTES)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        answer: dict[str, Any] = vars(_read(folder))
    except InvalidRequest as e:
        answer = {"problem": [e.violations[0].field, e.violations[0].description]}
    except MemoryError:
        answer = {"problem": ["tokenizer.json", f"takes more than {_APART_BYTES >> 20} MiB of memory to read"]}
    json.dump(answer, sys.stdout)


def _read(folder: Path) -> BroughtTokenizer:
    config = _object_of(folder / "tokenizer_config.json")
    template = _template_of(folder / TEMPLATE_NAME, config.get("chat_template"))
    added: dict[str, int] = {}
    try:
        for content, token_id in _added_in(folder, config):
            if not isinstance(content, str):
                raise TypeError("a token is a text")
            added[content] = int(token_id)
    except (TypeError, ValueError, OverflowError, AttributeError, KeyError) as e:
        raise InvalidRequest.of("added_tokens", "the adapter's folder has a tokenizer that cannot be read") from e
    if len(added) > MAX_TOKENS:
        raise InvalidRequest.of(
            "added_tokens", f"the adapter's folder adds {len(added)} tokens, more than {MAX_TOKENS}"
        )
    if sum(map(len, added)) > MAX_TOKENS_CHARS:
        raise InvalidRequest.of("added_tokens", f"the tokens have more than {MAX_TOKENS_CHARS} characters")
    return BroughtTokenizer(template, added, rope_beside(_object_of(folder / _MODEL_CONFIG)))


def differences(brought: BroughtTokenizer, chat_template: str, ids: Mapping[str, int]) -> list[FieldViolation]:
    """Why the adapter cannot be served as it was trained.

    Args:
        chat_template: the base model's; empty: it has none.
        ids: the base model's, by the content of its tokens.
    """
    found: list[FieldViolation] = []
    if brought.chat_template.strip() not in ("", chat_template.strip()):
        problem = (
            "the adapter's folder brings a chat template of its own, and the base model's would be used: to add it "
            f"without, take {TEMPLATE_NAME}, or the template in tokenizer_config.json, out of the folder"
        )
        found.append(FieldViolation("chat_template", problem))
    other = sorted(content for content, token_id in brought.added_tokens.items() if ids.get(content) != token_id)
    if other:
        told = ", ".join(shown(content) for content in other[:_MAX_TOLD])
        more = f" and {len(other) - _MAX_TOLD} more" if len(other) > _MAX_TOLD else ""
        problem = (
            f"the adapter's folder adds {told}{more}, which the base model's tokenizer does not have at the same id: "
            "to add it without, take the tokenizer's files out of the folder"
        )
        found.append(FieldViolation("added_tokens", problem))
    return found


def _template_of(path: Path, in_config: Any) -> str:
    if path.is_file():
        return _text_of(path, MAX_TEMPLATE_BYTES)
    if isinstance(in_config, list):  # of named ones
        given = [each for each in in_config if isinstance(each, dict) and isinstance(each.get("name"), str)]
        named = {each["name"]: each.get("template") for each in given}
        in_config = named.get("default", next(iter(named.values()), ""))
    if not isinstance(in_config, str):
        return ""
    if len(in_config) > MAX_TEMPLATE_BYTES:
        raise InvalidRequest.of("tokenizer_config.json", f"has a template of more than {MAX_TEMPLATE_BYTES} characters")
    return in_config


def _added_in(folder: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for token in _object_of(folder / "tokenizer.json").get("added_tokens") or []:
        yield token["content"], token["id"]
    for token_id, token in (config.get("added_tokens_decoder") or {}).items():
        yield token["content"], token_id
    yield from _object_of(folder / "added_tokens.json").items()


def _object_of(path: Path) -> dict[str, Any]:
    """Empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(_text_of(path, MAX_FILE_BYTES))
    except (ValueError, RecursionError) as e:
        raise InvalidRequest.of(path.name, "is not JSON") from e
    if not isinstance(found, dict):
        raise InvalidRequest.of(path.name, "must be a JSON object")
    return found


def _text_of(path: Path, limit: int) -> str:
    try:
        if path.stat().st_size > limit:
            raise InvalidRequest.of(path.name, f"has more than {limit} bytes")
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as e:
        raise InvalidRequest.of(path.name, "cannot be read as text") from e


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
