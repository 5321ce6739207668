"""Two ranks on the CPU share a model: as one, whatever the engine does, and no longer than both live."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from manylora_worker.kinds.api import LosableRunner, RunnerLost, StepBatch
from manylora_worker.models.ranks.shared import SharedBackend, SharedRunner

from tests.numerics.conftest import KV_IN_FP8, FamilyOf
from tests.numerics.mixtures import OWN_PATTERNS
from tests.numerics.two_ranks import (
    SHARED_FAMILIES,
    SHARED_MIXTURES,
    check_fight,
    check_logprobs,
    mixture_family,
    shared_by_two,
    text_family,
    tolerance_of,
)

ORDINARY = ("llama", "phi3", "qwen3_5_text")
EACH = [pytest.param(name, marks=() if name in ORDINARY else pytest.mark.wide) for name in SHARED_FAMILIES]


@pytest.mark.parametrize("name", EACH)
def test_logprobs_are_the_references(family_of: FamilyOf, name: str, tmp_path: Path) -> None:
    check_logprobs(family_of(name), tmp_path, "cpu", tolerance_of(name))


@OWN_PATTERNS
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "qwen3_moe" else pytest.mark.wide) for name in SHARED_MIXTURES]
)
def test_logprobs_of_a_mixture_are_the_references(name: str, tmp_path: Path) -> None:
    check_logprobs(mixture_family(tmp_path / "made", name), tmp_path, "cpu", tolerance_of(name))


@pytest.mark.wide
@OWN_PATTERNS
@pytest.mark.parametrize("name", ["mixtral_wide", "gpt_oss_blocks"])
def test_logprobs_of_a_mixture_in_fp8_are_the_references(name: str, tmp_path: Path) -> None:
    family = mixture_family(tmp_path / "made", name, quantization="fp8")
    check_logprobs(family, tmp_path, "cpu", tolerance_of(name), quantization="fp8")


@pytest.mark.wide
@pytest.mark.parametrize("name", ["qwen2.5-vl-7b", "qwen3-vl-8b", "qwen3-vl-30b-a3b"])
def test_logprobs_of_a_text_part_are_the_references(name: str, tmp_path: Path) -> None:
    check_logprobs(text_family(tmp_path / "made", name), tmp_path, "cpu", tolerance_of(name))


def test_logprobs_of_kv_in_fp8(family_of: FamilyOf, tmp_path: Path) -> None:
    """Ranks agree on the scales that one process finds. Another order of summing moves some codes to a neighbour."""
    check_logprobs(family_of("qwen2" + KV_IN_FP8), tmp_path, "cpu", 0.05)


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text", pytest.param("gemma2", marks=pytest.mark.wide)])
def test_outputs_are_the_references_whatever_befalls(family_of: FamilyOf, name: str, tmp_path: Path) -> None:
    check_fight(family_of(name), tmp_path, "cpu")


def test_a_lost_rank_is_told(family_of: FamilyOf, tmp_path: Path) -> None:
    with shared_by_two(family_of("llama"), tmp_path, "cpu") as parts:
        assert isinstance(parts.backend, SharedBackend)
        assert isinstance(parts.runner, SharedRunner)
        assert isinstance(parts.runner, LosableRunner)
        parts.runner.check()
        pid = parts.backend._followers._ranks[0][1].pid
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while not parts.backend._followers.lost and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(RunnerLost, match=rf"rank 1 \(process {pid}\) has ended by signal 9"):
            parts.runner.check()
        with pytest.raises(RunnerLost):
            parts.runner.execute(StepBatch([]))
