"""Adapters that rotate positions in their own way (LongLoRA): beside plain rows in one batch, each as transformers and
peft compute it with that rotation.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from manylora_shared.ids import AdapterUid
from manylora_shared.stores.adapter_files import CONFIG_NAME
from manylora_shared.stores.adapter_rope import with_rope
from manylora_worker.models import loader
from manylora_worker.models.loader import load_model
from manylora_worker.models.rope import scaled_frequencies
from manylora_worker.weights.source import AdapterInvalid, read_adapter
from transformers import AutoConfig, AutoModelForCausalLM

from tests.numerics.adapters import Reference, recipes, save_adapter
from tests.numerics.conftest import FamilyOf
from tests.numerics.driver import LIMITS, Driver, Stream, make_runner, prompts, put_adapter

TOLERANCE = 1e-4
LONGEST = 700
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0},
    "llama3": {
        "rope_type": "llama3", "factor": 3.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0,
        "original_max_position_embeddings": 128,
    },
    "theta": {"rope_type": "linear", "factor": 1.0, "rope_theta": 5000.0, "max_position_embeddings": 300},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64},
}  # fmt: skip
DYNAMIC_FULL = 128


def put_scaled(folder: Path, scaling: dict[str, Any]) -> Path:
    """A copy beside it, which peft would warn of."""
    scaled = folder.with_name(f"{folder.name}-scaled")
    shutil.copytree(folder, scaled, dirs_exist_ok=True)
    config = scaled / CONFIG_NAME
    config.write_bytes(with_rope(json.loads(config.read_bytes()), json.dumps(scaling)))
    return scaled


def references(family_folder: Path, adapters: dict[str, Path]) -> dict[str, Reference]:
    """By scaling: transformers with that rotation, and the adapter."""
    found = {}
    for name, scaling in SCALINGS.items():
        own = AutoConfig.from_pretrained(family_folder).rope_parameters
        kept = {key: own[key] for key in ("rope_theta", "partial_rotary_factor", "mrope_section") if key in own}
        parameters = {key: value for key, value in scaling.items() if key != "max_position_embeddings"}
        options: dict[str, Any] = {"rope_parameters": {**kept, **parameters}}
        if name == "dynamic":  # transformers takes the original length from here
            options["max_position_embeddings"] = scaling["original_max_position_embeddings"]
        model = AutoModelForCausalLM.from_pretrained(
            family_folder, dtype=torch.float32, attn_implementation="eager", **options
        )
        found[name] = Reference(model.eval(), {"own": adapters[name]})
    return found


@pytest.mark.parametrize(
    "name",
    ["llama", "qwen2", *(pytest.param(each, marks=pytest.mark.wide) for each in ("mistral", "qwen3", "qwen3_5_text"))],
)
def test_rotations_side_by_side(family_of: FamilyOf, tmp_path: Path, name: str) -> None:
    family = family_of(name)
    loaded = load_model(str(family.folder), max_model_len=LONGEST)
    model = AutoModelForCausalLM.from_pretrained(family.folder, dtype=torch.float32)
    recipe = recipes(name)["all-linear"]
    folders = {
        scaling: save_adapter(model, tmp_path / scaling, seed, **recipe) for seed, scaling in enumerate(SCALINGS)
    }
    oracles = references(family.folder, folders)
    runner = make_runner(loaded, num_blocks=1100)
    driver = Driver(runner)
    streams: list[tuple[Stream, Reference, str | None]] = []
    for scaling, folder in folders.items():
        uid = put_adapter(runner, loaded, put_scaled(folder, SCALINGS[scaling]))
        lengths = [DYNAMIC_FULL] if scaling == "dynamic" else [7, 190]  # the second is longer than the originals
        for seed, length in enumerate(lengths):
            prompt = prompts(1, seed=seed, shortest=length, longest=length)[0]
            streams.append((Stream(prompt, uid), oracles[scaling], "own"))
    plain = put_adapter(runner, loaded, family.adapters["all-linear"])
    for adapter, seed in ((None, 8), ("all-linear", 9), (None, 10)):
        prompt = prompts(1, seed=seed, shortest=60, longest=60)[0]
        streams.append((Stream(prompt, plain if adapter else None), family.reference, adapter))
    for _ in range(2):
        logits = driver.logits([stream for stream, _, _ in streams])
        for row, (stream, oracle, adapter) in zip(logits, streams, strict=True):
            torch.testing.assert_close(row, oracle.logits(stream.tokens, adapter)[-1], atol=TOLERANCE, rtol=0)
        streams = [each for each in streams if len(each[0].tokens) != DYNAMIC_FULL]
        for stream, _, _ in streams:
            stream.output.append(stream.prompt[3])


def test_the_oracle_feels_a_rotation(family_of: FamilyOf, tmp_path: Path) -> None:
    """Without it the answer is another one: so the test above can fail."""
    family = family_of("llama")
    model = AutoModelForCausalLM.from_pretrained(family.folder, dtype=torch.float32)
    folder = save_adapter(model, tmp_path / "a", 0, **recipes("llama")["all-linear"])
    prompt = prompts(1, seed=1, shortest=100, longest=100)[0]
    loaded = load_model(str(family.folder), max_model_len=LONGEST)
    runner = make_runner(loaded)
    plain = Driver(runner).logits([Stream(prompt, put_adapter(runner, loaded, folder))])
    scaled = put_adapter(runner, loaded, put_scaled(folder, SCALINGS["linear"]))
    assert (Driver(runner).logits([Stream(prompt, scaled)]) - plain).abs().max() > 100 * TOLERANCE


def test_contexts(family_of: FamilyOf, tmp_path: Path) -> None:
    """The original's length times the factor, up to the cluster's limit; the base model's own rotation is none."""
    family = family_of("llama")
    base = load_model(str(family.folder), max_model_len=LONGEST).adapter_base()
    model = AutoModelForCausalLM.from_pretrained(family.folder, dtype=torch.float32)
    folder = save_adapter(model, tmp_path / "a", 0, **recipes("llama")["rank-1"])

    def context(scaling: dict[str, Any]) -> int | None:
        rope = read_adapter(put_scaled(folder, scaling), base, LIMITS).extras.rope
        return None if rope is None else rope.max_context_tokens

    assert context({"rope_type": "linear", "factor": 8.0}) == 64 * 8
    assert context({"type": "linear", "factor": 100.0}) == LONGEST
    assert context({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 200}) == 400
    own = dict(AutoConfig.from_pretrained(family.folder).rope_parameters)
    assert context(own) is None
    assert context({**own, "max_position_embeddings": 256}) is None
    assert context({**own, "factor": 2.0}) == 128


@pytest.mark.parametrize(("scaling", "problem"), [
    ({"rope_type": "longrope", "factor": 2.0}, "rope_type 'longrope' is not served"),
    ({"rope_type": "linear"}, "factor: is missing for linear"),
    ({"rope_type": "linear", "factor": 0.5}, "factor: must be 1 to 1024"),
    ({"rope_type": "linear", "factor": 2.0, "beta_fast": 1}, "'beta_fast' is not known of linear"),
    ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor: is not the base"),
    ({"rope_type": "yarn", "factor": 2.0, "truncate": 3}, "truncate: must be true or false"),
    ([1], "must be an object"),
])  # fmt: skip
def test_rotations_that_are_refused(family_of: FamilyOf, tmp_path: Path, scaling: Any, problem: str) -> None:
    family = family_of("llama")
    model = AutoModelForCausalLM.from_pretrained(family.folder, dtype=torch.float32)
    folder = put_scaled(save_adapter(model, tmp_path / "a", 0, **recipes("llama")["rank-1"]), scaling)
    with pytest.raises(AdapterInvalid) as refused:
        read_adapter(folder, family.loaded.adapter_base(), LIMITS)
    (violation,) = refused.value.violations
    assert violation.field == "rope_scaling"
    assert problem in violation.description


@pytest.mark.parametrize(("name", "problem"), [
    ("gemma3_text", "differently by kind of layer"), ("granite", "as transformers wrote it"),
])  # fmt: skip
def test_models_that_rotate_in_their_own_way_alone(
    family_of: FamilyOf, tmp_path: Path, name: str, problem: str
) -> None:
    family = family_of(name)
    model = AutoModelForCausalLM.from_pretrained(family.folder, dtype=torch.float32)
    folder = put_scaled(save_adapter(model, tmp_path / "a", 0, **recipes(name)["rank-1"]), SCALINGS["linear"])
    with pytest.raises(AdapterInvalid, match=problem):
        read_adapter(folder, family.loaded.adapter_base(is_read=name != "granite"), LIMITS)


def test_frequencies_of_a_full_context(family_of: FamilyOf, tmp_path: Path) -> None:
    """dynamic: the same at every length."""
    family = family_of("llama")
    base = family.loaded.adapter_base()
    config = family.loaded.model.config
    scaling = base.rope.scaling_of({"rope_scaling": SCALINGS["dynamic"]})
    assert scaling is not None
    frequencies, factor = scaled_frequencies(config, scaling, torch.device("cpu"))
    theta, width = 10000.0 * (2.0 * 2.0 - 1.0) ** (16 / 14), 16
    expected = theta ** -(torch.arange(0, width, 2) / width)
    torch.testing.assert_close(frequencies, expected)
    assert factor == 1.0


@pytest.mark.kernels
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rotations_side_by_side_by_kernels(
    family_of: FamilyOf, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, in the GPU's decoder; a slot that had a rotation is taken over by an adapter without."""
    triton = pytest.importorskip("triton", reason="the kernels need Triton")
    if device == "cpu" and not triton.knobs.runtime.interpret:
        pytest.skip("runs where TRITON_INTERPRET=1")
    from test_cuda_runner import make_device_runner, put_device_adapter

    monkeypatch.setattr(loader, "can_pack", lambda *_: False)
    family = family_of("llama")
    model = AutoModelForCausalLM.from_pretrained(family.folder, dtype=torch.float32)
    names = ("theta",)
    recipe = recipes("llama")["all-linear"]
    folders = {name: save_adapter(model, tmp_path / name, seed, **recipe) for seed, name in enumerate(SCALINGS)}
    oracles = references(family.folder, folders)
    loaded, runner = make_device_runner(family, family.folder, device)
    driver = Driver(runner)  # type: ignore[arg-type]
    gone = put_device_adapter(runner, loaded, put_scaled(folders["llama3"], SCALINGS["llama3"]))
    runner.drop_adapter(AdapterUid(gone))
    streams: list[tuple[Stream, Reference, str | None]] = []
    for adapter in ("all-linear", None):
        prompt = prompts(1, seed=3, shortest=2, longest=2)[0]
        uid = put_device_adapter(runner, loaded, family.adapters[adapter]) if adapter else None
        streams.append((Stream(prompt, AdapterUid(uid) if uid else None), family.reference, adapter))
    for name in names:
        uid = put_device_adapter(runner, loaded, put_scaled(folders[name], SCALINGS[name]))
        prompt = prompts(1, seed=4, shortest=5, longest=5)[0]
        streams.append((Stream(prompt, AdapterUid(uid)), oracles[name], "own"))
    for _ in range(2):
        logits = driver.logits([stream for stream, _, _ in streams])
        for row, (stream, oracle, adapter) in zip(logits, streams, strict=True):
            torch.testing.assert_close(row.cpu(), oracle.logits(stream.tokens, adapter)[-1], atol=1e-3, rtol=0)
        for stream, _, _ in streams:
            stream.output.append(stream.prompt[0])


@pytest.mark.parametrize(
    "numbers",
    [
        {"rope_theta": 1.0},
        {"rope_theta": 1e-300},
        {"beta_fast": 1e308},
        {"beta_slow": 1e-320},
        {"attention_factor": 1e308},
        {"mscale": 1e308, "mscale_all_dim": 1e-320},
    ],
    ids=str,
)
def test_a_rotation_that_cannot_be_computed_is_refused_when_it_is_read(
    family_of: FamilyOf, tmp_path: Path, numbers: dict[str, float]
) -> None:
    """In a step its error would be that of everybody in the batch."""
    family = family_of("llama")
    copy = tmp_path / "adapter"
    shutil.copytree(next(iter(family.adapters.values())), copy)
    scaled = put_scaled(copy, {"rope_type": "yarn", "factor": 2.0, **numbers})
    base = load_model(str(family.folder), max_model_len=LONGEST).adapter_base()
    with pytest.raises(AdapterInvalid) as error:
        read_adapter(scaled, base, LIMITS)
    assert [each.field for each in error.value.violations] == ["rope_scaling"]
