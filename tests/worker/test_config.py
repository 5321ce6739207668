"""The worker's settings: every flag is turned, every wrong value is refused with its flag's name."""

from __future__ import annotations

from typing import Any

import pytest
from manylora_shared.process.config import ConfigError, parse
from manylora_worker import config as settings
from manylora_worker.config import WorkerConfig


def test_flags_and_environment() -> None:
    flags = "--model=/m --device-adapter-mb=0.25 --quantization nf4 --listen=0.0.0.0:7 --advertise=w:7"
    flags += " --allow-plain-text"
    config = parse(WorkerConfig, flags.split(), {"MANYLORA_THREADS": "3", "MANYLORA_ADAPTER_STORE": "/a"})
    assert (config.model, config.device_adapter_mb, config.quantization) == ("/m", 0.25, "nf4")
    assert (config.threads, config.adapter_store, config.advertise) == (3, "/a", "w:7")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("", "--model"),
        ("--model=m --listen=nowhere", "--listen"),
        ("--model=m --listen=0.0.0.0:0", "--advertise"),
        ("--model=m --insecure", "--insecure"),
        ("--model=m --max-batch-tokens=8 --sequence-slots=9", "--max-batch-tokens"),
        ("--model=m --sequence-slots=0", "--sequence-slots"),
        ("--model=m --block-size=0", "--block-size"),
        ("--model=m --lease-ttl-s=0", "--lease-ttl-s"),
        ("--model=m --kv-cache-mb=-1", "--kv-cache-mb"),
        ("--model=m --kv-cache-dtype=fp16", "--kv-cache-dtype: .fp16. is not one of auto, fp8"),
        ("--model=m --prefill-chunk-tokens=0", "--prefill-chunk-tokens"),
        ("--model=m --max-lora-rank=0", "--max-lora-rank"),
        ("--model=m --host-adapter-mb=0", "--host-adapter-mb"),
        ("--model=m --device-adapter-mb=-1", "--device-adapter-mb"),
        ("--model=m --num-blocks=-1", "--num-blocks"),
        ("--model=m --threads=-1", "--threads"),
        ("--model=m --drain-s=-1", "--drain-s"),
        ("--model=m --dtype=int8", "--dtype"),
        ("--model=m --prefix-cache-share=-0.1", "--prefix-cache-share"),
        ("--model=m --prefix-cache-share=1.1", "--prefix-cache-share"),
        ("--model=m --host-kv-mb=-2", "--host-kv-mb"),
    ],
)
def test_wrong_settings_are_refused_by_name(flags: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(WorkerConfig, flags.split(), {})


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [("", "float32"), ("--device=cuda:1", "bfloat16"), ("--device=cuda --dtype=float16", "float16")],
)
def test_the_compute_type_suits_the_device(flags: str, dtype: str) -> None:
    assert parse(WorkerConfig, ["--model=m", *flags.split()], {}).compute_dtype == dtype


@pytest.mark.parametrize(
    ("flags", "host_kv_mb"),
    [("", 0), ("--device=cuda:1", 4096), ("--device=cuda --host-kv-mb=0", 0), ("--host-kv-mb=0.5", 0.5)],
)
def test_memory_for_swaps_suits_the_device(flags: str, host_kv_mb: float) -> None:
    config = parse(WorkerConfig, ["--model=m", *flags.split()], {})
    assert config.host_kv_bytes == host_kv_mb * 2**20


@pytest.mark.parametrize(("cores", "frames_per_s"), [(1, 125), (2, 250), (16, 1000)])
def test_few_cores_send_few_frames(cores: int, frames_per_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "num_cores", lambda: cores)
    assert WorkerConfig(model="m").frames_per_s == frames_per_s


@pytest.mark.parametrize(("threads", "cores", "found"), [(0, 1, 1), (0, 2, 1), (0, 16, 15), (3, 2, 3)])
def test_the_model_leaves_a_core_to_the_event_loop(
    threads: int, cores: int, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "num_cores", lambda: cores)
    assert WorkerConfig(model="m", threads=threads).compute_threads == found


@pytest.mark.parametrize(
    ("flags", "aliases"), [([], ()), (["--model-alias=acme/a, b,"], ("acme/a", "b")), (["--model-alias="], ())]
)
def test_aliases_of_the_model(flags: list[str], aliases: tuple[str, ...]) -> None:
    assert parse(WorkerConfig, ["--model=m", *flags], {}).model_aliases == aliases


@pytest.mark.parametrize(
    ("told", "bounds"),
    [
        ({}, (512, 512)),
        ({"device_adapter_min_mb": 128.0, "device_adapter_max_mb": 2048.0}, (128, 2048)),
        ({"device_adapter_mb": 64.0, "device_adapter_max_mb": 64.0}, (64, 64)),
    ],
)
def test_adapters_have_bounds_in_the_arena(told: dict[str, Any], bounds: tuple[int, int]) -> None:
    assert WorkerConfig(model="m", **told).arena_adapter_bytes == (bounds[0] << 20, bounds[1] << 20)


@pytest.mark.parametrize(
    ("told", "flag"),
    [
        ({"device_adapter_min_mb": 600.0}, "--device-adapter-min-mb"),
        ({"device_adapter_min_mb": 0.0}, "--device-adapter-min-mb"),
        ({"device_adapter_max_mb": 500.0}, "--device-adapter-max-mb"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(told: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        WorkerConfig(model="m", **told)
