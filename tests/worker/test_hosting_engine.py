"""A worker's settings, as its engine has them."""

from __future__ import annotations

from manylora_shared.process.config import parse
from manylora_sim.worker import FakeWorkerConfig, build_fake_engine
from manylora_worker.engine.core import EngineCore
from manylora_worker.hosting.engine import engine_limits, host, prefix_options


def test_settings_reach_the_engine() -> None:
    flags = (
        "--num-blocks=77 --block-size=8 --sequence-slots=5 --max-batch-tokens=50"
        " --prefill-chunk-tokens=20 --host-adapter-mb=2 --device-adapter-mb=0.5 --prefix-cache-share=0.5"
        " --debug-fill-freed"
        " --host-kv-mb=5"
    )
    config = parse(FakeWorkerConfig, flags.split(), {})
    runtime, _ = host(config, build_fake_engine)
    core = runtime._core
    assert isinstance(core, EngineCore)
    assert (core.stats().blocks_total, core.stats().block_size) == (77, 8)
    assert core._pool._clears_freed
    assert core.stats().host_blocks_total == 5, "of a MiB each"
    assert runtime.model.max_context_tokens == 77 * 8
    prefix = prefix_options(config, runtime.model, bytes(32))
    assert prefix is not None
    assert prefix.max_idle_blocks(77) == 38
    limits = engine_limits(config)
    assert (limits.planner.sequence_slots, limits.planner.max_batch_tokens) == (5, 50)
    assert limits.planner.prefill_chunk_tokens == 20
    assert (limits.adapters.host_bytes, limits.adapters.device_bytes) == (2 << 20, 1 << 19)
