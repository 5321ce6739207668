"""Messages of worker.proto into the engine's dataclasses and back. Owns nothing.

A worker believes nobody: every field of an ExecuteRequest is checked here, and all that is wrong is named at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from manylora.v1 import common_pb2, worker_pb2
from manylora_shared.composition import key_problem, uids_of
from manylora_shared.errors import FieldViolation, InvalidRequest
from manylora_shared.ids import AdapterUid, Composition, RequestId, TenantId, is_uid, name_problem, owner_of
from manylora_shared.sampling import barred_too_much
from manylora_shared.wire import QOS_CLASSES

from manylora_worker.hosting.output_stream import EndKind, StreamEnd
from manylora_worker.kinds.api import AdapterTier, EngineRequest, FinishReason, Logprobs, Sampling, TokenOutput
from manylora_worker.models.parts import ModelInfo
from manylora_worker.serving.dedication import Dedicated, Owner
from manylora_worker.weights.adapter_check import Coverage

MAX_CHOICES = 8
MAX_STOP_TOKENS = 256  # a caller's 64, and the model's own
_REQUEST_ID = re.compile(r"[!-~]{1,128}")

TIERS = {
    AdapterTier.HOST: worker_pb2.ADAPTER_TIER_HOST,
    AdapterTier.DEVICE: worker_pb2.ADAPTER_TIER_DEVICE,
}
_FINISH_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
# ABORTED by nobody: only a worker that stops, or is to serve others, does that to a stream that is still read
_OUTCOMES = {
    EndKind.COMPLETED: common_pb2.OUTCOME_COMPLETED,
    EndKind.ABORTED: common_pb2.OUTCOME_WORKER_LOST,
    EndKind.ADAPTER_FAILED: common_pb2.OUTCOME_ADAPTER_FAILED,
    EndKind.ADAPTER_UNAVAILABLE: common_pb2.OUTCOME_ADAPTER_UNAVAILABLE,
    EndKind.ERROR: common_pb2.OUTCOME_INTERNAL,
    EndKind.SLOW_READER: common_pb2.OUTCOME_SLOW_READER,
}


class _Violations:
    def __init__(self) -> None:
        self.found: list[FieldViolation] = []

    def check(self, condition: bool, field: str, description: str) -> bool:
        if not condition:
            self.found.append(FieldViolation(field, description))
        return condition


def engine_request(message: worker_pb2.ExecuteRequest, model: ModelInfo) -> EngineRequest:
    """Raises InvalidRequest naming every field at fault."""
    found = _Violations()
    check = found.check
    check(
        _REQUEST_ID.fullmatch(message.request_id) is not None,
        "request_id",
        "must be 1 to 128 printable ASCII characters",
    )
    problem = name_problem(message.tenant_id)
    check(problem is None, "tenant_id", problem or "")
    check(message.qos_class in QOS_CLASSES, "qos_class", "must be set")
    key = Composition(message.adapter_uid)
    problem = key_problem(key) if key else None
    if check(problem is None, "adapter_uid", problem or "") and key:
        owners = {owner_of(uid) for uid in uids_of(key)}
        check(owners <= {None, message.tenant_id}, "adapter_uid", "is another tenant's copy")
    prompt = tuple(message.prompt_token_ids)
    emitted = tuple(None if each.has_ended else tuple(each.token_ids) for each in message.emitted)
    check(len(prompt) > 0, "prompt_token_ids", "must not be empty")
    _check_token_ids(check, "prompt_token_ids", prompt, model)
    check(1 <= message.n <= MAX_CHOICES, "n", f"must be 1 to {MAX_CHOICES}")
    check(1 <= message.max_tokens <= model.longest, "max_tokens", f"must be 1 to {model.longest}")
    if emitted:
        check(len(emitted) == message.n, "emitted", "must be one a choice")
        check(any(tokens is not None for tokens in emitted), "emitted", "must leave a choice that has not ended")
        for tokens in emitted:
            check(len(tokens or ()) < message.max_tokens, "emitted", "must be fewer than max_tokens")
            _check_token_ids(check, "emitted", tokens or (), model)
    check(len(message.stop_token_ids) <= MAX_STOP_TOKENS, "stop_token_ids", f"at most {MAX_STOP_TOKENS}")
    _check_token_ids(check, "stop_token_ids", message.stop_token_ids, model)
    check(message.sampling.HasField("seed"), "sampling.seed", "must be set")
    sampling = Sampling.of_message(message.sampling)
    found.found += sampling.violations(model.vocab_size)
    check(not sampling.bad_words, "sampling.bad_words", "must come in tokens, as bad_sequences")
    is_scored = sampling.prompt_logprobs is not None
    check(
        not (emitted and is_scored), "sampling.prompt_logprobs", "are told before the first token, not behind emitted"
    )
    bad_sequences = tuple(tuple(each.token_ids) for each in message.bad_sequences)
    problem = barred_too_much(
        bad_sequences,
        message.stop_token_ids if sampling.min_tokens else (),
        model.vocab_size,
        sampling.allowed_token_ids,
    )
    check(not problem, "bad_sequences", problem)
    if found.found:
        raise InvalidRequest.of_all(found.found)
    return EngineRequest(
        request_id=RequestId(message.request_id),
        tenant_id=TenantId(message.tenant_id),
        qos_class=QOS_CLASSES[message.qos_class],
        adapter_uid=key or None,
        prompt_token_ids=prompt,
        max_tokens=message.max_tokens,
        sampling=sampling,
        stop_token_ids=frozenset(message.stop_token_ids),
        n=message.n,
        emitted=emitted,
        bad_sequences=bad_sequences,
    )


def _check_token_ids(
    check: Callable[[bool, str, str], bool], field: str, token_ids: Sequence[int], model: ModelInfo
) -> None:
    largest = max(token_ids, default=0)
    check(largest < model.vocab_size, field, f"token {largest} is not in the vocabulary of {model.vocab_size}")


def tokens_frame(number: int, outputs: Iterable[TokenOutput]) -> worker_pb2.ExecuteResponse | None:
    """One entry a choice, in the order of their first appearance; None: no entry. Choices that were cut short have no
    finish reason: the request's outcome says why.
    """
    frame: worker_pb2.ExecuteResponse | None = None
    entries: dict[int, worker_pb2.ChoiceTokens] = {}
    for output in outputs:
        if output.prompt_logprobs:
            frame = frame or worker_pb2.ExecuteResponse(frame=number)
            for logprobs in output.prompt_logprobs:
                _fill(frame.tokens.prompt_logprobs.add(), logprobs)
            continue
        # None stands for what ends with the request and is told there.
        finish_reason = None if output.finish_reason is None else _FINISH_REASONS.get(output.finish_reason)
        entry = entries.get(output.choice)
        if entry is None:
            if not output.token_ids and finish_reason is None:
                continue
            if frame is None:
                frame = worker_pb2.ExecuteResponse(frame=number)
            entry = entries[output.choice] = frame.tokens.choices.add()
            entry.choice = output.choice
            entry.first_position = output.first_position
        entry.token_ids.extend(output.token_ids)
        for logprobs in output.logprobs:
            _fill(entry.logprobs.add(), logprobs)
        if finish_reason is not None:
            entry.finish_reason = finish_reason
        if output.stop_token_id is not None:
            entry.stop_token_id = output.stop_token_id
    return frame


def _fill(position: common_pb2.PositionLogprobs, logprobs: Logprobs) -> None:
    position.logprob, position.rank = logprobs.logprob, logprobs.rank
    for token_id, logprob in logprobs.top:
        position.top.add(token_id=token_id, logprob=logprob)


def execute_finished(end: StreamEnd, kv_block_bytes: int) -> worker_pb2.ExecuteFinished:
    message = "the worker is shutting down" if end.kind is EndKind.ABORTED else end.message
    finished = worker_pb2.ExecuteFinished(outcome=_OUTCOMES[end.kind], message=message)
    if end.request_end is not None:
        finished.cached_prompt_tokens = end.request_end.cached_prompt_tokens
        finished.prompt_tokens = end.request_end.prompt_tokens
        finished.output_tokens = end.request_end.output_tokens
        finished.adapter_wait_ms = end.request_end.adapter_wait_s * 1e3
        finished.prefill_ms = end.request_end.prefill_s * 1e3
        finished.decode_ms = end.request_end.decode_s * 1e3
        finished.swaps = end.request_end.num_swaps
        finished.evictions = end.request_end.num_evictions
        finished.kv_byte_seconds = end.request_end.kv_block_s * kv_block_bytes
        finished.adapter_byte_seconds = end.request_end.adapter_byte_s
    return finished


def coverage_message(coverage: Coverage) -> worker_pb2.AdapterCoverage:
    return worker_pb2.AdapterCoverage(
        modules=[worker_pb2.ChangedModule(path=module.path, rank=module.rank) for module in coverage.modules],
        layers=coverage.num_layers,
        tensors=coverage.num_tensors,
        tensors_left_out=coverage.num_left_out,
        left_out=coverage.left_out,
    )


def dedication_message(dedicated: Dedicated) -> worker_pb2.Dedication:
    owner, is_ready, problem = dedicated
    message = worker_pb2.Dedication(is_ready=is_ready, problem=problem)
    if owner is not None:
        message.adapter_uid, message.tenant_id = owner
    return message


def dedication_owner(message: worker_pb2.Dedicate) -> Owner | None:
    """Raises InvalidRequest."""
    if not message.adapter_uid:
        return None
    if not is_uid(message.adapter_uid):
        raise InvalidRequest.of("dedicate.adapter_uid", "is no adapter's")
    if problem := name_problem(message.tenant_id):
        raise InvalidRequest.of("dedicate.tenant_id", problem)
    if owner_of(AdapterUid(message.adapter_uid)) not in (None, message.tenant_id):
        raise InvalidRequest.of("dedicate.adapter_uid", "is another tenant's copy")
    return Owner(AdapterUid(message.adapter_uid), TenantId(message.tenant_id))
