"""The life of a service's process, with an App that does what each test says. Signals are real."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from manylora_shared.process import main as service_main
from manylora_shared.process.main import Parts, serve
from manylora_shared.process.settings import ServiceSettings


@dataclass
class FakeApp:
    starts: bool = True
    reason: str = ""
    """Why it cannot go on; empty: it can."""
    error: Exception | None = None
    terminated_at: str = ""
    """The event at which this process gets a SIGTERM."""
    is_told_to_leave: bool = False
    events: list[str] = field(default_factory=list)
    instance_id: str = "s0"
    address: str = "127.0.0.1:7"
    endpoints: dict[str, str] = field(default_factory=lambda: {"http": "127.0.0.1:8"})

    async def start(self) -> None:
        self._happens("start")
        if not self.starts:
            await asyncio.get_running_loop().create_future()

    async def told_to_leave(self) -> None:
        if self.is_told_to_leave:
            return
        await asyncio.get_running_loop().create_future()

    async def failed(self) -> str:
        self._happens("serving")
        if self.error is not None:
            raise self.error
        if not self.reason:
            await asyncio.get_running_loop().create_future()
        return self.reason

    async def stop(self) -> None:
        self._happens("stop")

    def _happens(self, event: str) -> None:
        self.events.append(event)
        if event == self.terminated_at:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(autouse=True)
def _no_freeze(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests made so far is not to live as long as their process."""
    monkeypatch.setattr(service_main, "freeze_started", lambda: None)


async def run(app: FakeApp, etcd: str = "127.0.0.1:1") -> bool:
    async def build(parts: Parts) -> FakeApp:
        return app

    with tempfile.TemporaryDirectory() as folder:
        async with asyncio.timeout(10):
            return await serve("router", settings(folder, etcd), build)


def settings(folder: str, etcd: str = "127.0.0.1:1") -> ServiceSettings:
    return ServiceSettings(etcd=etcd, peer_secret_file=f"{folder}/peer.secret")


async def test_it_is_ready_serves_and_ends_when_told(capsys: pytest.CaptureFixture[str]) -> None:
    app = FakeApp(terminated_at="serving")
    assert await run(app)
    assert app.events == ["start", "serving", "stop"]
    ready = {"ready": True, "service": "router", "id": "s0", "address": "127.0.0.1:7", "http": "127.0.0.1:8"}
    assert json.loads(capsys.readouterr().out) == ready


async def test_a_caller_ends_it_as_a_signal_does() -> None:
    app = FakeApp(is_told_to_leave=True)
    assert await run(app)
    assert app.events == ["start", "serving", "stop"]


async def test_it_tells_its_tasks(tmp_path: Path) -> None:
    parts: list[Parts] = []

    async def build(given: Parts) -> FakeApp:
        parts.append(given)
        return FakeApp(terminated_at="serving")

    config = ServiceSettings(
        etcd="127.0.0.1:1", peer_secret_file=f"{tmp_path}/peer.secret", metrics_listen="127.0.0.1:0"
    )
    async with asyncio.timeout(10):
        await serve("router", config, build)
    (told,) = re.findall(rb"^event_loop_tasks (\S+)$", parts[0].telemetry.exposition()[0], re.MULTILINE)
    assert float(told) >= 3


async def test_a_signal_ends_a_start_that_waits(capsys: pytest.CaptureFixture[str]) -> None:
    app = FakeApp(starts=False, terminated_at="start")
    assert await run(app)
    assert app.events == ["start", "stop"]
    assert capsys.readouterr().out == ""


async def test_a_service_that_cannot_go_on_is_stopped(caplog: pytest.LogCaptureFixture) -> None:
    app = FakeApp(reason="the engine broke")
    assert not await run(app)
    assert app.events == ["start", "serving", "stop"]
    assert "the router cannot go on: the engine broke" in caplog.text


async def test_a_bug_is_raised_after_the_end_in_order() -> None:
    app = FakeApp(error=RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        await run(app)
    assert app.events == ["start", "serving", "stop"]


async def test_an_app_that_cannot_be_built(tmp_path: Path) -> None:
    async def build(parts: Parts) -> FakeApp:
        raise ValueError("no tokenizer")

    with pytest.raises(ValueError, match="no tokenizer"):
        await serve("router", settings(str(tmp_path)), build)


@pytest.mark.parametrize("is_open", [True, False])
async def test_an_etcd_that_does_not_answer_is_named_in_seconds(
    is_open: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one whose port is open."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}" if is_open else "127.0.0.1:1"
        running = asyncio.create_task(run(FakeApp(starts=False), endpoint))
        async with asyncio.timeout(5):
            while True:
                if f"no etcd answers at {endpoint} (--etcd)" in caplog.text:
                    break
                await asyncio.sleep(0.05)
        assert not running.done(), "it goes on trying"
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running


async def test_without_the_file_of_the_services_secret_nothing_starts() -> None:
    async def build(parts: Parts) -> FakeApp:
        raise AssertionError("it is not built")

    with pytest.raises(ValueError, match="--peer-secret-file: must be set"):
        await serve("router", ServiceSettings(etcd="127.0.0.1:1"), build)
