"""A whole worker over the torch engine, in this process: greedy tokens equal transformers + peft, a request at a time.

Chunked prefill, concurrent arrivals, cancellations, a pool too small for all (sequences are preempted and recomputed),
a device tier too small for all adapters (they are loaded and evicted meanwhile), several choices of one prompt.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path

import pytest
from manylora.v1 import common_pb2, worker_pb2
from manylora_shared.composition import Part, key_of
from manylora_shared.coordination.peers import PeerTransport
from manylora_shared.errors import Code, RpcError
from manylora_shared.ids import AdapterKey, AdapterUid, QosClass, RequestId, TenantId
from manylora_shared.stores.adapter_files import CONFIG_NAME, WEIGHTS_NAME, adapter_digest, parse_config
from manylora_shared.telemetry import Telemetry
from manylora_shared.transport.grpc_transport import GrpcTransport
from manylora_sim.peers import SIMULATED
from manylora_sim.store import MemoryStoreServer
from manylora_worker.app import WorkerApp
from manylora_worker.config import WorkerConfig
from manylora_worker.hosting.engine import host
from manylora_worker.hosting.output_stream import EndKind
from manylora_worker.kinds.api import EngineRequest, Sampling
from manylora_worker.models.build import build_engine
from manylora_worker.serving.adapter_trial import AdapterTrial
from safetensors.torch import load_file, save_file

from tests.numerics.adapters import Reference, recipes, save_adapter
from tests.numerics.driver import composed
from tests.numerics.families import VOCAB_SIZE, make_model
from tests.worker.worker_fakes import EXECUTE, VALIDATE, collect, message

MAX_TOKENS = 24


def store_adapter(source: Path, store: Path) -> AdapterUid:
    uid = adapter_digest(parse_config((source / CONFIG_NAME).read_bytes()), source / WEIGHTS_NAME)
    target = store / "objects" / uid
    target.mkdir(parents=True)
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        (target / name).write_bytes((source / name).read_bytes())
    return uid


@pytest.mark.parametrize(
    ("family", "debug_fill_freed"),
    [
        ("llama", False),
        pytest.param("gemma2", False, marks=pytest.mark.wide),
        pytest.param("gemma2", True, marks=pytest.mark.wide),
        pytest.param("qwen3_5_text", True, marks=pytest.mark.slow),
        pytest.param("granite4_h", True, marks=pytest.mark.slow),
        pytest.param("gemma4_text", True, marks=pytest.mark.slow),
    ],
)
async def test_worker_equals_peft(family: str, debug_fill_freed: bool, tmp_path: Path) -> None:
    model = make_model(family, tmp_path / "model")
    folders = {
        name: save_adapter(model, tmp_path / "adapters" / name, seed, **recipe)
        for seed, (name, recipe) in enumerate(recipes(family).items())
    }
    store = tmp_path / "store"
    uids = {name: store_adapter(folder, store) for name, folder in folders.items()}
    rng = random.Random(family)
    reference = Reference(model, folders)
    keys = {**uids, **composed(reference, dict(uids))}
    requests = [
        (name, [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice((1, 3, 8, 21, 40)))])
        for _ in range(2)
        for name in (None, *keys)
    ]
    expected = [reference.greedy(prompt, name, MAX_TOKENS) for name, prompt in requests]

    settings = WorkerConfig(
        worker_id="w",
        model=str(tmp_path / "model"),
        model_name=family,
        adapter_store=store,
        num_blocks=120 if family == "granite4_h" else 40,  # its state is large
        block_size=4,
        sequence_slots=8,
        max_batch_tokens=24,
        prefill_chunk_tokens=7,
        device_adapter_mb={"llama": 0.25, "gemma2": 0.25, "gemma4_text": 0.6}.get(family, 0.4),  # some have more layers
        threads=1,
        debug_fill_freed=debug_fill_freed,
    )
    runtime, parts = host(settings, build_engine)
    if debug_fill_freed:
        assert runtime._core._flights._runner._cache.marks_free
    coordination = MemoryStoreServer(rng)
    app = WorkerApp(
        settings,
        transport=GrpcTransport(),
        store=coordination.client(),
        runtime=runtime,
        validate=parts.validator,
        telemetry=Telemetry.disabled(),
        rng=rng,
        peer_secret=SIMULATED,
        started_unix_s=0.0,
    )
    await app.start()
    channel = PeerTransport(GrpcTransport(), SIMULATED).connect(app.address)
    greedy = common_pb2.SamplingParams(seed=1, temperature=0.0)

    def ask(i: int, name: str | None, prompt: list[int], **changes: object) -> worker_pb2.ExecuteRequest:
        uid = keys[name] if name else ""
        fields = {"adapter_uid": uid, "prompt_token_ids": prompt, "max_tokens": MAX_TOKENS, "sampling": greedy}
        return message(f"r{i}", **(fields | changes))

    async def complete(i: int, name: str | None, prompt: list[int]) -> list[list[int]]:
        await asyncio.sleep(rng.uniform(0, 0.3))
        result = await collect(channel.stream(EXECUTE, ask(i, name, prompt, n=1 + i % 2)))
        assert result.finished.outcome == common_pb2.OUTCOME_COMPLETED, result.finished.message
        return [result.tokens[choice] for choice in range(1 + i % 2)]

    async def give_up(i: int, name: str | None, prompt: list[int]) -> None:
        stream = channel.stream(EXECUTE, ask(1000 + i, name, prompt, max_tokens=100))
        await stream.read()
        await asyncio.sleep(rng.uniform(0, 0.2))
        stream.cancel()

    try:
        results, _ = await asyncio.gather(
            asyncio.gather(*(complete(i, *request) for i, request in enumerate(requests))),
            asyncio.gather(*(give_up(i, *request) for i, request in enumerate(requests[::3]))),
        )
        for (name, prompt), want, got in zip(requests, expected, results, strict=True):
            assert all(tokens == want for tokens in got), (name, len(prompt))
        stats = runtime.view.stats
        assert stats.evictions > 0
        assert stats.failed_steps == 0
        some = next(iter(uids.values()))
        asked = worker_pb2.ValidateAdapterRequest(path=f"objects/{some}", tenant_id="t", adapter_uid=some)
        good = await channel.call(VALIDATE, asked)
        assert not good.problems
        assert good.size_bytes > 0
        assert good.max_lora_rank > 0
        assert good.target_modules
        (store / "objects" / some / WEIGHTS_NAME).unlink()
        bad = await channel.call(VALIDATE, asked)
        assert WEIGHTS_NAME in [p.field for p in bad.problems]
        for path in ("../model", "/etc", "objects/../../model"):
            asked = worker_pb2.ValidateAdapterRequest(path=path, tenant_id="t", adapter_uid=some)
            with pytest.raises(RpcError) as refusal:
                await channel.call(VALIDATE, asked)
            assert refusal.value.code is Code.INVALID_ARGUMENT
    finally:
        await channel.close()
        await app.stop()
    assert runtime.view.stats.requests == 0
    assert runtime.view.stats.blocks_free == runtime.view.stats.blocks_total


async def test_an_adapter_whose_finite_weights_overflow_is_found_by_its_first_step(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "model")
    targets = ["q_proj", "down_proj"]
    folder = save_adapter(model, tmp_path / "adapter", 1, r=4, lora_alpha=8, target_modules=targets)
    store = tmp_path / "store"
    good = store_adapter(folder, store)
    weights = load_file(folder / WEIGHTS_NAME)
    for key in weights:
        if "layers.1.mlp.down_proj" in key:
            weights[key] *= 1e30
    save_file(weights, folder / WEIGHTS_NAME)
    shutil.copytree(folder, store / "incoming")
    bad = adapter_digest(parse_config((folder / CONFIG_NAME).read_bytes()), folder / WEIGHTS_NAME)
    settings = WorkerConfig(model=str(tmp_path / "model"), adapter_store=store, num_blocks=16, threads=1)
    runtime, parts = host(settings, build_engine)
    runtime.start()
    try:
        trial = AdapterTrial(runtime, parts.validator)
        assert not (await parts.validator.validate("incoming", bad)).problems, "its weights are finite numbers"
        assert await trial.problem(f"objects/{good}", TenantId("t"), good) is None
        problem = await trial.problem("incoming", TenantId("t"), bad)
        assert problem is not None
        assert "not finite" in problem.description
        assert "the largest update is that of model.layers.1.mlp.down_proj, of norm" in problem.description
        assert runtime.view.stats.failed_steps == 0
    finally:
        await runtime.stop()


async def test_a_composition_that_overflows_fails_alone_and_its_parts_are_served_on(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "model")
    store, uids = tmp_path / "store", []
    for seed in (1, 2):
        folder = save_adapter(
            model, tmp_path / f"adapter-{seed}", seed, r=4, lora_alpha=8, target_modules=["down_proj"]
        )
        weights = load_file(folder / WEIGHTS_NAME)
        for key in weights:
            if "layers.1.mlp.down_proj.lora_B" in key:
                weights[key] *= 2e36 / weights[key].abs().max()  # finite alone, and not a hundred times
        save_file(weights, folder / WEIGHTS_NAME)
        uids.append(store_adapter(folder, store))
    settings = WorkerConfig(model=str(tmp_path / "model"), adapter_store=store, num_blocks=32, threads=1)
    runtime, _ = host(settings, build_engine)
    runtime.start()
    one, other = uids
    both = key_of([Part(one, 100.0), Part(other, 100.0)])

    async def end(key: AdapterKey | None, number: int) -> EndKind:
        tenant = TenantId("t" if key else "victim")
        sampling = Sampling(temperature=0.0)
        request = EngineRequest(RequestId(f"r{number}"), tenant, QosClass.STANDARD, key, (5, 6, 7, 8), 4, sampling)
        stream = runtime.submit(request)
        while (found := (await stream.read()).end) is None:
            pass
        return found.kind

    try:
        asked = [one, other, both, None, one, other]
        kinds = await asyncio.gather(*(end(key, number) for number, key in enumerate(asked)))
        assert kinds == [EndKind.COMPLETED] * 2 + [EndKind.ADAPTER_FAILED] + [EndKind.COMPLETED] * 3
        assert await end(one, 10) is EndKind.COMPLETED
        assert runtime.view.stats.failed_steps == 0
    finally:
        await runtime.stop()
