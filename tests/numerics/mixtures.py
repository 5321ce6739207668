"""A tiny mixture of experts, adapters of all that it has, and transformers + peft beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from manylora_worker.models.checkpoint import Quantization
from manylora_worker.models.loader import LoadedModel, load_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.numerics import driver as driving
from tests.numerics.adapters import ATTENTION, Reference, save_adapter
from tests.numerics.driver import Driver, Stream, make_runner, prompts
from tests.numerics.families import make_model
from tests.numerics.quantizing import ship, to_fp8_by_output, to_nf4

# of peft, for a pattern that it has made itself
OWN_PATTERNS = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
TOLERANCE = 1e-4
STACKS = ["experts.gate_up_proj", "experts.down_proj"]
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "all-linear": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},  # the router, too
    "stacks": {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj"], "target_parameters": STACKS, "use_rslora": True},
    "down": {"r": 17, "lora_alpha": 8, "target_modules": [], "target_parameters": ["experts.down_proj"]},
    "attention": {"r": 8, "lora_alpha": 8, "target_modules": ATTENTION},
}


@dataclass(frozen=True)
class Mixture:
    folder: Path
    loaded: LoadedModel
    adapters: Mapping[str, Path]
    references: Mapping[str | None, Reference]  # of one adapter each: peft has adapters of equal targets together


def make_mixture(
    parent: Path,
    family: str = "qwen3_moe",
    recipes: Mapping[str, Mapping[str, Any]] = RECIPES,
    *,
    shipped: str = "",
    quantization: Quantization = "none",
    rounds: Callable[[PreTrainedModel], None] | None = None,
) -> Mixture:
    """shipped: in which of quantizing.FORMATS. The references have the weights that codes stand for. rounds: them."""
    folder = parent / f"tiny-{family}"
    plain = parent / "plain" if shipped else folder
    model = make_model(family, plain)
    stands_for = ship(plain, folder, shipped) if shipped else {}
    model.name_or_path = f"someone/tiny-{family}"
    adapters = {
        name: save_adapter(model, folder.parent / name, seed, **recipe)
        for seed, (name, recipe) in enumerate(recipes.items())
    }

    def reference(adapters: Mapping[str, Path]) -> Reference:
        fresh = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
        assert fresh.load_state_dict(stands_for, strict=False).unexpected_keys == []
        if quantization == "fp8" and not shipped:
            to_fp8_by_output(fresh)
        if quantization == "nf4":
            to_nf4(fresh, plain)
        if rounds is not None:
            rounds(fresh)
        return Reference(fresh.eval(), adapters)

    references: dict[str | None, Reference] = {name: reference({name: path}) for name, path in adapters.items()}
    loaded = load_model(str(folder), quantization=quantization)
    return Mixture(folder, loaded, adapters, {**references, None: reference({})})


def streams_of(
    mixture: Mixture, driver: Driver, seed: int, loaded: LoadedModel | None = None, *, longest: int = 40
) -> list[tuple[Stream, str | None]]:
    """Of each adapter one or two; few where prompts are short."""
    own = loaded or mixture.loaded
    uids = {name: driving.put_adapter(driver.runner, own, path) for name, path in mixture.adapters.items()}
    names = [*uids, None, "stacks", None, "all-linear"] if longest > 9 else ["stacks", "all-linear", None]
    drawn = prompts(len(names), seed, longest=longest)
    return [(Stream(p, None if n is None else uids[n]), n) for p, n in zip(drawn, names, strict=True)]


def check_mixed_batch(mixture: Mixture, tolerance: float = TOLERANCE, *, num_blocks: int = 300) -> None:
    """Prompts in chunks, arrivals in mid-flight, rows of all adapters at the same experts."""
    driver = Driver(make_runner(mixture.loaded, num_blocks=num_blocks), seed=1)
    mixed = streams_of(mixture, driver, seed=1)
    logits = driver.logits([Stream(stream.prompt, stream.adapter_uid) for stream, _ in mixed])
    for row, (stream, name) in zip(logits, mixed, strict=True):
        expected = mixture.references[name].logits(stream.prompt, name)[-1]
        torch.testing.assert_close(row, expected, atol=tolerance, rtol=0)
        if name is not None:
            assert (expected - mixture.references[None].logits(stream.prompt, None)[-1]).abs().max() > 0.1
    streams = [stream for stream, _ in mixed]
    for arrived in range(1, len(streams) + 1):
        driver.step([s for s in streams[:arrived] if len(s.output) < 6], 5)
    driver.run(streams, 6, prefill_tokens=5)
    for stream, name in mixed:
        assert stream.output == mixture.references[name].greedy(stream.prompt, name, 6)
