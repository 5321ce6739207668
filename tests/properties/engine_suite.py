"""What tests of EngineCore over a fake runner share: runners that fail as told, and what every output has to be."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from manylora_shared.ids import QosClass, RequestId, TenantId
from manylora_sim.fake_runner import (
    AheadFakeRunner,
    FakeAdapterBackend,
    FakeRunner,
    FakeStep,
    reference_prompt_logprobs,
    reference_tokens,
)
from manylora_worker.adapters.cache import AdapterCacheLimits
from manylora_worker.engine.core import EngineCore, EngineLimits
from manylora_worker.engine.outbox import RequestEnd
from manylora_worker.kinds.api import EngineRequest, FinishReason, Logprobs, Sampled, Sampling, StepBatch, TokenOutput
from manylora_worker.planning.step_planner import PlannerLimits

EOS = 0
EOS_ONE_IN = 12
CONTEXT = 40


class FaultyRunner(FakeRunner):
    """Fails the step that it is told to, before it has touched anything."""

    fail_next = False
    corrupt_next = False

    def execute(self, batch: StepBatch) -> SequenceOf[Sampled]:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device is gone")
        sampled = super().execute(batch)
        if self.corrupt_next and sampled:
            self.corrupt_next = False
            return [Sampled(sampled[0].sequence_id, 0, error="the logits are not finite"), *sampled[1:]]
        return sampled


class FaultyAheadRunner(AheadFakeRunner):
    """As FaultyRunner; the failure may show only when the result is read, and another step is in flight by then."""

    fail_next = False
    fail_next_result = False
    corrupt_next = False

    def submit(self, batch: StepBatch) -> FakeStep:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device is gone")
        return super().submit(batch)

    def execute(self, batch: StepBatch) -> SequenceOf[Sampled]:
        if self.fail_next_result:
            self.fail_next_result = False
            raise RuntimeError("the device is gone")
        sampled = super().execute(batch)
        if self.corrupt_next and sampled:
            self.corrupt_next = False
            return [Sampled(sampled[0].sequence_id, 0, error="the logits are not finite"), *sampled[1:]]
        return sampled


def expected(request: EngineRequest, choice: int) -> list[int]:
    """The request's whole output, by the reference, under the fake's end-of-sequence."""
    count = min(request.max_tokens, CONTEXT - len(request.prompt_token_ids))
    return reference_tokens(
        request.prompt_token_ids,
        request.adapter_uid,
        request.sampling.seed,
        choice,
        count,
        greedy=request.sampling.is_greedy,
        eos_token_id=EOS,
        eos_one_in=EOS_ONE_IN,
        emitted_token_ids=request.emitted_of(choice),
        stop_token_ids=request.stop_token_ids,
        min_tokens=request.sampling.min_tokens,
        bad_sequences=request.bad_sequences,
    )


def scores(request: EngineRequest) -> list[Logprobs]:
    top = request.sampling.prompt_logprobs
    return [] if top is None else reference_prompt_logprobs(request.prompt_token_ids, request.adapter_uid, top)


class Collector:
    """What came out of the engine, by request and choice, with the contract of TokenOutput checked."""

    def __init__(self) -> None:
        self.requests: dict[RequestId, EngineRequest] = {}
        self.tokens: dict[tuple[RequestId, int], list[int]] = {}
        self.reasons: dict[tuple[RequestId, int], FinishReason] = {}
        self.ends: dict[RequestId, RequestEnd] = {}
        self.scored: dict[RequestId, list[Logprobs]] = {}

    def add(self, request: EngineRequest) -> None:
        self.requests[request.request_id] = request
        for choice in range(request.n):
            if not request.emitted or request.emitted[choice] is not None:
                self.tokens[request.request_id, choice] = list(request.emitted_of(choice))

    def take(self, outputs: list[TokenOutput], ends: list[RequestEnd]) -> None:
        for output in outputs:
            if output.prompt_logprobs:
                self._score(output)
                continue
            key = (output.request_id, output.choice)
            assert key not in self.reasons, "output after the end"
            assert output.request_id not in self.ends
            assert output.first_position == len(self.tokens[key]), "positions have a gap"
            self.tokens[key] += output.token_ids
            if output.token_ids or output.stop_token_id is not None:
                wanted = scores(self.requests[output.request_id])
                assert self.scored.get(output.request_id, []) == wanted, "tokens before the prompt's log-probabilities"
            if output.finish_reason is not None:
                self.reasons[key] = output.finish_reason
                self._check_end(output)
        for end in ends:
            assert end.request_id not in self.ends, "a request ended twice"
            self.ends[end.request_id] = end
            for request_id, choice in self.tokens:
                assert request_id != end.request_id or (request_id, choice) in self.reasons
            assert min(end.adapter_wait_s, end.prefill_s, end.decode_s) >= 0

    def _score(self, output: TokenOutput) -> None:
        assert output.request_id not in self.ends
        told = self.scored.setdefault(output.request_id, [])
        told += output.prompt_logprobs
        assert told == scores(self.requests[output.request_id])[: len(told)]

    def _check_end(self, output: TokenOutput) -> None:
        request = self.requests[output.request_id]
        want = expected(request, output.choice)
        got = self.tokens[output.request_id, output.choice]
        match output.finish_reason:
            case FinishReason.LENGTH:
                assert got == want
                assert len(got) in (request.max_tokens, CONTEXT - len(request.prompt_token_ids))
            case FinishReason.STOP if output.stop_token_id is not None:
                assert output.stop_token_id in request.stop_token_ids
                assert got == want
            case _:
                assert got == want[: len(got)]


def make_engine(
    num_blocks: int,
    *,
    slots: int = 8,
    batch_tokens: int = 16,
    chunk: int = 8,
    make_runner: type[FaultyRunner | FaultyAheadRunner] = FaultyRunner,
) -> tuple[EngineCore, FaultyRunner | FaultyAheadRunner]:
    runner = make_runner(
        num_blocks=num_blocks, block_size=4, max_context_tokens=CONTEXT, eos_token_id=EOS, eos_one_in=EOS_ONE_IN
    )
    backend = FakeAdapterBackend(lambda: 0.0)
    limits = EngineLimits(PlannerLimits(batch_tokens, chunk, slots), AdapterCacheLimits(8, 8), max_requests=64)
    core = EngineCore(runner, backend, limits)
    runner.tenant_of = core.tenant_of
    return core, runner


def make_request(name: str, prompt: int, max_tokens: int, *, n: int = 1, tenant: str = "a") -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(name),
        tenant_id=TenantId(tenant),
        qos_class=QosClass.STANDARD,
        adapter_uid=None,
        prompt_token_ids=tuple(range(1, prompt + 1)),
        max_tokens=max_tokens,
        sampling=Sampling(seed=7),
        n=n,
    )
