"""The engine's logits and greedy tokens against transformers + peft, one request at a time, for every family."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.numerics.conftest import Family, FamilyOf
from tests.numerics.driver import (
    ALWAYS_STACK,
    NEVER_STACK,
    Driver,
    Stream,
    composed_streams,
    make_runner,
    mixed_streams,
    prompts,
)
from tests.numerics.families import EACH_FAMILY, MORE_FAMILIES, WINDOW

TOLERANCE = 1e-4


def assert_next_logits(family: Family, streams: list[tuple[Stream, str | None]], logits: torch.Tensor) -> None:
    for row, (stream, name) in zip(logits, streams, strict=True):
        expected = family.reference.logits(stream.tokens, name)[-1]
        torch.testing.assert_close(row, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("product_flops", [NEVER_STACK, ALWAYS_STACK], ids=["segmented", "stacked"])
@pytest.mark.parametrize("name", EACH_FAMILY)
def test_mixed_batch_logits(family_of: FamilyOf, name: str, product_flops: float) -> None:
    check_next_logits(family_of, name, product_flops)


@pytest.mark.wide
@pytest.mark.parametrize("name", MORE_FAMILIES)
def test_mixed_batch_logits_of_more(family_of: FamilyOf, name: str) -> None:
    check_next_logits(family_of, name, NEVER_STACK)


def check_next_logits(family_of: FamilyOf, name: str, product_flops: float, *, num_blocks: int = 200) -> None:
    family = family_of(name)
    driver = Driver(make_runner(family.loaded, num_blocks=num_blocks, product_flops=product_flops))
    mixed = mixed_streams(family, driver)
    mixed += composed_streams(family, mixed)
    streams = [stream for stream, _ in mixed]
    assert_next_logits(family, mixed, driver.logits(streams))
    for step in range(3):
        for stream in streams:
            stream.output.append(stream.prompt[step % len(stream.prompt)])
        assert_next_logits(family, mixed, driver.logits(streams))


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_greedy_tokens(family_of: FamilyOf, name: str) -> None:
    """Chunked prefill, arrivals in mid-flight: prefill chunks and decodes of many adapters share steps."""
    family = family_of(name)
    driver = Driver(make_runner(family.loaded, num_blocks=300), seed=1)
    mixed = mixed_streams(family, driver, seed=1)
    streams = [stream for stream, _ in mixed]
    for arrived in range(1, len(streams) + 1):
        driver.step([s for s in streams[:arrived] if len(s.output) < 8], 5)
    driver.run(streams, 8, prefill_tokens=5)
    for stream, adapter in mixed:
        assert stream.output == family.reference.greedy(stream.prompt, adapter, 8)


@pytest.mark.parametrize("name", EACH_FAMILY)
@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 16])
def test_chunked_prefill_equals_whole(family_of: FamilyOf, name: str, chunk_tokens: int) -> None:
    family = family_of(name)
    driver = Driver(make_runner(family.loaded))
    prompt = prompts(1, seed=5, shortest=33, longest=33)[0]
    whole = driver.logits([Stream(prompt)])
    chunked = Stream(prompt)
    while chunked.num_computed < len(prompt):
        logits = driver.logits([chunked], chunk_tokens)
    torch.testing.assert_close(logits, whole, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("name", "option"), [
    ("mistral", {"sliding_window": None}),
    ("qwen2", {"sliding_window": 200}),
    ("gemma2", {"sliding_window": 200}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"query_pre_attn_scalar": 16}),
    ("gemma3_text", {"sliding_window": 200}),
    ("phi3", {"sliding_window": None}),
    ("granite", {"residual_multiplier": 1.0}),
    ("granite", {"logits_scaling": 1.0}),
    ("granite", {"embedding_multiplier": 1.0}),
    ("smollm3", {"no_rope_layers": [1, 1, 1]}),
    ("exaone4", {"sliding_window": 200}),
    ("ministral3", {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default",
                                        "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.0}}),
])  # fmt: skip
def test_the_oracle_feels_windows_caps_and_scales(family_of: FamilyOf, name: str, option: dict[str, object]) -> None:
    """Without the option, transformers answers otherwise: so the tests above can fail."""
    family = family_of(name)
    prompt = prompts(1, seed=6, shortest=3 * WINDOW, longest=3 * WINDOW)[0]
    other = AutoModelForCausalLM.from_pretrained(family.folder, attn_implementation="eager", **option)
    with torch.no_grad():
        logits = other(torch.tensor([prompt])).logits[0, -1]
    assert (logits - family.reference.logits(prompt, None)[-1]).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_row_of_nan_stays_alone(family_of: FamilyOf, name: str) -> None:
    """A sequence whose cache is poisoned gets an error; the others' logits do not change by one bit."""
    family = family_of(name)
    runner = make_runner(family.loaded, num_blocks=200, product_flops=ALWAYS_STACK)
    driver = Driver(runner)
    streams = [stream for stream, _ in mixed_streams(family, driver)]
    driver.run(streams, 3)
    poisoned = streams[4]
    clean_logits = driver.logits(streams)
    for stream in streams:
        stream.num_computed -= 1
    poison = torch.tensor(poisoned.blocks[:1])
    runner._cache._by_block_id.index_fill_(0, poison, float("nan"))
    logits = driver.logits(streams)
    for stream, row, clean in zip(streams, logits, clean_logits, strict=True):
        if stream is poisoned:
            assert row.isnan().any()
        else:
            assert torch.equal(row, clean)
    for stream in streams:
        stream.num_computed -= 1
    results = runner.execute(_batch(driver, streams))
    assert [r.error is not None for r in results] == [s is poisoned for s in streams]


def _batch(driver: Driver, streams: list[Stream]):  # type: ignore[no-untyped-def]
    from manylora_worker.kinds.api import StepBatch

    return StepBatch([driver.chunk(s) for s in streams])
