"""Where a command's words go, and its exit code."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import typer
from manylora.cli.output import print_json, print_table, report, run
from manylora.client import RequestFailed
from manylora_shared.errors import FieldViolation

FIRST, SECOND = FieldViolation("a", "is wrong"), FieldViolation("b", "too")


@dataclass
class Plain:
    a: int


def test_one_violation_is_the_message_and_several_stand_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    report(RequestFailed("C", "a: is wrong", violations=[FIRST]), as_json=False)
    assert capsys.readouterr().err == "C: a: is wrong\n"
    report(RequestFailed("C", "a: is wrong; b: too", violations=[FIRST, SECOND]), as_json=False)
    assert capsys.readouterr().err == "C: 2 errors\n  a: is wrong\n  b: too\n"
    report(RequestFailed("C", "file: 2 errors", violations=[FIRST, SECOND]), as_json=False)
    assert capsys.readouterr().err == "C: file: 2 errors\n  a: is wrong\n  b: too\n"


def test_json_goes_to_stdout_beside_what_was_reached(capsys: pytest.CaptureFixture[str]) -> None:
    report(RequestFailed("C", "m", retry_after_s=1.5), as_json=True, others={"applied": [Plain(1)]})
    out = capsys.readouterr()
    assert out.err == "C: m\ntry again in 1.5 s\n"
    told = json.loads(out.out)
    assert (told["error"]["message"], told["error"]["retry_after_s"]) == ("m", 1.5)
    assert told["applied"] == [{"a": 1}]


def test_what_has_no_json_form_is_a_bug() -> None:
    with pytest.raises(TypeError, match="object"):
        print_json({"x": object()})


def test_a_table_without_rows_is_said_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("a",), [], empty="there is nothing")
    assert capsys.readouterr() == ("", "there is nothing\n")
    print_table(("name", "n"), [("[red]x[/red]" + "y" * 300, 3)], empty="")
    out = capsys.readouterr().out
    assert "[red]x[/red]" + "y" * 300 in out, "as it is, and never folded"


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    async def fails(error: BaseException | None) -> None:
        if error is not None:
            raise error

    run(fails(None), as_json=False)
    for raised, code in ((RequestFailed("C", "m"), 1), (KeyboardInterrupt(), 130)):
        with pytest.raises(typer.Exit) as error:
            run(fails(raised), as_json=False)
        assert error.value.exit_code == code
