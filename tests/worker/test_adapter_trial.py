"""What an adapter's first step says of it, over the fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from manylora_shared.errors import ServiceUnavailable
from manylora_shared.ids import AdapterUid, TenantId
from manylora_sim.fake_runner import FakeRunner, FakeValidator
from manylora_worker.kinds.api import Sampled, StepBatch
from manylora_worker.serving import adapter_trial
from manylora_worker.serving.adapter_trial import AdapterTrial

from tests.worker.worker_fakes import OTHER_UID, UID, collect, config, make_engine, message, running_worker

TENANT = TenantId("acme")


class Lending(FakeValidator):
    def __init__(self) -> None:
        super().__init__()
        self.lent: list[tuple[str, AdapterUid]] = []

    @contextmanager
    def lends(self, path: str, uid: AdapterUid) -> Iterator[None]:
        self.lent.append((path, uid))
        yield
        self.lent.remove((path, uid))


def overflow_of(runner: FakeRunner, uid: AdapterUid) -> None:
    """Its rows have no finite logits, as a model's with weights that overflow."""
    execute = runner.execute

    def broken(batch: StepBatch) -> Sequence[Sampled]:
        drawn = {each.sequence_id: each for each in execute(batch)}
        for chunk in batch.chunks:
            if chunk.adapter_uid == uid and chunk.samples:
                drawn[chunk.sequence_id] = Sampled(chunk.sequence_id, 0, error="the model's logits are not finite")
        return list(drawn.values())

    runner.execute = broken  # type: ignore[method-assign]


async def test_a_good_adapter_costs_one_short_prompt_and_one_token() -> None:
    engine, validator = make_engine(config()), Lending()
    async with running_worker(engine=engine, validate=validator):
        assert await AdapterTrial(engine.runtime, validator).problem("incoming/1", TENANT, UID) is None
        tokens = engine.runtime.view.flows[(TENANT, adapter_trial.QosClass.STANDARD)]
        assert (tokens.prompt_tokens, tokens.output_tokens) == (config().block_size - 1, 1)
        assert not validator.lent


async def test_an_adapter_that_overflows_is_named_with_its_largest_update() -> None:
    """And who runs beside it meanwhile does not hear of it."""
    engine, validator = make_engine(config()), Lending()
    overflow_of(engine.runner, UID)
    async with running_worker(engine=engine, validate=validator) as worker:
        beside = asyncio.create_task(collect(worker.execute(message("beside", adapter_uid=OTHER_UID))))
        problem = await AdapterTrial(engine.runtime, validator).problem("incoming/1", TENANT, UID)
        assert problem is not None
        assert problem.field == "adapter_model.safetensors"
        assert problem.description == (
            "with its weights the model's logits are not finite, after a probe of 15: values overflow; the largest "
            "update is that of q_proj"
        )
        assert (await beside).tokens[0]
        assert worker.engine.core.stats().failed_steps == 0


async def test_who_gives_up_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_trial, "TRIAL_S", 0.01)
    engine, validator = make_engine(config(), load_s=0.2), Lending()
    async with running_worker(engine=engine, validate=validator):
        trial = AdapterTrial(engine.runtime, validator)
        with pytest.raises(ServiceUnavailable, match=r"did not come in 0\.01 s"):
            await trial.problem("incoming/1", TENANT, UID)
        monkeypatch.setattr(adapter_trial, "TRIAL_S", 10.0)
        task = asyncio.create_task(trial.problem("incoming/1", TENANT, UID))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        while engine.runtime.view.running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert await trial.problem("incoming/1", TENANT, UID) is None
