"""The engine in a process of its own, with the fake engine in it: as the thread's, and what a process adds."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from manylora_shared.errors import InvalidRequest, QuotaExceeded, ServiceUnavailable
from manylora_shared.ids import AdapterName, TenantId
from manylora_sim.fake_runner import reference_tokens
from manylora_worker.adapters.pins import Pin
from manylora_worker.hosting import commands as engine_commands
from manylora_worker.hosting import engines
from manylora_worker.hosting import process as process_runtime
from manylora_worker.hosting.messages import Checked, Unpacker, packed
from manylora_worker.hosting.output_stream import EndKind, OutputStream, StreamEnd
from manylora_worker.hosting.process import ProcessRuntime, start_engine
from manylora_worker.memory.tenant_shares import TenantShare
from manylora_worker.weights.adapter_check import AdapterReport

from tests.worker.worker_fakes import UID, config, eventually, request

Start = Callable[..., ProcessRuntime]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    runtimes: list[ProcessRuntime] = []

    def start(**changes: object) -> ProcessRuntime:
        runtime, _ = engines.build(config(engine_process="on", fake_step_ms=1.0, **changes))
        assert isinstance(runtime, ProcessRuntime)
        runtimes.append(runtime)
        runtime.start()
        return runtime

    yield start
    for runtime in runtimes:
        await runtime.stop()
        assert not _is_alive(runtime.pid)


async def drain(stream: OutputStream) -> tuple[list[int], StreamEnd]:
    tokens: list[int] = []
    while True:
        batch = await stream.read()
        for output in batch.outputs:
            tokens += output.token_ids
        if batch.end is not None:
            return tokens, batch.end


async def test_outputs_are_the_references_and_nothing_is_left(start: Start) -> None:
    runtime = start()
    prompts = [tuple(range(1, 9 + i)) for i in range(20)]
    streams = [runtime.submit(request(f"r{i}", prompt_token_ids=prompt)) for i, prompt in enumerate(prompts)]
    for prompt, (tokens, end) in zip(prompts, await asyncio.gather(*(drain(s) for s in streams)), strict=True):
        assert end.kind is EndKind.COMPLETED
        assert end.request_end is not None
        assert 0 <= runtime.now() - end.request_end.ended_s < 60, "its times are of this process's clock"
        assert tokens == reference_tokens(prompt, None, 3, 0, 8)
    await eventually(lambda: runtime.view.stats.requests == 0)
    assert not runtime.view.running
    assert runtime.view.stats.blocks_free == runtime.view.stats.blocks_total


async def test_an_abort_and_an_adapter_reach_it(start: Start) -> None:
    runtime = start()
    endless = runtime.submit(request("endless", max_tokens=5000))
    await endless.read()
    runtime.abort(endless.request.request_id)
    _, end = await drain(endless)
    assert end.kind is EndKind.ABORTED
    tokens, _ = await drain(runtime.submit(request("a", adapter_uid=UID)))
    assert tokens == reference_tokens(endless.request.prompt_token_ids, UID, 3, 0, 8)
    assert UID in runtime.view.adapters


async def test_requests_are_refused_by_the_bounds_in_force(start: Start) -> None:
    runtime = start(num_blocks=64)
    thread, _ = engines.build(config(num_blocks=64))
    too_much = [
        request("long", prompt_token_ids=(1,) * 40_000),
        request("no room", prompt_token_ids=(1,) * 64 * 16),
        request("many tokens", max_tokens=2000),
        request("many choices", n=9),
    ]
    for refused in too_much:  # what came through would end the engine
        with pytest.raises(InvalidRequest) as expected:
            thread.submit(refused)
        with pytest.raises(InvalidRequest, match=re.escape(str(expected.value))):
            runtime.submit(refused)
    tenant_id = request().tenant_id
    runtime.set_share(tenant_id, TenantShare(hard_blocks=2, hard_mb=4))
    with pytest.raises(QuotaExceeded, match="kv_hbm_mb_hard"):
        runtime.submit(request("capped", max_tokens=100))
    runtime.set_share(tenant_id, None)
    tokens, end = await drain(runtime.submit(request("free", max_tokens=100)))
    assert (len(tokens), end.kind) == (100, EndKind.COMPLETED)
    runtime.set_share(TenantId("other"), TenantShare(reserve_blocks=32, reserve_mb=64))
    with pytest.raises(QuotaExceeded, match="reserves leave"):
        runtime.submit(request("reserved", max_tokens=700))


async def test_more_than_the_socket_takes_at_once_arrives_and_holds_nothing_up(start: Start) -> None:
    runtime = start(num_blocks=1 << 16, max_batch_tokens=4096)
    prompts = [tuple(random.Random(i).choices(range(1, 259), k=20_000)) for i in range(60)]
    os.kill(runtime.pid, signal.SIGSTOP)  # it reads nothing meanwhile
    began = time.monotonic()
    streams = [runtime.submit(request(f"r{i}", prompt_token_ids=p, max_tokens=1)) for i, p in enumerate(prompts[:36])]
    assert time.monotonic() - began < 5
    assert runtime._unsent, "two megabytes are more than it takes"
    os.kill(runtime.pid, signal.SIGCONT)
    for prompt, (tokens, _) in zip(prompts, await asyncio.gather(*(drain(s) for s in streams)), strict=False):
        assert tokens == reference_tokens(prompt, None, 3, 0, 1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
async def test_a_process_that_dies_is_a_failed_engine(start: Start, number: signal.Signals) -> None:
    runtime = start()
    failures: list[str] = []
    runtime.view.when_failed(failures.append)
    stream = runtime.submit(request("r", max_tokens=5000))
    await stream.read()
    os.kill(runtime.pid, number)
    _, end = await drain(stream)
    assert end.kind is EndKind.ERROR
    assert failures == [f"its process (pid {runtime.pid}) was killed by signal {number:d}"]
    assert failures[0] in end.message
    with pytest.raises(ServiceUnavailable, match="was killed"):
        runtime.submit(request("late"))
    with pytest.raises(RuntimeError, match="no more"):
        await asyncio.to_thread(runtime.check_adapter, Path("x"))


async def test_an_engine_that_cannot_go_on_says_why(start: Start) -> None:
    runtime = start()
    runtime._send(int)  # type: ignore[arg-type]
    await eventually(lambda: runtime.view.failure is not None)
    assert runtime.view.failure is not None
    assert runtime.view.failure.startswith("TypeError: ")


async def test_what_runs_is_aborted_at_the_end(start: Start) -> None:
    runtime = start()
    stream = runtime.submit(request("r", max_tokens=5000))
    await stream.read()
    _, (_, end) = await asyncio.gather(runtime.stop(), drain(stream))
    assert end.kind is EndKind.ABORTED
    with pytest.raises(ServiceUnavailable, match="has stopped"):
        runtime.submit(request("late"))


async def test_a_process_that_hangs_is_killed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_runtime, "_END_S", 0.2)
    runtime = start()
    os.kill(runtime.pid, signal.SIGSTOP)
    await runtime.stop()
    assert not _is_alive(runtime.pid)


def test_it_ends_with_a_worker_that_is_killed() -> None:
    code = (
        "import os, signal; from manylora_worker import config; from manylora_worker.hosting import engines;"
        "runtime, _ = engines.build(config.WorkerConfig(engine='fake', engine_process='on'));"
        "print(runtime.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    worker = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=30, check=False)
    assert worker.returncode == -signal.SIGKILL
    until = time.monotonic() + 10
    while _is_alive(int(worker.stdout)):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_model_that_is_refused_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=str(tmp_path)):
        start_engine(config(engine="torch", model=str(tmp_path), engine_process="on"))


def test_messages_come_whole_however_they_are_cut() -> None:
    messages = [Checked(i, AdapterReport(max_lora_rank=i) if i % 2 else "x" * 1000 * i) for i in range(20)]
    data = b"".join(map(packed, messages))
    for seed in range(30):
        rng, unpacker, found, at = random.Random(seed), Unpacker(), [], 0
        while at < len(data):
            piece = data[at : at + rng.choice((1, 7, 100, 5000))]
            found += unpacker.take(piece)
            at += len(piece)
        assert found == messages


def test_every_command_can_be_sent() -> None:
    commands = [
        engine_commands.add(request()),
        engine_commands.abort(request().request_id),
        engine_commands.stop_choice(request().request_id, 1),
        engine_commands.prefetch(UID, None),
        engine_commands.set_pins({TenantId("acme"): [Pin(AdapterName("words"), UID)]}, 5),
        engine_commands.set_share(TenantId("acme"), TenantShare()),
        engine_commands.pause(request().request_id),
        engine_commands.resume(request().request_id),
    ]
    for command in commands:
        again = pickle.loads(pickle.dumps(command))
        assert (again.func, again.args) == (command.func, command.args)  # type: ignore[attr-defined]


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
