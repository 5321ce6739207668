"""Rotations of positions that adapters bring: what is read of them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from manylora_shared.errors import InvalidRequest
from manylora_shared.ids import TenantId
from manylora_shared.stores.adapter_files import CONFIG_NAME, WEIGHTS_NAME, LocalAdapterFiles, parse_config
from manylora_shared.stores.adapter_rope import BaseRope, parsed, rope_beside, rope_text
from manylora_shared.stores.adapter_tokenizer import brought_by

from tests.sealing_keys import MemoryKeys

LINEAR = {"rope_type": "linear", "factor": 8.0}
BASE = BaseRope({"rope_type": "default", "rope_theta": 10000.0}, 4096, 16384)


@pytest.mark.parametrize(("config", "context"), [
    ({}, None),
    ({"rope_scaling": None}, None),
    ({"rope_scaling": {"rope_type": "default", "rope_theta": 10000.0}}, None),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, 8192),
    ({"rope_parameters": LINEAR}, 16384),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}}, 2048),
    ({"rope_scaling": {**LINEAR, "factor": 2.0, "max_position_embeddings": 4096}}, 8192),
    ({"rope_scaling": {**LINEAR, "factor": 1.0, "rope_theta": 1e6, "max_position_embeddings": 9000}}, 9000),
])  # fmt: skip
def test_an_adapters_context(config: dict[str, Any], context: int | None) -> None:
    scaling = BASE.scaling_of(config)
    assert (None if scaling is None else scaling.max_context_tokens) == context


def test_equal_rotations_have_equal_texts() -> None:
    one = BASE.scaling_of({"rope_scaling": {"factor": 8, "type": "linear"}})
    other = BASE.scaling_of({"rope_scaling": {**LINEAR, "max_position_embeddings": 20000}})
    assert one is not None
    assert other is not None
    assert one.text == other.text == '{"factor":8.0,"rope_type":"linear"}'


def test_a_model_that_allows_none_still_knows_its_own() -> None:
    base = BaseRope({"rope_type": "yarn", "factor": 2.0}, 1024, 2048, problem="it does not")
    assert base.scaling_of({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}) is None
    with pytest.raises(ValueError, match="it does not"):
        base.scaling_of({"rope_scaling": LINEAR})


@pytest.mark.parametrize("value", [
    {"rope_type": 3}, {"rope_type": "linear", "factor": True}, {"rope_type": "linear", "factor": 1e400},
    {"rope_type": "llama3", "factor": 2.0}, {**LINEAR, "max_position_embeddings": 1.5}, {**LINEAR, "rope_theta": 0},
    {**LINEAR, "rope_theta": 10**400}, {**LINEAR, "max_position_embeddings": 10**400}, "x",
])  # fmt: skip
def test_rotations_that_are_none(value: Any) -> None:
    with pytest.raises(ValueError, match=r"must|missing"):
        parsed(value)


def test_an_option_names_what_is_wrong_with_it() -> None:
    assert json.loads(rope_text('{"type": "linear", "factor": 2}')) == {"rope_type": "linear", "factor": 2.0}
    for text in ("{", "[]", '{"rope_type": "linear"}', "9" * 5000, "[" * 100_000):
        with pytest.raises(InvalidRequest) as refused:
            rope_text(text)
        assert refused.value.violations[0].field == "rope"


@pytest.mark.parametrize(("config", "found"), [
    ({}, None),
    ({"rope_scaling": None, "rope_theta": 1e4}, None),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, None),
    ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}, None),
    ({"rope_scaling": LINEAR, "max_position_embeddings": 32768}, {**LINEAR, "max_position_embeddings": 32768}),
    ({"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, {"type": "longrope", "long_factor": [1.0]}),
])  # fmt: skip
def test_a_config_beside_an_adapter(tmp_path: Path, config: dict[str, Any], found: dict[str, Any] | None) -> None:
    text = rope_beside(config)
    assert (json.loads(text) if text else None) == found
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert brought_by(tmp_path, follows_links=False).rope == text


async def test_it_becomes_part_of_the_configuration(tmp_path: Path) -> None:
    files = LocalAdapterFiles(tmp_path)
    incoming = await files.begin()
    with pytest.raises(InvalidRequest):
        await files.put_rope(incoming, json.dumps(LINEAR))
    await files.append(incoming, CONFIG_NAME, b'{"r": 8, "rope_scaling": {"rope_type": "yarn"}}')
    await files.append(incoming, WEIGHTS_NAME, b"w")
    before = await files.finish(incoming)
    (tmp_path / incoming / CONFIG_NAME).chmod(0o644)
    await files.put_rope(incoming, json.dumps(LINEAR))
    assert parse_config((tmp_path / incoming / CONFIG_NAME).read_bytes()) == {"r": 8, "rope_scaling": LINEAR}
    assert await files.finish(incoming) != before


async def test_it_becomes_part_of_a_sealed_configuration(tmp_path: Path) -> None:
    files = LocalAdapterFiles(tmp_path, keys=MemoryKeys())
    incoming = await files.begin(TenantId("acme"))
    await files.append(incoming, CONFIG_NAME, b'{"r": 8}')
    await files.append(incoming, WEIGHTS_NAME, b"w")
    await files.put_rope(incoming, json.dumps(LINEAR))
    digest = await files.finish(incoming)
    plain = LocalAdapterFiles(tmp_path / "plain")
    other = await plain.begin()
    await plain.append(other, CONFIG_NAME, json.dumps({"r": 8, "rope_scaling": LINEAR}).encode())
    await plain.append(other, WEIGHTS_NAME, b"w")
    assert digest == await plain.finish(other)
    assert b"linear" not in (tmp_path / incoming / CONFIG_NAME).read_bytes()
