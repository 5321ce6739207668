"""What an adapter's folder brings of a tokenizer, and whether it is the base model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from manylora_shared.errors import InvalidRequest
from manylora_shared.stores import adapter_tokenizer
from manylora_shared.stores.adapter_tokenizer import BroughtTokenizer, brought_by, differences

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"

NAMED = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": TEMPLATE}]


def lay(folder: Path, files: dict[str, Any]) -> BroughtTokenizer:
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return brought_by(folder, follows_links=False)


@pytest.mark.parametrize(
    ("files", "template", "tokens"),
    [
        ({"README.md": "x", "special_tokens_map.json": {"eos_token": "</s>"}}, "", {}),
        ({"chat_template.jinja": TEMPLATE, "tokenizer_config.json": {"chat_template": "other"}}, TEMPLATE, {}),
        ({"tokenizer_config.json": {"chat_template": TEMPLATE}}, TEMPLATE, {}),
        ({"tokenizer_config.json": {"chat_template": NAMED}}, TEMPLATE, {}),
        ({"tokenizer_config.json": {"chat_template": [{"name": {}}, {"name": []}, 5, *NAMED]}}, TEMPLATE, {}),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"7": {"content": "<a>"}}}}, "", {"<a>": 7}),
        ({"tokenizer.json": {"added_tokens": [{"id": 8, "content": "<b>"}]}}, "", {"<b>": 8}),
        ({"added_tokens.json": {"<c>": 9}}, "", {"<c>": 9}),
    ],
)  # fmt: skip
def test_a_folders_template_and_tokens(
    tmp_path: Path, files: dict[str, Any], template: str, tokens: dict[str, int]
) -> None:
    assert lay(tmp_path, files) == BroughtTokenizer(template, tokens)


@pytest.mark.parametrize(
    ("files", "field"),
    [
        ({"tokenizer_config.json": "{"}, "tokenizer_config.json"),
        ({"tokenizer.json": "[" * 100_000}, "tokenizer.json"),
        ({"added_tokens.json": "[]"}, "added_tokens.json"),
        ({"added_tokens.json": {"<a>": "x"}}, "added_tokens"),
        ({"tokenizer.json": {"added_tokens": [1]}}, "added_tokens"),
        ({"tokenizer_config.json": {"added_tokens_decoder": [1]}}, "added_tokens"),
        ({"tokenizer.json": {"added_tokens": [{"id": 8, "content": 8}]}}, "added_tokens"),
        ({"tokenizer.json": {"added_tokens": [{"id": 8, "content": {}}]}}, "added_tokens"),
        ({"added_tokens.json": '{"<a>": 1e999}'}, "added_tokens"),
        ({"added_tokens.json": {f"<{i}>": i for i in range(16_385)}}, "added_tokens"),
        ({"chat_template.jinja": "x" * (1 << 21)}, "chat_template.jinja"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, files: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        lay(tmp_path, files)
    assert [v.field for v in error.value.violations] == [field]


def test_only_what_differs_is_named() -> None:
    ids = {"<s>": 1, "</s>": 2}
    assert differences(BroughtTokenizer(TEMPLATE + "\n", {"<s>": 1}), TEMPLATE, ids) == []
    assert differences(BroughtTokenizer("", {}), TEMPLATE, ids) == []
    brought = BroughtTokenizer("x", {"<s>": 7, "<t>": 3, "</s>": 2, "<u>": 4, "<v>": 5, "<w>" * 99: 6})
    template, tokens = differences(brought, TEMPLATE, ids)
    assert template.field == "chat_template"
    assert tokens.field == "added_tokens"
    assert "'<s>', '<t>', '<u>' and 2 more" in tokens.description


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer.json": {"model": "x" * 100_000, "added_tokens": [{"id": 8, "content": "<b>"}]}}, {"<b>": 8}),
        ({"tokenizer_config.json": {"x": "x" * 100_000, "added_tokens_decoder": {"7": {"content": "ü"}}}}, {"ü": 7}),
    ],
)
def test_large_files_are_read_by_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, Any], expected: dict[str, int]
) -> None:
    def parsed_here(folder: Path) -> None:
        raise AssertionError("this one's requests would wait")

    monkeypatch.setattr(adapter_tokenizer, "_read", parsed_here)
    assert lay(tmp_path, files) == BroughtTokenizer("", expected)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"tokenizer.json": "[" * 100_000}, "tokenizer.json: is not JSON"),
        ({"tokenizer_config.json": {"chat_template": "x" * (2 << 20)}}, "has a template of more than"),
        ({"added_tokens.json": {"x" * (2 << 20): 1}}, "the tokens have more than"),
        ({"tokenizer_config.json": "[" + "[]," * (21 << 20) + "[]]"}, "MiB of memory"),
    ],
)
def test_large_files_that_cannot_be_read(tmp_path: Path, files: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        lay(tmp_path, files)
