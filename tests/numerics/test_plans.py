"""Steps as they are told to other ranks: what is told is enough, and not all of it is told again."""

from __future__ import annotations

import pickle
import random

import pytest
from manylora_shared.ids import AdapterUid
from manylora_worker.kinds.api import PENDING_TOKEN, Sampling, SequenceChunk, StepBatch
from manylora_worker.models.ranks import plans
from manylora_worker.models.ranks.plans import PlanReader, PlanWriter

BLOCK_SIZE = 4


def chunk(sequence_id: int, start: int, count: int, table: list[int], sampling: Sampling) -> SequenceChunk:
    return SequenceChunk(
        sequence_id=sequence_id,
        token_ids=[PENDING_TOKEN] if count == 1 else list(range(count)),
        start_position=start,
        block_table=table,
        adapter_uid=AdapterUid(f"a{sequence_id % 3}") if sequence_id % 4 else None,
        samples=count == 1,
        sampling=sampling,
        choice=sequence_id % 2,
        output_index=start,
        prompt_token_ids=(5, 6, 7),
        output_token_ids=list(range(start)),
        bars=((3, -2),) if sequence_id % 5 == 0 else (),
        scored=range(start, start + 2) if sequence_id % 3 == 0 else range(0),
    )


@pytest.mark.parametrize("known", [8192, 5])
def test_a_reader_has_the_writers_steps(known: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences begin, go on, and end; some are forgotten meanwhile."""
    monkeypatch.setattr(plans, "_KNOWN_SEQUENCES", known)
    rng = random.Random(known)
    writer, reader = PlanWriter(BLOCK_SIZE), PlanReader()
    samplings = [Sampling(seed=1, temperature=0.0), Sampling(seed=2, repetition_penalty=1.5)]
    live: dict[int, tuple[int, list[int]]] = {}
    next_id = 0
    for _ in range(200):
        if len(live) < 9:
            live[next_id] = (0, [])
            next_id += 1
        chunks = []
        for sequence_id in rng.sample(sorted(live), min(len(live), 4)):
            start, table = live[sequence_id]
            count = 1 if start else rng.randint(1, 20)
            while len(table) * BLOCK_SIZE < start + count:
                table.append(rng.randrange(1000))
            live[sequence_id] = (start + count, table)
            chunks.append(chunk(sequence_id, start, count, list(table), samplings[sequence_id % 2]))
            if rng.random() < 0.05:
                del live[sequence_id]
        batch = StepBatch(chunks, [(1, 2)], [3])
        got = reader.read(pickle.loads(pickle.dumps(writer.write(batch))))
        assert (got.copy_blocks, got.clear_blocks) == ([(1, 2)], [3])
        for want, found in zip(chunks, got.chunks, strict=True):
            if not want.sampling.adjusts_logits:
                want.prompt_token_ids, want.output_token_ids = (), ()
            assert found == want


def test_a_long_context_is_told_once() -> None:
    writer, sampling = PlanWriter(BLOCK_SIZE), Sampling(temperature=0.0)
    table = list(range(2000, 12000))
    writer.write(StepBatch([chunk(1, 0, 39_990, table, sampling)]))
    assert len(pickle.dumps(writer.write(StepBatch([chunk(1, 39_990, 1, table, sampling)])))) < 200
