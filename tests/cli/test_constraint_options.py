"""What the text of an answer must be, by the options of `generate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from manylora_shared.constraints.constraint import Constraint

from tests.cli.conftest import Manylora
from tests.cli.fake_server import FakeRouter

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    openai: Any = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
    for name, text in (("broken", "{"), ("list", "[]"), ("empty", '{"type": "json_schema"}')):
        Path(f"{name}.json").write_text(text)
    Path("schema.json").write_text(json.dumps(SCHEMA))
    Path("openai.json").write_text(json.dumps(openai))
    Path("a.lark").write_text('start: "a"')


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--response-format", "json"], Constraint.json_object()),
        (["--response-format", "schema.json"], Constraint.json_schema(SCHEMA)),
        (["--response-format", "openai.json"], Constraint.json_schema(SCHEMA)),
        (["--regex", "[ab]+"], Constraint.regex("[ab]+")),
        (["--choice", "yes", "--choice", "no"], Constraint.of_choices(["yes", "no"])),
        (["--grammar", "a.lark"], Constraint.grammar('start: "a"')),
    ],
)
async def test_each_reaches_the_router(
    options: list[str], expected: Constraint, manylora: Manylora, router: FakeRouter
) -> None:
    out = await manylora("generate", "--tenant", "acme", *options, "one two")
    assert out.exit_code == 0, out.stderr
    assert Constraint.of_message(router.requests[0].constraint) == expected


async def test_without_one_nothing_is_asked(manylora: Manylora, router: FakeRouter) -> None:
    assert (await manylora("generate", "--tenant", "acme", "one two")).exit_code == 0
    assert not router.requests[0].HasField("constraint")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--regex", "a", "--choice", "b"], "--regex and --choice: an answer has one constraint"),
        (
            ["--response-format", "nowhere.json"],
            "there is no file nowhere.json; give one with",
        ),
        (["--response-format", "broken.json"], "broken.json is no JSON"),
        (["--response-format", "list.json"], "list.json must be a JSON object"),
        (["--response-format", "empty.json"], "empty.json has no json_schema.schema"),
        (["--grammar", "nowhere.lark"], "nowhere.lark: cannot be read"),
        (["--choice", ""], "--choice: has an empty text"),
        (["--regex", "a" * 9000], "--regex: has 9000 bytes; at most 8192 are read"),
    ],
)
async def test_what_is_wrong_is_told(options: list[str], words: str, manylora: Manylora) -> None:
    out = await manylora("generate", "--tenant", "acme", *options, "one two")
    assert (out.exit_code, out.stdout) == (2, "")
    assert words in " ".join(out.stderr.split())
