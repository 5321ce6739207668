"""What every command that asks a router has alike: --json, --server and --key, and how it ends."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

from manylora.cli.output import DEFAULT_SERVER, Json, Key, Server, connect, run

_OPTIONS = {"as_json": (Json, False), "server": (Server, DEFAULT_SERVER), "key": (Key, None)}


def on_cluster(command: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The command, with these options in place of its keywords `target` and `as_json`."""

    @functools.wraps(command)
    def asked(*, as_json: bool, server: str, key: str | None, **given: Any) -> None:
        run(command(**given, target=connect(server, key), as_json=as_json), as_json=as_json)

    own = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for each in inspect.signature(command, eval_str=True).parameters.values()
        if each.name not in ("target", "as_json")
    ]
    common = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in _OPTIONS.items()
    ]
    asked.__signature__ = inspect.Signature([*own, *common])  # type: ignore[attr-defined]
    asked.__annotations__ = {each.name: each.annotation for each in [*own, *common]}
    return asked
