"""Files that commands are given."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import typer
from manylora.cli.files import name_of, read_file


def test_a_dash_is_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("ä\r\n".encode())))
    assert read_file(Path("-")) == "ä\n", "lines end alike wherever they come from"
    assert (name_of(Path("-")), name_of(Path("a/b"))) == ("stdin", "a/b")


def test_a_file_is_read_as_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes("ä\nb".encode())
    assert read_file(path) == "ä\nb"


def test_what_cannot_be_read_is_wrong_usage_and_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"\xff")
    for path, reason in ((broken, "utf-8"), (tmp_path / "absent", "No such file"), (tmp_path, "directory")):
        with pytest.raises(typer.Exit) as error:
            read_file(path)
        assert error.value.exit_code == 2
        said = capsys.readouterr().err
        assert said.startswith(f"Error: {path}: cannot be read")
        assert reason in said
