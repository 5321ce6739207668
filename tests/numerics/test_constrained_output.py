"""Answers under generated schemas are what these say, and greedy ones transformers' own under the same mask."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from manylora_shared.constraints.constraint import Constraint, ConstraintKind
from manylora_shared.constraints.grammar import refusal
from manylora_shared.ids import QosClass, RequestId, TenantId
from manylora_worker.config import WorkerConfig
from manylora_worker.engine.core import EngineCore
from manylora_worker.hosting.engine import engine_limits
from manylora_worker.kinds.api import EngineRequest, FinishReason, Sampling
from manylora_worker.models.build import build_engine
from transformers import AutoTokenizer

from tests.numerics.masked import MaskedOracle

DEMO = Path(__file__).resolve().parents[2] / "shared/manylora/demo/assets/base"
REAL = Path(os.environ.get("MANYLORA_REAL_MODEL", ""))  # a folder with a model that has learnt a language
TENANT = TenantId("acme")


class Engine:
    def __init__(self, folder: Path, adapter_store: Path) -> None:
        config = WorkerConfig(model=str(folder), adapter_store=adapter_store, device="cpu", sequence_slots=16)
        self.parts = build_engine(config)
        self.core = EngineCore(self.parts.runner, self.parts.backend, engine_limits(config))
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._requests = 0

    def add(self, constraint: Constraint, prompt: str, max_tokens: int, sampling: Sampling, **more: Any) -> RequestId:
        assert self.parts.constraints is not None
        compiled = self.parts.constraints.compile(TENANT, constraint).result()
        self._requests += 1
        request_id = RequestId(f"r{self._requests}")
        prompt_ids = tuple(self.tokenizer(prompt)["input_ids"])
        stops = frozenset(compiled.end_token_ids)
        self.core.add(
            EngineRequest(
                request_id, TENANT, QosClass.STANDARD, None, prompt_ids, max_tokens, sampling, stops,
                constraint=compiled, **more,
            ),
            0.0,
        )  # fmt: skip
        return request_id

    def run(self) -> dict[tuple[str, int], tuple[list[int], FinishReason]]:
        tokens: dict[tuple[str, int], list[int]] = {}
        ends: dict[tuple[str, int], FinishReason] = {}
        while self.core.has_work():
            for output in self.core.step(0.0):
                key = (output.request_id, output.choice)
                tokens.setdefault(key, []).extend(output.token_ids)
                if output.finish_reason is not None:
                    assert output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), output.message
                    ends[key] = output.finish_reason
        self.core.check_invariants()
        return {key: (tokens[key], end) for key, end in ends.items()}

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(DEMO, tmp_path_factory.mktemp("store"))


def generated(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of a random kind: nested, references, enums, patterns, bounds, unions."""
    leaf = depth >= 3
    match rng.randrange(7 if leaf else 11):
        case 0:
            low = rng.randrange(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(100)}
        case 1:
            return {"enum": rng.sample(["red", "gr\u00fcn", 'q"uote', 7, None, True, 2.5, ""], rng.randrange(1, 5))}
        case 2:
            return {"type": "string", "maxLength": rng.randrange(6), "minLength": 0}
        case 3:
            return {"type": "string", "pattern": rng.choice(["^[a-f]{2,4}$", "^[0-9]{3}-[xyz]$", "^(yes|no)$"])}
        case 4:
            return {"const": rng.choice(["only", 0, False, {"a": [1]}])}
        case 5:
            return {"type": rng.choice(["boolean", "null"])}
        case 6:
            return {"type": "string", "format": rng.choice(["date", "time", "ipv4"])}
        case 7:
            return {"type": "array", "items": generated(rng, depth + 1), "minItems": 1, "maxItems": rng.randrange(1, 4)}
        case 8:
            return {"anyOf": [generated(rng, depth + 1) for _ in range(rng.randrange(1, 4))]}
        case 9:
            first = [generated(rng, depth + 1) for _ in range(2)]
            return {"type": "array", "prefixItems": first, "items": False, "minItems": 2}
        case _:
            names = rng.sample(["a", "name", "list of", "\u00e4", "n"], rng.randrange(1, 4))
            members = {name: generated(rng, depth + 1) for name in names}
            required = [name for name in names if rng.random() < 0.8]
            return {"type": "object", "properties": members, "required": required, "additionalProperties": False}


def with_references(rng: random.Random) -> dict[str, Any]:
    schema = generated(rng)
    if rng.random() < 0.3:
        members = {"x": {"$ref": "#/$defs/p"}}
        outer = {"type": "object", "properties": members, "required": ["x"], "additionalProperties": False}
        return {**outer, "$defs": {"p": schema}}
    return schema


def check(engine: Engine, schemas: Sequence[Mapping[str, Any]], prompt: str, max_tokens: int) -> tuple[int, int]:
    """Of answers at temperature 1: how many ended by themselves, and were cut. Every one that ended validates."""
    ended = cut = 0
    for first in range(0, len(schemas), 32):
        asked: dict[str, Mapping[str, Any]] = {}
        for seed, schema in enumerate(schemas[first : first + 32]):
            constraint = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
            assert refusal(constraint) is None, schema
            penalty = (1.0, 1.2)[seed % 3 == 0]
            sampling = Sampling(seed=seed, temperature=1.0, top_k=(0, 5)[seed % 2], repetition_penalty=penalty)
            asked[engine.add(constraint, prompt, max_tokens, sampling)] = schema
        for (request_id, _), (tokens, end) in engine.run().items():
            if end is FinishReason.LENGTH:
                cut += 1
                continue
            ended += 1
            document = json.loads(engine.text(tokens))
            jsonschema.validate(document, asked[request_id], jsonschema.Draft202012Validator)
    return ended, cut


@pytest.mark.long
def test_answers_are_what_their_schemas_say(engine: Engine) -> None:
    rng = random.Random(5)
    ended, cut = check(engine, [with_references(rng) for _ in range(150)], "A document:", 120)
    assert ended > 5 * cut


@pytest.mark.slow
@pytest.mark.skipif(not REAL.name, reason="MANYLORA_REAL_MODEL names no folder")
def test_answers_of_a_real_model_are_what_500_schemas_say(tmp_path: Path) -> None:
    rng = random.Random(11)
    engine = Engine(REAL, tmp_path)
    ended, cut = check(engine, [with_references(rng) for _ in range(500)], "Write an example in JSON:\n", 160)
    assert ended > 5 * cut


@pytest.mark.long
def test_greedy_answers_are_transformers_own_under_the_mask(engine: Engine) -> None:
    oracle = MaskedOracle(DEMO)
    rng = random.Random(3)
    constraints = [Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(with_references(rng))) for _ in range(10)]
    constraints.append(Constraint(ConstraintKind.REGEX, "[a-z]{3,9}( [a-z]+){2}"))
    constraints.append(Constraint(ConstraintKind.GRAMMAR, 'start: "x" ("," /[0-9]/)+'))
    wanted = {}
    for constraint in constraints:
        wanted[engine.add(constraint, "Hello", 40, Sampling(seed=0, temperature=0.0))] = constraint
    for (request_id, _), (tokens, end) in engine.run().items():
        expected = oracle.greedy("Hello", wanted[RequestId(request_id)], 40)
        assert (tokens, end is FinishReason.STOP) == expected


@pytest.mark.long
def test_choices_and_what_else_bars_tokens(engine: Engine) -> None:
    """Each choice has its own matcher; a constraint goes before min_tokens and words that are barred."""
    constraint = Constraint.of_choices(iter(["yes", "no", "maybe so"]))
    sampling = Sampling(seed=1, temperature=1.0, min_tokens=30, presence_penalty=1.5, min_p=0.01)
    barred = tuple((token,) for token in engine.tokenizer("n", add_special_tokens=False)["input_ids"])
    engine.add(constraint, "So?", 40, sampling, n=8, bad_sequences=barred)
    answers = {engine.text(tokens) for tokens, end in engine.run().values() if end is FinishReason.STOP}
    assert answers
    assert answers <= {"yes", "no", "maybe so"}


@pytest.mark.long
def test_another_worker_goes_on_where_one_stopped(engine: Engine) -> None:
    constraint = Constraint(ConstraintKind.REGEX, "[0-9]{4}-[a-f]{12}")
    sampling = Sampling(seed=4, temperature=1.0)
    engine.add(constraint, "Id:", 40, sampling)
    [(whole, _)] = engine.run().values()
    engine.add(constraint, "Id:", 40, sampling, emitted=(tuple(whole[:6]),))
    [(rest, end)] = engine.run().values()
    assert (whole[:6] + rest, end) == (whole, FinishReason.STOP)
