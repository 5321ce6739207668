"""`chat`: what is sent each turn, what stays in the talk, and how a failed turn is told."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from manylora.cli.interactive.chat import Talk

from tests.cli import forked
from tests.cli.conftest import Manylora
from tests.cli.fake_server import FakeRouter


async def test_each_turn_brings_the_talk_so_far(manylora: Manylora, router: FakeRouter) -> None:
    router.has_chat_template = True
    out = await manylora(
        *("chat", "--tenant", "acme", "--adapter", "upper", "--system", "Be loud.", "--temperature", "0.5"),
        *("--user", "u-1"),
        stdin="hello you\n\nand now\n",
    )
    assert (out.exit_code, out.stdout, out.stderr) == (0, "HELLO YOU\nAND NOW\n", "")
    first = [("system", "Be loud."), ("user", "hello you")]
    assert router.chats == [first, [*first, ("assistant", "HELLO YOU"), ("user", "and now")]]
    assert [request.sampling.temperature for request in router.requests] == [0.5, 0.5]
    assert {(metadata["x-adapter-id"], metadata["x-user-id"]) for metadata in router.metadata} == {("upper", "u-1")}
    assert len({metadata["x-conversation-id"] for metadata in router.metadata}) == 1, "a rollout keeps its version"


async def test_commands_change_the_talk(manylora: Manylora, router: FakeRouter) -> None:
    router.has_chat_template = True
    lines = ["one", "/new", "two", "/system Be brief.", "/adapter other", "three", "/nonsense", "/exit", "four"]
    out = await manylora("chat", "--tenant", "acme", stdin="\n".join(lines))
    assert (out.exit_code, out.stdout) == (0, "ONE\nTWO\nTHREE\n")
    assert out.stderr.startswith("there is no /nonsense\n/new ")
    assert router.chats == [[("user", "one")], [("user", "two")], [("system", "Be brief."), ("user", "three")]]
    assert [metadata.get("x-adapter-id") for metadata in router.metadata] == [None, None, "other"]
    assert len({metadata["x-conversation-id"] for metadata in router.metadata}) == 3, "each begins anew"


async def test_a_turn_that_fails_is_taken_back(manylora: Manylora, router: FakeRouter) -> None:
    router.has_chat_template = True
    out = await manylora("chat", "--tenant", "acme", stdin="two wrongs\nwe die\nlast\n")
    assert out.exit_code == 1
    assert out.stdout == "WE DIE\nLAST\n"
    assert "sampling.temperature: must be at least 0" in out.stderr
    assert "worker w-1 was lost" in out.stderr
    assert router.chats[-1] == [("user", "last")]


async def test_a_model_without_a_template_ends_the_talk(manylora: Manylora, router: FakeRouter) -> None:
    router.has_chat_template = False
    out = await manylora("chat", "--tenant", "acme", stdin="hello\nagain\n")
    assert (out.exit_code, out.stdout) == (1, "")
    assert "no chat template" in out.stderr
    assert "manylora generate" in out.stderr
    assert router.requests == []


async def test_an_interrupt_stops_the_answer_and_not_the_talk(address: str, router: FakeRouter, tmp_path: Path) -> None:
    router.has_chat_template = True
    (tmp_path / "stdin").write_text("go hang\nlast\n")
    (tmp_path / "stdout").touch()
    process = forked.start(("chat", "--tenant", "acme"), {**os.environ, "MANYLORA_SERVER": address}, tmp_path)
    async with asyncio.timeout(60):
        while (tmp_path / "stdout").read_text() != "GO HANG":  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        await asyncio.to_thread(process.join)
    assert process.exitcode == 0
    process.close()
    assert (tmp_path / "stdout").read_text() == "GO HANGLAST\n"
    assert (tmp_path / "stderr").read_text() == "\n(stopped)\n"
    assert router.cancelled == 1
    assert router.chats[-1] == [("user", "go hang"), ("assistant", "GO HANG"), ("user", "last")]


def test_a_talk_without_its_system_message() -> None:
    talk = Talk("Be loud.", turns=[{"role": "user", "content": "hello"}])
    assert talk.command("/system")
    assert talk.messages() == []
    assert not talk.command("/exit")
