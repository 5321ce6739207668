"""Constrained answers through a running cluster whose pool is too small for them: they wait, are swapped and computed
again, and are the same as alone; greedy ones are transformers' own under the same mask, or without one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from manylora.client import Client, Constraint, RequestFailed, Result, Sampling
from manylora.demo import BASE_FOLDER, BASE_NAME
from manylora.local.cluster import ClusterOptions, LocalCluster

from tests.numerics.masked import MaskedOracle

pytestmark = pytest.mark.e2e

TENANT = "acme"
MOST = 48
GREEDY = Sampling(temperature=0)
FLAGS = (
    "--num-blocks=28",
    "--block-size=4",
    "--host-kv-mb=0.1",
    "--sequence-slots=6",
    "--max-batch-tokens=24",
    "--prefill-chunk-tokens=7",
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "colours": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 3},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "colours", "count"],
    "additionalProperties": False,
}
BY_SCHEMA = Constraint.json_schema(SCHEMA)
LETTERS = Constraint.regex("[a-z]{20,30}")


@dataclass(frozen=True)
class Asked:
    prompt: str
    constraint: Constraint
    sampling: Sampling = GREEDY
    n: int = 1
    stop: Sequence[str] = ()

    async def of(self, client: Client) -> Result:
        return await client.complete(
            self.prompt, constraint=self.constraint, sampling=self.sampling, n=self.n, stop=self.stop,
            max_tokens=MOST, timeout_s=120,
        )  # fmt: skip


def asked() -> list[Asked]:
    prompts = ["A document of some words:", "A document of some words, too:", "do:abc="]
    drawn = [Sampling(temperature=1, seed=seed, top_k=20) for seed in range(3)]
    return [
        *(Asked(prompt, BY_SCHEMA) for prompt in prompts),
        *(Asked(prompts[0], BY_SCHEMA, sampling, n=3) for sampling in drawn),
        *(Asked(prompt, LETTERS) for prompt in prompts),
        *(Asked(prompts[1], LETTERS, sampling, stop=["a", "e"]) for sampling in drawn),
        Asked(prompts[2], Constraint.grammar('start: "x" ("," /[0-9]/)+')),
    ]


def told(result: Result) -> list[tuple[str, list[int], str]]:
    return [(choice.text, list(choice.token_ids), choice.finish_reason) for choice in result.choices]


async def test_constrained_answers_are_the_same_in_any_company(tmp_path: Path) -> None:
    options = ClusterOptions(model=BASE_FOLDER, model_name=BASE_NAME, data=tmp_path, workers=1, worker_flags=FLAGS)
    async with LocalCluster(options) as cluster, Client(cluster.router, tenant=TENANT) as client:
        await client.tenants.apply(f"tenant_id: {TENANT}")
        alone = [await each.of(client) for each in asked()]
        together = await asyncio.gather(*(each.of(client) for each in asked() * 2))
        free = await client.complete("do:abc=", max_tokens=MOST, sampling=GREEDY, timeout_s=120)
        chosen = await Asked("do:abc=", Constraint.of_choices([free.text, "another"])).of(client)
        with pytest.raises(RequestFailed, match="uniqueItems"):
            await Asked("x", Constraint.json_schema({"type": "array", "uniqueItems": True})).of(client)
        [setbacks] = (await client.status()).scheduler.setbacks
    assert setbacks.swaps_out + setbacks.evictions > 0
    assert any(result.usage.cached_prompt_tokens for result in together)
    assert [told(result) for result in together] == [told(result) for result in alone] * 2
    assert list(chosen.token_ids) == list(free.token_ids)

    oracle = MaskedOracle(BASE_FOLDER)
    for each, result in zip(asked(), alone, strict=True):
        for choice in result.choices:
            if each.constraint is BY_SCHEMA and choice.finish_reason == "stop":
                jsonschema.validate(json.loads(choice.text), SCHEMA)
            assert not any(stop in choice.text for stop in each.stop)
        if each.sampling is GREEDY:
            expected = oracle.greedy(each.prompt, each.constraint, MOST)
            assert (list(result.token_ids), result.finish_reason == "stop") == expected
