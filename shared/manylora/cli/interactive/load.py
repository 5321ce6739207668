"""`manylora load`: a mix of tenants against a server that speaks OpenAI's API, and what their callers saw."""

from __future__ import annotations

import asyncio
import gzip
import signal
import ssl
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import typer
import yaml
from manylora_shared.address import join_address, parse_address
from manylora_shared.process.config import environment
from manylora_shared.transport import connections
from manylora_shared.transport.tls import SYSTEM_CA

from manylora.cli.files import name_of, read_file
from manylora.cli.output import (
    DEFAULT_HTTP,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    HTTP_PORT_STEP,
    print_json,
    print_table,
    say,
    usage_error,
)
from manylora.client.credentials import KEY_VARIABLE, find_ca, find_key, read_key
from manylora.load import report
from manylora.load.endpoint import Endpoint, EndpointFailed
from manylora.load.planning.arrivals import TraceRow
from manylora.load.planning.fields import UNREADABLE_YAML, BadMix
from manylora.load.planning.mix import Mix, mix_of
from manylora.load.planning.traces import rows_of
from manylora.load.run import Run
from manylora.load.view import shown

ONE_TENANT = "load"  # its name in the report, where flags give no other
_OF_MIX = {"duration": "duration_s", "requests": "requests", "warmup": "warmup_s", "seed": "seed"}
_OF_RUN = ("mix", "url", "timeout", "drain", "key", "as_json")
_GOES_WITH = {"arrivals": "rate", "cv": "rate", "speed": "trace", "length_scale": "trace"}
_FLAGS = {"file": "trace", "duration_s": "duration", "warmup_s": "warmup", "prompts": "prompt-ids"}


def planned(file: Path | None, given: Mapping[str, Any], changed: Collection[str]) -> Mix:
    """given: the command's options, by their names; with a file those of the whole run go before its fields.
    changed: the names of those that are not at their defaults.
    """
    whole = {field: given[name] for name, field in _OF_MIX.items() if given[name] is not None}
    if file is None:
        sources = [name for name in ("rate", "streams", "trace") if given[name] is not None]
        if len(sources) != 1:
            raise usage_error("give a mix file, or one of --rate, --streams and --trace")
        for name, source in _GOES_WITH.items():
            if name in changed and source not in sources:
                raise usage_error(f"{_flag(name)}: goes with --{source}")
        return _mix_of_flags({**_document(given), **whole})
    for name in changed:
        if name not in _OF_MIX and name not in _OF_RUN:
            raise usage_error(f"{_flag(name)}: is the mix file's to say")
    try:
        document = yaml.safe_load(read_file(file))
    except UNREADABLE_YAML as error:
        raise usage_error(f"{name_of(file)}: is no YAML: {error}") from None
    folder = Path() if str(file) == "-" else file.parent
    try:
        return mix_of({**document, **whole} if isinstance(document, dict) else document, lambda n: _trace(folder / n))
    except BadMix as error:
        raise usage_error(f"{name_of(file)}: {error}") from None


def _flag(name: str) -> str:
    return "--class" if name == "qos_class" else f"--{name.replace('_', '-')}"


def _document(given: Mapping[str, Any]) -> dict[str, Any]:
    """The mix of one tenant."""
    if given["trace"] is not None:
        come = {"kind": "trace", "file": str(given["trace"])}
        come |= {name: given[name] for name in ("speed", "length_scale")}
    elif given["streams"] is not None:
        come = {"kind": "closed", "streams": given["streams"]}
    else:
        come = {"kind": str(given["arrivals"]), "rate": given["rate"]}
        come |= {"cv": given["cv"]} if given["cv"] is not None else {}
    limits = {f"{name}_ms": given[f"slo_{name}"] for name in ("ttft", "tpot", "e2e")}
    sizes = {name: given[name] for name in ("prompt_tokens", "output_tokens")}
    tenant = {
        **{name: given[name] for name in ("model", "zipf", "prefix_tokens")},
        **{name: value for name, value in sizes.items() if value is not None},
        "arrivals": come,
        "adapters": given["adapter"] or [],
        "tenant_id": given["tenant"],
        "class": given["qos_class"],
        "slo": {name: value for name, value in limits.items() if value is not None},
    }
    return {
        "tenants": {given["tenant"] or ONE_TENANT: tenant},
        "api": "chat" if given["chat"] else "completions",
        "prompts": "ids" if given["prompt_ids"] else "text",
        "ignore_eos": not given["eos"],
    }


def _mix_of_flags(document: Mapping[str, Any]) -> Mix:
    try:
        return mix_of(document, lambda name: _trace(Path(name)))
    except BadMix as error:
        path, _, message = str(error).partition(":")
        field = path.rpartition(".")[2]
        raise usage_error(f"--{_FLAGS.get(field, field.replace('_', '-'))}:{message}") from None


def _trace(path: Path) -> tuple[TraceRow, ...]:
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return rows_of(data.decode().splitlines(), path.name)
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise BadMix(f"{path.name}: cannot be read: {error}") from None


async def load(
    mix: Mix, url: str, key: str | None, tls_ca: str | None, *, timeout_s: float, drain_s: float, as_json: bool
) -> None:
    """url: before the mix's. key: of tenants that name none. Raises typer.Exit where nothing was answered."""
    url = _base(url or mix.url or DEFAULT_HTTP)
    local = _local_router(url)
    keys = {tenant.name: _key(tenant.name, tenant.key) or key or _found_key(local) for tenant in mix.tenants}
    tls = _trusting(tls_ca or (find_ca(local) if local else "")) if url.startswith("https://") else None
    async with Endpoint(url, mix, keys, tls=tls, timeout_s=timeout_s) as endpoint:
        try:
            await endpoint.prepare()
        except EndpointFailed as error:
            say(f"Error: {error}")
            raise typer.Exit(EXIT_FAILED) from None
        run = Run(mix, endpoint, max_running=connections.room(), drain_s=drain_s)
        is_stopped = False

        def stop() -> None:
            nonlocal is_stopped
            is_stopped = True
            run.stop()

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, stop)
        try:
            async with shown(run):
                await run.run()
        finally:
            loop.remove_signal_handler(signal.SIGINT)
    _tell(report.document(run, url), as_json=as_json)
    if is_stopped:
        raise typer.Exit(EXIT_INTERRUPTED)
    if not any(tally.completed for tally in run.tallies.values()):
        raise typer.Exit(EXIT_FAILED)


def _tell(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        for columns, rows in report.tables(found):
            print_table(columns, rows, empty="")
    for remark in report.remarks(found):
        say(remark)


def _base(url: str) -> str:
    """Without a path's /v1, which is added."""
    if not url.startswith(("http://", "https://")):
        raise usage_error(f"--url: {url!r} must begin with http:// or https://")
    return url.rstrip("/").removesuffix("/v1")


def _local_router(url: str) -> str:
    """Where the router of a local cluster would be that has its HTTP API here; empty: nowhere."""
    try:
        host, port = parse_address(url.partition("://")[2])
    except ValueError:
        return ""
    return join_address(host, port - HTTP_PORT_STEP) if port > HTTP_PORT_STEP else ""


def _found_key(router: str) -> str:
    if not router:
        return environment().get(KEY_VARIABLE, "").strip()
    try:
        return find_key(router)
    except OSError as error:
        raise usage_error(f"the key of the cluster at {router} cannot be read: {error}") from None


def _key(tenant: str, reference: str) -> str:
    kind, _, place = reference.partition(":")
    try:
        key = read_key(Path(place)) if kind == "file" else environment().get(place, "").strip()
    except OSError as error:
        raise usage_error(f"tenants.{tenant}.key: {error}") from None
    if reference and not key:
        raise usage_error(f"tenants.{tenant}.key: there is none in {reference}")
    return key


def _trusting(ca: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca if ca and ca != SYSTEM_CA else None)
    except OSError as error:
        raise usage_error(f"--tls-ca: {ca}: {error}") from None
