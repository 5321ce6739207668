"""`manylora up` and `manylora demo`: the commands that start a cluster of their own, and its end by signals."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import tempfile
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import typer
from manylora_shared.ids import DEFAULT_POOL, name_problem
from manylora_shared.stores.model_files import ModelNotFound, model_folder, model_name

from manylora.cli.files import read_file
from manylora.cli.output import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    print_json,
    print_table,
    say,
    stderr_console,
    usage_error,
)
from manylora.cli.tenants import apply_documents, check_documents
from manylora.client import Client
from manylora.client.credentials import read_key
from manylora.demo import BASE_FOLDER, BASE_NAME, measure
from manylora.local.cluster import ClusterFailed, ClusterOptions, LocalCluster, PoolModel

DEMO_MODEL = "demo"
DEMO_WORKERS = 2
T = TypeVar("T")
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def model_source(model: str, option: str = "--model") -> str:
    """What the services are given for a model; where there is no model, the command was called wrongly."""
    if model == DEMO_MODEL:
        return str(BASE_FOLDER)
    try:
        folder = model_folder(model)
    except ModelNotFound as error:
        raise usage_error(f"{option}: {error}") from None
    if not (folder / "config.json").is_file():
        raise usage_error(f"{option}: {folder} is not the folder of a Hugging Face model: it has no config.json")
    # A hub id goes on as it is: its name, and not its snapshot's, is what adapters say that they were made for.
    return str(folder.absolute()) if Path(model).is_dir() else model


def name_of(model: str) -> str:
    return BASE_NAME if model == DEMO_MODEL else model_name(model_source(model))


def pools_of(entries: Sequence[str]) -> tuple[PoolModel, ...]:
    """Of NAME=MODEL each; what is none was called wrongly."""
    found: dict[str, PoolModel] = {}
    for entry in entries:
        name, equals, model = entry.partition("=")
        if not equals or not model:
            raise usage_error(f"--pool: {entry!r} is not NAME=MODEL")
        if problem := name_problem(name):
            raise usage_error(f"--pool: {name!r} {problem}")
        if name == DEFAULT_POOL or name in found:
            raise usage_error(f"--pool: there is a pool {name} already")
        found[name] = PoolModel(name, model_source(model), name_of(model))
    return tuple(found.values())


async def up(options: ClusterOptions, tenants_file: Path | None) -> None:
    policies = ""
    if tenants_file is not None:
        policies = read_file(tenants_file)
        check_documents(str(tenants_file), policies)  # a large model takes minutes to load
    cluster = LocalCluster(options, notify=say)

    async def serve() -> None:
        await _start(cluster)
        try:
            async with _client(cluster) as client:
                for worker in (await client.status()).workers:
                    say(f"{worker.worker_id} runs on {worker.device}")
                if tenants_file is not None:
                    for tenant in await apply_documents(client, str(tenants_file), policies):
                        say(f"tenant {tenant['tenant_id']}: version {tenant['version']}")
            print_json(cluster.describe())
            await asyncio.get_running_loop().create_future()
        finally:
            say("stopping")
            await cluster.stop()

    await _until_signal(serve(), cluster)


async def demo(*, as_json: bool) -> None:
    """A cluster in a temporary folder, the measured run, its table, and the verdict as exit code."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="manylora-demo-") as data:
        options = ClusterOptions(
            model=BASE_FOLDER, model_name=BASE_NAME, data=Path(data), workers=DEMO_WORKERS, start_timeout_s=120.0
        )
        cluster = LocalCluster(options, notify=say)

        async def run() -> measure.Report:
            await _start(cluster)
            try:
                return await _run_demo(cluster)
            finally:
                await cluster.stop()

        report = await _until_signal(run(), cluster)
    if report is None:
        raise typer.Exit(EXIT_INTERRUPTED)
    elapsed_s = round(time.monotonic() - started_s, 2)
    _show_report(report, as_json=as_json)
    say(f"{report.requests} requests, {report.concurrent_streams} at a time; {elapsed_s:.1f} s with start and end")
    if as_json:
        workers = DEMO_WORKERS
        print_json({**dataclasses.asdict(report), "model": BASE_NAME, "workers": workers, "elapsed_s": elapsed_s})
    if not report.ok:
        raise typer.Exit(EXIT_FAILED)


async def _run_demo(cluster: LocalCluster) -> measure.Report:
    from manylora.demo.view import showing

    async with _client(cluster) as client:
        versions = await measure.set_up(client)
        with showing(stderr_console(), measure.TENANTS) as view:
            return await measure.run(client, view, versions)


def _client(cluster: LocalCluster) -> Client:
    return Client(cluster.router, key=read_key(cluster.key_file), tls_ca=cluster.tls_ca)


def _show_report(report: measure.Report, *, as_json: bool) -> None:
    columns, rows = measure.table(report)
    print_table(columns, rows, empty="", to_stderr=as_json)
    for failure in report.failures:
        say(failure)
    if not report.ok:
        say(
            f"not ok: needed are exact match >= {measure.MIN_EXACT_MATCH:.0%}, by others' adapters "
            f"< {measure.MAX_CROSS_EXACT_MATCH:.0%}, and no failed request"
        )


async def _start(cluster: LocalCluster) -> None:
    try:
        with stderr_console().status("starting the cluster"):
            await cluster.start()
    except ClusterFailed as error:
        say(f"Error: {error}")
        raise typer.Exit(EXIT_FAILED) from None


async def _until_signal(work: Coroutine[Any, Any, T], cluster: LocalCluster) -> T | None:
    """None where a signal ended it. The first signal ends it in order, a second one by force."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    signalled = False

    def on_signal() -> None:
        nonlocal signalled
        if signalled:
            say("ending at once")
            cluster.kill()
        else:
            signalled = True
            task.cancel()

    for number in _ENDING_SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        return await task
    except asyncio.CancelledError:
        if not signalled:
            raise
        return None
    finally:
        for number in _ENDING_SIGNALS:
            loop.remove_signal_handler(number)
