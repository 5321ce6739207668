"""Frames as messages of inference.proto, and back."""

from __future__ import annotations

from collections.abc import Sequence

from manylora.v1 import inference_pb2

from manylora_router.request.frames import ChoiceEnd, Degraded, Delta, Finished, Frame, Started


def message_of(frame: Frame) -> inference_pb2.GenerateResponse:
    message = inference_pb2.GenerateResponse(frame=frame.number)
    if (started := frame.started) is not None:
        told = message.started
        told.request_id = started.request_id
        told.adapter = started.adapter
        told.adapter_version = started.adapter_version
        told.seed = started.seed
        told.prompt_tokens = len(started.prompt_token_ids)
        told.resume_token = started.resume_token
        if started.degraded is not None:
            told.degraded.CopyFrom(_degraded(started.degraded))
    message.prompt_logprobs.extend(frame.prompt_logprobs)
    if (new := frame.delta) is not None:
        # Made in its frame: a message that is given to another is copied.
        delta = message.delta
        delta.choice = new.choice
        delta.first_position = new.first_position
        delta.token_ids.extend(new.token_ids)
        delta.text = new.text
        if new.logprobs:
            delta.logprobs.extend(new.logprobs)
    if frame.finished is not None:
        message.finished.CopyFrom(_finished(frame.finished))
    return message


def _finished(finished: Finished) -> inference_pb2.Finished:
    return inference_pb2.Finished(
        outcome=finished.outcome,
        choices=[_choice_end(end) for end in finished.choices],
        usage=finished.usage,
        timings=finished.timings,
        worker_id=finished.worker_id,
        degraded=_degraded(finished.degraded) if finished.degraded is not None else None,
    )


def _choice_end(end: ChoiceEnd) -> inference_pb2.ChoiceEnd:
    return inference_pb2.ChoiceEnd(
        choice=end.choice,
        finish_reason=end.finish_reason,
        stop_string=end.stop_string,
        stop_token_id=end.stop_token_id,
    )


def _degraded(degraded: Degraded) -> inference_pb2.Degraded:
    return inference_pb2.Degraded(
        max_tokens=degraded.max_tokens,
        asked_max_tokens=degraded.asked_max_tokens,
        overload_level=degraded.overload_level,
        pool=degraded.pool,
        asked_pool=degraded.asked_pool,
        not_streamed=degraded.not_streamed,
    )


def frame_of(message: inference_pb2.GenerateResponse, prompt_token_ids: Sequence[int]) -> Frame:
    """As another router told it; of the tenant's quotas it tells nothing."""
    frame = Frame(message.frame, prompt_logprobs=message.prompt_logprobs)
    if message.HasField("started"):
        told = message.started
        frame.started = Started(
            request_id=told.request_id,
            adapter=told.adapter,
            adapter_version=told.adapter_version,
            seed=told.seed,
            prompt_token_ids=prompt_token_ids,
            degraded=_read_degraded(told),
            resume_token=told.resume_token,
        )
    if message.HasField("delta"):
        new = message.delta
        frame.delta = Delta(new.choice, new.first_position, new.token_ids, new.text, new.logprobs)
    if message.HasField("finished"):
        last = message.finished
        ends = [_read_choice_end(end) for end in last.choices]
        frame.finished = Finished(last.outcome, ends, last.usage, last.timings, last.worker_id, _read_degraded(last))
    return frame


def _read_degraded(told: inference_pb2.Started | inference_pb2.Finished) -> Degraded | None:
    if not told.HasField("degraded"):
        return None
    degraded = told.degraded
    return Degraded(
        degraded.max_tokens,
        degraded.asked_max_tokens,
        degraded.overload_level,
        degraded.pool,
        degraded.asked_pool,
        degraded.not_streamed,
    )


def _read_choice_end(end: inference_pb2.ChoiceEnd) -> ChoiceEnd:
    return ChoiceEnd(
        end.choice,
        end.finish_reason,
        end.stop_string if end.HasField("stop_string") else None,
        end.stop_token_id if end.HasField("stop_token_id") else None,
    )
