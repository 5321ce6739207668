"""The options that commands have alike."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Annotated, Any

import typer
from manylora.cli.commands.on_cluster import on_cluster
from manylora.cli.output import Target
from typer.testing import CliRunner


def test_a_command_gets_its_target_and_is_run() -> None:
    app = typer.Typer()
    seen: list[object] = []

    @app.command()
    @on_cluster
    def name(
        what: Annotated[str, typer.Argument()], often: int = 1, *, target: Target, as_json: bool
    ) -> Coroutine[Any, Any, None]:
        """It has a help."""

        async def work() -> None:
            seen.append((what, often, target.server, target.key, as_json))

        return work()

    runner = CliRunner(env={"MANYLORA_SERVER": "", "MANYLORA_KEY": ""})
    assert runner.invoke(app, ["x"]).exit_code == 0
    assert runner.invoke(app, ["y", "--often", "3", "--server", "h:1", "--key", "k", "--json"]).exit_code == 0
    assert seen == [("x", 1, "127.0.0.1:7070", None, False), ("y", 3, "h:1", "k", True)]
    told = runner.invoke(app, ["--help"]).output
    assert "It has a help" in told
    assert all(option in told for option in ("--json", "--server", "--key", "--often"))
    assert runner.invoke(app, []).exit_code == 2
