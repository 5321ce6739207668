"""The device decoder against transformers + PEFT in fp32: every family that it knows, mixed batches, every kernel.

On a machine with CUDA (marked gpu) it runs the kernels and graphs of production; elsewhere Triton's interpreter runs
the same kernels, slowly, for a few cases.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from manylora_shared.ids import AdapterUid, QosClass, RequestId, TenantId
from manylora_sim.fake_runner import FakeAdapterBackend
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.kinds.api import EngineRequest, Sampling, StepBatch
from manylora_worker.models import loader
from manylora_worker.models.layers.attention import ATTENTION, register_attention
from manylora_worker.models.layers.kv_cache import KvCache
from manylora_worker.models.quantized.fp8 import quantize
from manylora_worker.planning.step_planner import PlannerLimits
from manylora_worker.weights.layout import HostAdapter, elements_of, lay_out
from manylora_worker.weights.source import read_adapter
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma4TextConfig,
    LlamaConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
)

from tests.numerics.adapters import FP8_SLACK
from tests.numerics.conftest import KV_IN_FP8, Family, FamilyOf
from tests.numerics.driver import LIMITS, Driver, Stream, composed_streams, make_runner, mixed_streams
from tests.numerics.families import FAMILIES, VOCAB_SIZE
from tests.properties.odd import Odd, allows

pytest.importorskip("triton", reason="the kernels need Triton")

from manylora_worker.models.checkpoint import Quantization
from manylora_worker.models.cuda.forward import products
from manylora_worker.models.cuda.forward.pass_sizes import buffer_bytes
from manylora_worker.models.cuda.runner import DeviceLimits, DeviceModelRunner
from manylora_worker.models.cuda.steps.step_tables import StepTables
from manylora_worker.models.decoder.read import read_decoder

from tests.numerics.interpreter import DEVICES, needs_interpreter
from tests.numerics.reference_tiles import ReferenceTiles

pytestmark = pytest.mark.kernels

WITHOUT_KERNELS = ("olmo2", "olmo3")
ON_DEVICE = [
    *(name for name in FAMILIES if name not in WITHOUT_KERNELS), "qwen3_5_text", "granite4_h", "gemma4_text",
    "gemma4_wide",
]  # fmt: skip
TOLERANCE = 1e-3
FP8_FAMILIES = [
    name + KV_IN_FP8 for name in ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gemma4_text")
]
BLOCK_SIZES = {"gemma4_text": 8}  # else 16. No 16 ranks of its widest layers fit in such a block
ROPE = {
    "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}  # fmt: skip


def make_device_runner(
    family: Family, folder: Path, device: str, *, marks_free: bool = False, quantization: Quantization = "none"
) -> tuple[loader.LoadedModel, DeviceModelRunner]:
    loaded = loader.load_model(str(folder), device=device, quantization=quantization)
    weights = read_decoder(loaded)
    assert weights is not None
    # the scales of the oracle's cache, which another device's sums may be a power of two beside
    kv = replace(loaded.spec.kv, scales=family.loaded.spec.kv.scales)
    loaded = replace(loaded, spec=replace(loaded.spec, kv=kv))
    block_size = BLOCK_SIZES.get(loaded.spec.model_type, 16)
    block_size *= 4 if kv.scales else 1  # of as many bytes: an adapter's chunk has to fit
    cache = KvCache(
        kv, num_blocks=900, block_size=block_size, dtype=loaded.dtype, device=loaded.device, marks_free=marks_free
    )
    limits = DeviceLimits(max_rows=1024, max_sequences=32, adapter_slots=16, max_rank=64)
    return loaded, DeviceModelRunner(loaded, weights, cache, limits, num_kv_blocks=400)


def put_device_adapter(runner: DeviceModelRunner, loaded: loader.LoadedModel, folder: Path) -> str:
    adapter = read_adapter(folder, loaded.adapter_base(), LIMITS)
    if not runner.holds_adapter(adapter.uid):
        runner.reserve_adapter(adapter)
        runner.fill_adapter(adapter)
    return adapter.uid


def check_family(
    family_of: FamilyOf, name: str, device: str, monkeypatch: pytest.MonkeyPatch, *, marks_free: bool = False
) -> None:
    monkeypatch.setattr(loader, "can_pack", lambda *_: False)
    monkeypatch.setattr("tests.numerics.driver.put_adapter", put_device_adapter)
    on_cpu = family_of(name)
    loaded, runner = make_device_runner(on_cpu, on_cpu.folder, device, marks_free=marks_free)
    family = Family(name, on_cpu.folder, on_cpu.adapters, loaded, on_cpu.reference)
    driver = Driver(runner)  # type: ignore[arg-type]
    mixed = mixed_streams(family, driver)
    mixed += composed_streams(on_cpu, mixed)
    streams = [stream for stream, _ in mixed]
    tolerance = FP8_SLACK / 2 if loaded.spec.kv.scales else TOLERANCE
    for round_number in range(2):
        for row, (stream, adapter) in zip(driver.logits(streams), mixed, strict=True):
            expected = on_cpu.reference.logits(stream.tokens, adapter)[-1]
            torch.testing.assert_close(row.cpu(), expected, atol=tolerance, rtol=0)
        for stream in streams:
            stream.output.append(stream.prompt[round_number])
    if device == "cuda":
        driver.run(streams, 8, prefill_tokens=5)
        for stream, adapter in mixed:
            assert on_cpu.reference.allows(stream.prompt + stream.output[:2], adapter, stream.output[2:])


@pytest.mark.parametrize("name", ["llama", "phi3", "qwen3_5_text", "gemma4_text"])
def test_what_is_kept_for_steps_is_what_they_take(
    family_of: FamilyOf, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "can_pack", lambda *_: False)
    loaded, runner = make_device_runner(family_of(name), family_of(name).folder, "cpu")
    built = runner._decoder
    owners = [built, built._products, built._mlp]
    owners += [each for each in (built._delta_pass, built._inputs) if each is not None]
    held = [value for owner in owners for value in vars(owner).values()]
    if built._inputs is not None:
        held.append(built._inputs._projected)  # a step looks up as many as it projects
    ours = (built._ropes, built._products._sites, built._products._arena)
    taken = sum(v.nbytes for v in held if isinstance(v, torch.Tensor) and not any(v is each for each in ours))
    weights = read_decoder(loaded)
    assert weights is not None
    chunks = runner._adapters.chunks
    assert buffer_bytes(weights, loaded.dtype, lora_chunks=chunks, max_rows=1024, max_decode_rows=32) == taken


@pytest.mark.parametrize("device", DEVICES)
def test_an_adapter_is_read_back_and_merged(family_of: FamilyOf, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into fused projections, slot by slot, of what lies in the arena's blocks; and out again bit for bit."""
    monkeypatch.setattr(loader, "can_pack", lambda *_: False)
    family = family_of("llama")
    loaded, runner = make_device_runner(family, family.folder, device)
    driver, prompts = Driver(runner), [[5, 9, 7], [11, 4]]  # type: ignore[arg-type]

    def logits() -> torch.Tensor:
        return driver.logits([Stream(prompt) for prompt in prompts]).cpu()

    before = logits()
    name = "patterns"
    uid = put_device_adapter(runner, loaded, family.adapters[name])
    adapter = read_adapter(family.adapters[name], loaded.adapter_base(), LIMITS).on(loaded.device)
    pairs = list(zip(runner._adapters.read(uid).weights(), adapter.weights(), strict=True))
    assert pairs
    assert all(torch.equal(*pair) for pair in pairs)
    while not runner.merge_some(uid):
        pass
    for row, prompt in zip(logits(), prompts, strict=True):
        expected = family.reference.logits(prompt, name)[-1]
        torch.testing.assert_close(row, expected, atol=TOLERANCE, rtol=0)
    while not runner.restore_some():
        pass
    assert torch.equal(logits(), before)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*ON_DEVICE, *FP8_FAMILIES])
def test_on_the_device(family_of: FamilyOf, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_family(family_of, name, "cuda", monkeypatch)


@needs_interpreter
@pytest.mark.parametrize(
    ("name", "marks_free"),
    [
        ("llama", False),
        ("gemma3_text", True),
        pytest.param("ministral3", True, marks=pytest.mark.slow),
        ("llama" + KV_IN_FP8, True),
        pytest.param("qwen3_5_text", True, marks=pytest.mark.slow),
        pytest.param("gemma4_text", True, marks=pytest.mark.slow),
        pytest.param("gemma4_wide", False, marks=pytest.mark.slow),
        pytest.param("phi3", True, marks=pytest.mark.slow),
        pytest.param("exaone4", False, marks=pytest.mark.slow),
    ],
)
def test_in_the_interpreter(family_of: FamilyOf, name: str, monkeypatch: pytest.MonkeyPatch, marks_free: bool) -> None:
    """marks_free: no kernel leans on zeroes in what it does not own: the unwritten end of a block, or an adapter's."""
    check_family(family_of, name, "cpu", monkeypatch, marks_free=marks_free)


@needs_interpreter
@pytest.mark.parametrize("name", ["gemma4_text", "gemma4_wide", "gemma4_text" + KV_IN_FP8])
def test_layers_that_differ_in_the_interpreter(family_of: FamilyOf, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few short prompts beyond the window, and a decoded token each; what test_in_the_interpreter is too slow for."""
    monkeypatch.setattr(loader, "can_pack", lambda *_: False)
    family = family_of(name)
    loaded, runner = make_device_runner(family, family.folder, "cpu", marks_free=True)
    driver = Driver(runner)  # type: ignore[arg-type]
    mixed = [
        (Stream(list(range(3, 3 + length)), put_device_adapter(runner, loaded, family.adapters[each])), each)
        for length, each in ((12, "all-linear"), (5, "rslora"))
    ]
    tolerance = FP8_SLACK / 2 if loaded.spec.kv.scales else TOLERANCE
    for _ in range(2):
        for row, (stream, adapter) in zip(driver.logits([stream for stream, _ in mixed]), mixed, strict=True):
            expected = family.reference.logits(stream.tokens, adapter)[-1]
            torch.testing.assert_close(row, expected, atol=tolerance, rtol=0)
            stream.output.append(7)


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=needs_interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_prompts_are_scored_beside_what_is_drawn(
    family_of: FamilyOf, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than the head's buffer has, a chunk of one token, and rows that ask for nothing."""
    monkeypatch.setattr(loader, "can_pack", lambda *_: False)
    family = family_of("llama")
    _, runner = make_device_runner(family, family.folder, device)
    driver = Driver(runner)  # type: ignore[arg-type]
    asked = Sampling(seed=0, temperature=0.0, prompt_logprobs=2)
    long, short, plain = ([(7 * i + k) % 90 + 3 for i in range(n)] for k, n in ((0, 45), (1, 9), (2, 12)))
    streams = [Stream(long, sampling=asked), Stream(short, sampling=asked), Stream(plain)]
    told: dict[int, list[tuple[float, int]]] = {id(stream): [] for stream in streams}
    drawn: dict[int, int] = {}
    for sizes in ((40, 8, 12), (5, 1)):
        chunks = [driver.chunk(stream, size) for stream, size in zip(streams, sizes, strict=False)]
        for i, chunk in enumerate(chunks[:2]):
            start, end = chunk.start_position, min(streams[i].num_computed, len(streams[i].prompt) - 1)
            chunks[i] = replace(chunk, scored=range(start, max(start, end)))
        for answer in runner.execute(StepBatch(chunks)):
            assert answer.error is None
            told[answer.sequence_id] += [(each.logprob, each.top[0][0]) for each in answer.scored]
            drawn[answer.sequence_id] = answer.token_id
    for stream in streams[:2]:
        expected = torch.log_softmax(family.reference.logits(stream.prompt, None), -1)
        rows = zip(expected, stream.prompt[1:], strict=False)
        wanted = [(float(row[token_id]), int(row.argmax())) for row, token_id in rows]
        assert [each[0] for each in told[id(stream)]] == pytest.approx([each[0] for each in wanted], abs=TOLERANCE)
        assert [each[1] for each in told[id(stream)]] == [each[1] for each in wanted]
    for stream in streams:
        assert drawn[id(stream)] == family.reference.greedy(stream.prompt, None, 1)[0]
    assert told[id(streams[2])] == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma4_text"])
def test_with_free_blocks_marked_on_the_device(family_of: FamilyOf, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_family(family_of, name, "cuda", monkeypatch, marks_free=True)


@pytest.mark.gpu
def test_what_is_read_when_free_is_seen_on_the_device(family_of: FamilyOf, monkeypatch: pytest.MonkeyPatch) -> None:
    check_freed_are_seen(family_of, "cuda", monkeypatch)


@needs_interpreter
def test_what_is_read_when_free_is_seen_in_the_interpreter(
    family_of: FamilyOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_freed_are_seen(family_of, "cpu", monkeypatch)


def check_freed_are_seen(family_of: FamilyOf, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences that read a block after it was freed, or an adapter after it was dropped, get an error; others none."""
    monkeypatch.setattr(loader, "can_pack", lambda *_: False)
    family = family_of("llama")
    loaded, runner = make_device_runner(family, family.folder, device, marks_free=True)
    arena = runner._adapters
    uids = [put_device_adapter(runner, loaded, family.adapters[name]) for name in ("all-linear", "rslora")]
    driver = Driver(runner)  # type: ignore[arg-type]
    prompt = list(range(5, 40))
    fine, freed, dropped = (Stream(list(prompt), uid) for uid in (uids[0], None, uids[1]))
    streams = [fine, freed, dropped]
    driver.run(streams, 2)
    place = arena._places[uids[1]]
    runner.drop_adapter(uids[1])
    arena._places[uids[1]] = place
    batch = StepBatch([driver.chunk(stream) for stream in streams], clear_blocks=freed.blocks[:1])
    found = {sampled.sequence_id: sampled.error for sampled in runner.execute(batch)}
    assert found[id(fine)] is None
    assert "not finite" in (found[id(freed)] or "")
    assert "not finite" in (found[id(dropped)] or "")


@needs_interpreter
@pytest.mark.parametrize(
    ("model", "has_graphs"),
    [("llama", False), ("llama", True), pytest.param("gemma4_text", True, marks=pytest.mark.slow)],
)
def test_the_core_runs_ahead_in_the_interpreter(
    family_of: FamilyOf, monkeypatch: pytest.MonkeyPatch, model: str, has_graphs: bool
) -> None:
    """Pending tokens, a prompt in chunks beside a decode, a stop found late, penalties counted on the device; kernel by
    kernel, and in the shapes of the graphs with their padding; beside a row whose masks come behind the layers."""
    monkeypatch.setattr(loader, "can_pack", lambda *_: False)
    family = family_of(model)
    _, runner = make_device_runner(family, family.folder, "cpu")
    if has_graphs:
        monkeypatch.setattr(runner, "_capture", True)
        monkeypatch.setattr(runner, "_graph_of", rehearse)
    limits = EngineLimits(PlannerLimits(8, 4, 4), AdapterCacheLimits(1, 1), max_requests=8)
    core = EngineCore(runner, FakeAdapterBackend(lambda: 0.0), limits)
    prompts = {"long": [5, 9, 4, 8, 6, 7, 3], "short": [11, 4], "stops": [9, 3, 7]}
    want = {name: family.reference.greedy(prompt, None, 5) for name, prompt in prompts.items()}
    stop = want["stops"][2]
    want["stops"] = want["stops"][: want["stops"].index(stop)]
    penalized = Sampling(seed=1, temperature=0.9, repetition_penalty=1.4, frequency_penalty=0.6)
    samplings = {name: Sampling(seed=0, temperature=0.0) for name in prompts} | {"penalties": penalized}
    prompts["penalties"] = [4, 4, 9]
    bad = {name: tuple(tuple(want["long"][at : at + size]) for at, size in words) for name, words in BAD.items()}
    for name in BAD:
        samplings[name], prompts[name] = samplings["long"], prompts["long"]
        want[name] = _without(family, prompts[name], bad[name], 5)
    samplings["masked"], prompts["masked"] = samplings["long"], [6, 3, 5]
    want["masked"] = _without(family, prompts["masked"], (), 5, allows)
    samplings["least"], prompts["least"] = replace(samplings["stops"], min_tokens=4), prompts["stops"]
    want["least"] = _without(family, prompts["least"], ((stop,),), 4)
    for name, prompt in prompts.items():
        core.add(
            EngineRequest(
                RequestId(name), TenantId("t"), QosClass.BATCH, None, tuple(prompt), 5, samplings[name],
                stop_token_ids=frozenset([stop]) if name in ("stops", "least") else frozenset(),
                bad_sequences=bad.get(name, ()),
                constraint=Odd(40, vocab_size=VOCAB_SIZE) if name == "masked" else None,
            ),
            0.0,
        )  # fmt: skip
    got: dict[str, list[int]] = {}
    ahead = 0
    while core.has_work():
        for output in core.step(0.0):
            got.setdefault(output.request_id, []).extend(output.token_ids)
        ahead += core.num_in_flight
        core.check_invariants()
    assert core.step_error is None
    assert ahead > 4
    assert bool(runner._recordings) == bool(runner._mixed_graphs) == has_graphs
    assert bool(runner._draw_graphs) == has_graphs
    assert got.pop("penalties") == _drawn_on_the_cpu(family, prompts["penalties"], penalized, 5)
    assert got.pop("least")[:4] == want.pop("least")
    assert got == want


BAD = {"two": [(1, 2)], "three": [(0, 3), (3, 1)]}
"""By request: (start, length) of its bad words in what it would say without them."""


def _without(
    family: Family,
    prompt: list[int],
    bad: Sequence[tuple[int, ...]],
    count: int,
    allows: Callable[[Sequence[int], int], bool] = lambda output, token_id: True,
) -> list[int]:
    """The likeliest tokens of which none completes a bad word, by the reference's pass over all of them."""
    output: list[int] = []
    while len(output) < count:
        logits = family.reference.logits([*prompt, *output], None)[-1]
        for word in bad:
            if (*output, word[-1])[-len(word) :] == word:
                logits[word[-1]] = float("-inf")
        logits[[not allows(output, token_id) for token_id in range(len(logits))]] = float("-inf")
        output.append(int(logits.argmax()))
    return output


class Rehearsal:
    """A graph's replay, without graphs."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.replay = run


def rehearse(tables: StepTables, run: Callable[[], object], padding_row: int = 64) -> tuple[Rehearsal, object]:
    """As DeviceModelRunner._graph_of: the result's tensors are those that each replay writes."""
    with tables.blanked({"table_rows": padding_row}):
        return Rehearsal(run), run()


def _drawn_on_the_cpu(family: Family, prompt: list[int], sampling: Sampling, count: int) -> list[int]:
    driver = Driver(make_runner(family.loaded))
    stream = Stream(prompt, sampling=sampling)
    driver.run([stream], count)
    return stream.output


REAL_SHAPES: dict[str, Callable[[], PretrainedConfig]] = {
    "8B": lambda: LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=1024, tie_word_embeddings=False,
    ),
    "E2B": lambda: Gemma4TextConfig(
        vocab_size=32000, vocab_size_per_layer_input=32000, hidden_size=1536, intermediate_size=6144,
        num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=1, num_kv_shared_layers=2,
        use_double_wide_mlp=True, sliding_window=48, max_position_embeddings=1024, final_logit_softcapping=30.0,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "31B": lambda: Gemma4TextConfig(
        vocab_size=32000, hidden_size=5376, intermediate_size=21504, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=16, num_global_key_value_heads=4, attention_k_eq_v=True, hidden_size_per_layer_input=0,
        sliding_window=48, max_position_embeddings=1024, layer_types=["sliding_attention", "full_attention"],
    ),
}  # fmt: skip


def real_pair(config: PretrainedConfig) -> tuple[PreTrainedModel, PreTrainedModel]:
    """In bfloat16 for the worker, and in float32 for transformers' own pass, whose weights are to be set."""
    torch.manual_seed(0)
    register_attention()
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=torch.bfloat16, attn_implementation=ATTENTION
        ).eval()
        exact = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=torch.float32, attn_implementation="eager"
        ).eval()
    return model, exact


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "quantization"), [("8B", "none"), ("8B", "fp8"), ("E2B", "none"), ("E2B", "fp8"), ("31B", "none")]
)
def test_real_shapes_in_bfloat16(shape: str, quantization: Literal["none", "fp8"]) -> None:
    """Layers as wide as real models', where products are split and cut otherwise than in the tiny ones.

    Decode steps of many sizes, against transformers' own pass in float32 over the same weights and tokens.
    """
    config = REAL_SHAPES[shape]()
    model, exact = real_pair(config)
    for path, norm in model.named_parameters():
        if path.endswith(("q_norm.weight", "k_norm.weight")):
            norm.data.fill_(0.3)  # scores as moderate as a trained model's, where none scales them
    exact.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    adapted = {path for path, module in exact.named_modules() if isinstance(module, torch.nn.Linear)} - {"lm_head"}
    for path, module in exact.named_modules():
        if quantization == "fp8" and path in adapted:
            module.weight.data = quantize(module.weight.data).dequantized(torch.float32)
    loaded = loader.prepare_model(model.requires_grad_(False), name="wide", quantization=quantization)
    weights = read_decoder(loaded)
    assert weights is not None
    cache = KvCache(loaded.spec.kv, num_blocks=1200, block_size=16, dtype=loaded.dtype, device=loaded.device)
    limits = DeviceLimits(max_rows=8192, max_sequences=128, adapter_slots=4, max_rank=16)
    driver = Driver(DeviceModelRunner(loaded, weights, cache, limits, num_kv_blocks=1100))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 120, (100,), generator=generator).tolist()
    streams = [Stream(torch.randint(3, 32000, (n,), generator=generator).tolist()) for n in lengths]
    prefilled = driver.logits(streams)
    batches = [streams[:1], streams[1:9], streams[9:49], streams[49:]]
    for stream in streams:
        stream.output.append(7)
    decoded = torch.cat([driver.logits(batch) for batch in batches])
    for i, stream in enumerate(streams):
        with torch.inference_mode():
            expected = exact(torch.tensor([stream.tokens], device="cuda")).logits[0, -2:].float()
        for got, want in ((prefilled[i], expected[0]), (decoded[i], expected[1])):
            assert (got - want).norm() / want.norm() < 0.03


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=needs_interpreter),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("shape", ["gated", "fused", "post norms", "delta net", "inputs of layers"])
def test_cuda_tiles_in_the_decoder(shape: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of lora_tiles.cu between the others, against the same runner with Triton's alone.

    Decode steps of more and fewer rows than a tile, in graphs on a GPU, and one with prompts. Elsewhere the kernels'
    reference stands in for them.
    """
    dtype, tolerance = (torch.bfloat16, 0.02) if device == "cuda" else (torch.float32, 1e-4)
    if device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs Hopper")
    if device == "cpu":
        monkeypatch.setattr(products.LoraTiles, "where_it_runs", lambda *_: ReferenceTiles())
        monkeypatch.setattr(loader, "can_pack", lambda *_: False)
    sizes: dict[str, Any] = dict(
        vocab_size=50, hidden_size=64, intermediate_size=136, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    config = {
        "gated": lambda: LlamaConfig(**sizes),
        "fused": lambda: Phi3Config(**sizes, pad_token_id=0),
        "post norms": lambda: Gemma2Config(**sizes, head_dim=16, query_pre_attn_scalar=16),
        "delta net": lambda: Qwen3_5TextConfig(
            **{**sizes, "num_hidden_layers": 2},
            head_dim=16,
            pad_token_id=0,
            linear_num_key_heads=2,
            linear_num_value_heads=8,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            layer_types=["linear_attention", "full_attention"],
            rope_parameters=ROPE,
        ),
        "inputs of layers": lambda: Gemma4TextConfig(
            **sizes | {"num_hidden_layers": 4},
            head_dim=16,
            global_head_dim=32,
            vocab_size_per_layer_input=50,
            hidden_size_per_layer_input=16,
            num_kv_shared_layers=2,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
    }[shape]()
    torch.manual_seed(0)
    register_attention()
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION).eval()
    loaded = loader.prepare_model(model.requires_grad_(False), name=shape)
    adapters = [random_adapter(loaded, rank, index) for index, rank in enumerate((8, 16, 40, 64))]
    found = []
    for fewest in (10_000, 1):
        monkeypatch.setattr(products, "FEWEST_ROWS", fewest)
        weights = read_decoder(loaded)
        assert weights is not None
        cache = KvCache(loaded.spec.kv, num_blocks=300, block_size=128, dtype=loaded.dtype, device=loaded.device)
        limits = DeviceLimits(max_rows=512, max_sequences=64, adapter_slots=4, max_rank=64)
        runner = DeviceModelRunner(loaded, weights, cache, limits, num_kv_blocks=60)
        assert runner._decoder._products._lora_tiles is not None
        for adapter in adapters:
            runner.reserve_adapter(adapter)
            runner.fill_adapter(adapter)
        driver = Driver(runner)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(1)
        of_row = [None, *[adapters[i].uid for i in (0, 0, 0, 1, 1, 2, 3)], *[adapters[1].uid] * 14]
        streams = [
            Stream(torch.randint(3, 50, (2 + i % 2,), generator=generator).tolist(), adapter_uid=uid)
            for i, uid in enumerate(of_row)
        ]
        logits = [driver.logits(streams)]
        for stream in streams:
            stream.output.append(7)
        # Rows that share adapters, so that they are computed by tile: one tile, and six.
        logits += [driver.logits(streams[20:]), driver.logits(streams[:20])]
        found.append(torch.cat(logits))
    assert (found[0] - found[1]).norm() / found[0].norm() < tolerance
    assert not torch.equal(found[0], found[1])  # other kernels


def random_adapter(loaded: loader.LoadedModel, rank: int, seed: int) -> HostAdapter:
    """On all sites, large enough that its outputs are seen."""
    layout = lay_out(loaded.sites, {slot.path: rank for site in loaded.sites for slot in site.slots})
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.randn(elements_of(layout), generator=generator).mul_(0.05).to(loaded.dtype)
    return HostAdapter(AdapterUid(f"random-{rank}"), buffer, layout)
