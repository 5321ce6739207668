"""A tenant's samples: what is read of them is a prompt, and judges have what they need or say so."""

from __future__ import annotations

from contextlib import suppress

from manylora_router.quality.samples import judges_of, parse_samples
from manylora_shared.errors import InvalidRequest
from manylora_shared.tenancy.adapter_gate import Judge

from tests.fuzz.harness import Harness


def run(data: bytes) -> None:
    samples = parse_samples(data)
    for sample in samples:
        assert sample.asked
        assert (sample.prompt is None) == bool(sample.messages)
        sample.asked.encode()
    for judge in Judge:
        with suppress(InvalidRequest):
            assert len(judges_of(samples, judge)) == len(samples)


HARNESS = Harness(run, max_bytes=8192)
