"""Greedy tokens through the running cluster equal transformers + peft, one request at a time, in fp32.

Real processes, for each family: requests of all adapters and of the base model arrive at once, prompts are cut into
chunks, the pool is too small for all of them (blocks are freed, sequences wait and are swapped or recomputed), the
device tier is too small for all adapters (they are loaded and evicted meanwhile), and some callers go away in mid-
stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from manylora.client import Client, Sampling
from manylora.local.cluster import ClusterOptions, LocalCluster

from tests.numerics.adapters import Reference, Tie, recipes, save_adapter
from tests.numerics.families import EACH_FAMILY, VOCAB_SIZE, make_model
from tests.numerics.mixtures import OWN_PATTERNS, make_mixture

Asked = tuple[str | None, list[int]]
TENANT = "oracle"
MAX_TOKENS = 24
ROUNDS = 3

DEVICE_ADAPTER_MB = 0.28
# the one by a name of the policy, the other as a request writes it; PEFT's sum is of the kind `cat`
COMPOSED = {
    "mix": {"all-linear": 1.0, "rank-1": -0.7},
    "written": {"rank-1": 0.5, "all-linear": 0.25},
}
ASKED = {"written": "rank-1:0.5+all-linear:0.25"}
WORKER_FLAGS = (
    "--num-blocks=40",
    "--block-size=4",
    "--host-kv-mb=0.1",
    "--sequence-slots=8",
    "--max-batch-tokens=24",
    "--prefill-chunk-tokens=7",
    "--max-lora-rank=64",
)

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("family", [*EACH_FAMILY, pytest.param("gemma4_text", marks=pytest.mark.slow)])
async def test_cluster_equals_peft(family: str, tmp_path: Path) -> None:
    model = make_model(family, tmp_path / "model")
    folders = {
        name: save_adapter(model, tmp_path / "adapters" / name, seed, **recipe)
        for seed, (name, recipe) in enumerate(recipes(family).items())
    }
    model.set_attn_implementation("eager")  # transformers' sdpa leaves out Gemma 2's soft cap of the scores
    reference = Reference(model, folders)
    for name, weights in COMPOSED.items():
        reference.compose(name, weights)
    requests, expected = draw(family, dict.fromkeys((None, *folders, *COMPOSED), reference))
    device_adapter_mb = 0.6 if family == "gemma4_text" else DEVICE_ADAPTER_MB  # it has more layers
    await check_cluster(family, tmp_path, folders, requests, expected, device_adapter_mb=device_adapter_mb)


@pytest.mark.wide
@OWN_PATTERNS
@pytest.mark.parametrize(
    ("family", "device_adapter_mb"),
    [
        ("qwen3_moe", 0.25),
        pytest.param("gpt_oss", 0.22, marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe_text", 0.22, marks=pytest.mark.slow),
        pytest.param("qwen3_next", 0.25, marks=pytest.mark.slow),
        pytest.param("gemma4_moe", 0.25, marks=pytest.mark.slow),
    ],
)
async def test_cluster_equals_peft_where_experts_are_adapted(
    family: str, device_adapter_mb: float, tmp_path: Path
) -> None:
    mixture = make_mixture(tmp_path / "made", family)
    (tmp_path / "made" / f"tiny-{family}").rename(tmp_path / "model")
    requests, expected = draw(1, mixture.references)
    await check_cluster(
        f"tiny-{family}", tmp_path, mixture.adapters, requests, expected, device_adapter_mb=device_adapter_mb
    )


def draw(seed: str | int, references: Mapping[str | None, Reference]) -> tuple[list[Asked], list[list[int]]]:
    """Prompts for each adapter, and their greedy answers, which no rounding decides."""
    rng = random.Random(seed)
    requests: list[Asked] = []
    expected: list[list[int]] = []
    for adapter in list(references) * ROUNDS:
        while len(expected) == len(requests):
            prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice((1, 3, 8, 21, 40)))]
            with contextlib.suppress(Tie):
                expected.append(references[adapter].greedy(prompt, adapter, MAX_TOKENS))
        requests.append((adapter, prompt))
    return requests, expected


async def check_cluster(
    family: str,
    tmp_path: Path,
    folders: Mapping[str, Path],
    requests: Sequence[Asked],
    expected: Sequence[list[int]],
    *,
    device_adapter_mb: float = DEVICE_ADAPTER_MB,
) -> None:
    rng = random.Random(family)
    options = ClusterOptions(
        model=tmp_path / "model",
        model_name=family,
        data=tmp_path / "data",
        workers=1,
        worker_flags=(*WORKER_FLAGS, f"--device-adapter-mb={device_adapter_mb}"),
    )
    async with LocalCluster(options) as cluster, Client(cluster.router, tenant=TENANT) as client:
        composes = "\nadapters: {compose: {mix: all-linear+rank-1:-0.7}}" if "rank-1" in folders else ""
        await client.tenants.apply(f"tenant_id: {TENANT}{composes}\n")
        added = [await client.adapters.add(TENANT, name, folder) for name, folder in folders.items()]
        assert sum(adapter.size_bytes for adapter in added) > 1.3 * device_adapter_mb * 2**20, (
            "all fit: nothing is evicted"
        )

        async def complete(adapter: str | None, prompt: list[int]) -> list[int]:
            await asyncio.sleep(rng.uniform(0, 0.5))
            result = await client.complete(
                prompt,
                adapter=ASKED.get(adapter or "", adapter or ""),
                max_tokens=MAX_TOKENS,
                sampling=Sampling(temperature=0),
                ignore_eos=True,
                timeout_s=120,
            )
            return list(result.token_ids)

        async def give_up(adapter: str | None, prompt: list[int]) -> None:
            async with client.generate(
                prompt, adapter=ASKED.get(adapter or "", adapter or ""), max_tokens=80, ignore_eos=True
            ) as stream:
                async for _ in stream:
                    if rng.random() < 0.3:
                        return

        given_up = [asyncio.create_task(give_up(*request)) for request in requests[::3]]
        got = await asyncio.gather(*(complete(*request) for request in requests))
        await asyncio.gather(*given_up)
        await _wait_until_empty(client)

    for (adapter, prompt), tokens, reference_tokens in zip(requests, got, expected, strict=True):
        assert tokens == reference_tokens, f"{family}, adapter {adapter}, prompt of {len(prompt)} tokens"


async def _wait_until_empty(client: Client) -> None:
    """Until nothing runs or waits and all blocks are free again."""
    async with asyncio.timeout(10):
        while True:
            status = await client.status()
            busy = [f for f in status.scheduler.flows if f.queued or f.running]
            busy += [w for w in status.workers if w.running or w.kv_blocks_free != w.kv_blocks_total]
            if not busy:
                return
            await asyncio.sleep(0.05)
