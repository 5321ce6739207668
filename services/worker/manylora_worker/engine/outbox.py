"""What the engine has to tell: tokens and ends of choices in order, then ends of requests. EngineCore writes it."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from manylora_shared.ids import RequestId

from manylora_worker.kinds.api import FinishReason, Logprobs, Sampled, TokenOutput
from manylora_worker.kinds.sequence import GroupTimes, Sequence, SequenceGroup

_CUT_SHORT = (
    FinishReason.ABORTED,
    FinishReason.ADAPTER_FAILED,
    FinishReason.ADAPTER_UNAVAILABLE,
    FinishReason.ERROR,
)


@dataclass(frozen=True)
class RequestEnd:
    """Comes after its last output."""

    request_id: RequestId
    reason: FinishReason  # STOP where all choices ended by themselves, else why the request was cut short
    message: str
    cached_prompt_tokens: int  # found in the cache at the first admission
    prompt_tokens: int  # computed, or found in the cache
    output_tokens: int  # drawn over all choices, told or not
    num_swaps: int  # of its sequences to host memory
    num_evictions: int  # its sequences lost their blocks and were computed again
    times: GroupTimes
    ended_s: float
    kv_block_s: float = 0.0  # of the device, over all choices
    adapter_byte_s: float = 0.0  # of the device, its share of what others used too
    by_length: bool = False  # that is how some choice ended

    @classmethod
    def of(cls, group: SequenceGroup, reason: FinishReason, message: str, now: float) -> RequestEnd:
        """reason: of the choice that ended last."""
        return cls(
            request_id=group.request.request_id,
            reason=reason if reason in _CUT_SHORT else FinishReason.STOP,
            message=message,
            cached_prompt_tokens=group.cached_prompt_tokens or 0,
            prompt_tokens=group.num_prompt_tokens_computed,
            output_tokens=group.num_drawn_tokens,
            num_swaps=group.num_swaps,
            num_evictions=group.num_evictions,
            times=group.times,
            ended_s=now,
            by_length=any(sequence.finish_reason is FinishReason.LENGTH for sequence in group.sequences),
        )

    @property
    def adapter_wait_s(self) -> float:
        ready_s = self.times.adapter_ready_s
        return (self.ended_s if ready_s is None else ready_s) - self.times.added_s

    @property
    def prefill_s(self) -> float:
        """From its first step to its first token."""
        if self.times.first_step_s is None:
            return 0.0
        first_token_s = self.times.first_token_s
        return (self.ended_s if first_token_s is None else first_token_s) - self.times.first_step_s

    @property
    def decode_s(self) -> float:
        return 0.0 if self.times.first_token_s is None else self.ended_s - self.times.first_token_s


class Outbox:
    def __init__(self) -> None:
        self._outputs: list[TokenOutput] = []
        self._ended: list[RequestEnd] = []

    def token(self, sequence: Sequence, sampled: Sampled, position: int, *, is_last: bool) -> None:
        """position: in the choice's output. is_last: it ends, by LENGTH."""
        self._outputs.append(
            TokenOutput(
                request_id=sequence.group.request.request_id,
                choice=sequence.choice,
                first_position=position,
                token_ids=(sampled.token_id,),
                logprobs=() if sampled.logprobs is None else (sampled.logprobs,),
                finish_reason=FinishReason.LENGTH if is_last else None,
            )
        )

    def prompt_scored(self, group: SequenceGroup, scored: SequenceOf[Logprobs]) -> None:
        """Of the prompt's next tokens."""
        self._outputs.append(TokenOutput(group.request.request_id, 0, 0, (), prompt_logprobs=scored))

    def choice_ended(
        self, sequence: Sequence, reason: FinishReason, *, message: str = "", stop_token_id: int | None = None
    ) -> None:
        """Without a further token."""
        self._outputs.append(
            TokenOutput(
                request_id=sequence.group.request.request_id,
                choice=sequence.choice,
                first_position=len(sequence.output_token_ids),
                token_ids=(),
                finish_reason=reason,
                message=message,
                stop_token_id=stop_token_id,
            )
        )

    def request_ended(self, end: RequestEnd) -> None:
        self._ended.append(end)

    def take_outputs(self) -> list[TokenOutput]:
        """In order."""
        taken, self._outputs = self._outputs, []
        return taken

    def take_ended(self) -> list[RequestEnd]:
        taken, self._ended = self._ended, []
        return taken
