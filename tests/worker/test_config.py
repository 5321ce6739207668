"""The worker's settings: every flag is turned, every wrong value is refused with its flag's name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from manylora_shared.process.config import ConfigError, parse
from manylora_worker.config import WorkerConfig
from manylora_worker.engine.core import EngineCore
from manylora_worker.hosting import engines
from manylora_worker.hosting.runtime import ThreadRuntime


def test_flags_and_environment() -> None:
    flags = "--model=/m --device-adapter-mb=0.25 --quantization nf4 --listen=0.0.0.0:7 --advertise=w:7"
    config = parse(WorkerConfig, flags.split(), {"MANYLORA_THREADS": "3", "MANYLORA_ADAPTER_STORE": "/a"})
    assert (config.model, config.device_adapter_mb, config.quantization) == ("/m", 0.25, "nf4")
    assert (config.threads, config.adapter_store, config.advertise) == (3, Path("/a"), "w:7")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("", "--model"),
        ("--engine=fake --listen=nowhere", "--listen"),
        ("--engine=fake --listen=0.0.0.0:0", "--advertise"),
        ("--engine=fake --insecure", "--insecure"),
        ("--engine=gpu", "--engine"),
        ("--engine=fake --max-batch-tokens=8 --sequence-slots=9", "--max-batch-tokens"),
        ("--engine=fake --sequence-slots=0", "--sequence-slots"),
        ("--engine=fake --block-size=0", "--block-size"),
        ("--engine=fake --lease-ttl-s=0", "--lease-ttl-s"),
        ("--engine=fake --kv-cache-mb=-1", "--kv-cache-mb"),
        ("--engine=fake --prefill-chunk-tokens=0", "--prefill-chunk-tokens"),
        ("--engine=fake --max-lora-rank=0", "--max-lora-rank"),
        ("--engine=fake --host-adapter-mb=0", "--host-adapter-mb"),
        ("--engine=fake --device-adapter-mb=-1", "--device-adapter-mb"),
        ("--engine=fake --num-blocks=-1", "--num-blocks"),
        ("--engine=fake --threads=-1", "--threads"),
        ("--engine=fake --fake-step-ms=-1", "--fake-step-ms"),
        ("--engine=fake --drain-s=-1", "--drain-s"),
        ("--engine=fake --dtype=int8", "--dtype"),
        ("--engine=fake --prefix-cache-share=-0.1", "--prefix-cache-share"),
        ("--engine=fake --prefix-cache-share=1.1", "--prefix-cache-share"),
        ("--engine=fake --public-prefix-share=1.1", "--public-prefix-share"),
        ("--engine=fake --host-kv-mb=-2", "--host-kv-mb"),
    ],
)
def test_wrong_settings_are_refused_by_name(flags: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(WorkerConfig, flags.split(), {})


def test_settings_reach_the_engine() -> None:
    flags = (
        "--engine=fake --num-blocks=77 --block-size=8 --sequence-slots=5 --max-batch-tokens=50"
        " --prefill-chunk-tokens=20 --host-adapter-mb=2 --device-adapter-mb=0.5 --prefix-cache-share=0.5"
        " --debug-fill-freed"
        " --host-kv-mb=5"
    )
    config = parse(WorkerConfig, flags.split(), {})
    runtime, _ = engines.build(config)
    assert isinstance(runtime, ThreadRuntime)
    core = runtime._core
    assert isinstance(core, EngineCore)
    assert (core.stats().blocks_total, core.stats().block_size) == (77, 8)
    assert core._pool._clears_freed
    assert core.stats().host_blocks_total == 5, "of a MiB each"
    assert runtime.model.max_context_tokens == 77 * 8
    prefix = engines.prefix_options(config, runtime.model, bytes(32))
    assert prefix is not None
    assert prefix.max_idle_blocks(77) == 38
    limits = engines.engine_limits(config)
    assert (limits.planner.sequence_slots, limits.planner.max_batch_tokens) == (5, 50)
    assert limits.planner.prefill_chunk_tokens == 20
    assert (limits.adapters.host_bytes, limits.adapters.device_bytes) == (2 << 20, 1 << 19)


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [("", "float32"), ("--device=cuda:1", "bfloat16"), ("--device=cuda --dtype=float16", "float16")],
)
def test_the_compute_type_suits_the_device(flags: str, dtype: str) -> None:
    assert parse(WorkerConfig, ["--engine=fake", *flags.split()], {}).compute_dtype == dtype


@pytest.mark.parametrize(
    ("flags", "host_kv_mb"),
    [("", 0), ("--device=cuda:1", 4096), ("--device=cuda --host-kv-mb=0", 0), ("--host-kv-mb=0.5", 0.5)],
)
def test_memory_for_swaps_suits_the_device(flags: str, host_kv_mb: float) -> None:
    config = parse(WorkerConfig, ["--engine=fake", *flags.split()], {})
    assert config.host_kv_bytes == host_kv_mb * 2**20


@pytest.mark.parametrize(
    ("flags", "cores", "frames_per_s"), [("", 2, 250), ("", 16, 1000), ("", None, 125), ("--frames-per-s=40", 2, 40)]
)
def test_few_cores_send_few_frames(
    flags: str, cores: int | None, frames_per_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert parse(WorkerConfig, ["--engine=fake", *flags.split()], {}).frame_rate == frames_per_s
