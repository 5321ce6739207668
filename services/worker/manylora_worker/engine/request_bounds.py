"""What a request may come to need, and whether this engine could ever give it. Changes nothing: any thread may ask."""

from __future__ import annotations

from manylora_shared.errors import InvalidRequest

from manylora_worker.kinds.api import EngineRequest
from manylora_worker.kinds.sequence import SequenceGroup
from manylora_worker.memory.tenant_shares import TenantShares


class RequestBounds:
    def __init__(
        self,
        max_context_tokens: int,
        sequence_slots: int,
        num_blocks: int,
        block_size: int,
        shares: TenantShares,
        *,
        longest_context_tokens: int = 0,
        state_blocks: int = 0,
    ) -> None:
        """longest_context_tokens: with an adapter, which may stretch the model's; by how much its router knows.
        state_blocks: of each sequence, beside those of its tokens.
        """
        self._max_context_tokens = max_context_tokens
        self._longest_context_tokens = max(max_context_tokens, longest_context_tokens)
        self._sequence_slots = sequence_slots
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._state_blocks = state_blocks
        self._shares = shares

    def check(self, request: EngineRequest) -> None:
        """
        Raises:
            InvalidRequest: the model never could run it.
            QuotaExceeded: its tenant's bounds never let it.
        """
        self.check_model(request)
        self._shares.check(request.tenant_id, self.longest_blocks(request), self._block_size)

    def check_model(self, request: EngineRequest) -> None:
        """Without the tenant's bounds."""
        num_prompt = len(request.prompt_token_ids)
        longest_emitted = max(map(len, filter(None, request.emitted)), default=0)
        num_start = num_prompt + longest_emitted
        assert num_prompt > 0
        assert len(request.emitted) in (0, request.n)
        assert not request.emitted or request.sampling.prompt_logprobs is None
        context_tokens = self._context_tokens(request)
        if num_start >= context_tokens:
            raise InvalidRequest.of(
                "prompt_token_ids",
                f"{num_start} tokens leave no room in the model's context of {context_tokens}",
            )
        if longest_emitted >= request.max_tokens:
            raise InvalidRequest.of("max_tokens", "must be greater than the number of emitted tokens of a choice")
        if request.n > self._sequence_slots:
            raise InvalidRequest.of(
                "n", f"{request.n} choices need as many slots, the worker has {self._sequence_slots}"
            )
        if self._state_blocks and request.n > 1 and request.sampling.prompt_logprobs is not None:
            raise InvalidRequest.of("n", "this model's choices compute the prompt each: not with prompt_logprobs")
        if self.longest_blocks(request) > self._num_blocks:
            capacity = max(0, self._num_blocks - self._state_blocks) * self._block_size
            longest = self._longest_tokens(request)
            raise InvalidRequest.of(
                "max_tokens", f"prompt and output are up to {longest + 1} tokens, the worker can hold {capacity}"
            )

    def max_output_tokens(self, request: EngineRequest) -> int:
        """Of one choice."""
        return min(request.max_tokens, self._context_tokens(request) - len(request.prompt_token_ids))

    def _context_tokens(self, request: EngineRequest) -> int:
        return self._max_context_tokens if request.adapter_uid is None else self._longest_context_tokens

    def longest_blocks(self, request: EngineRequest) -> int:
        """Of one choice."""
        return self._state_blocks + -(-self._longest_tokens(request) // self._block_size)

    def _longest_tokens(self, request: EngineRequest) -> int:
        """In KV, where a choice's last token never is."""
        return min(len(request.prompt_token_ids) + request.max_tokens, self._context_tokens(request)) - 1


def can_speculate(group: SequenceGroup) -> bool:
    """No draw depends on what was drawn before it, except through the KV."""
    request, sampling = group.request, group.request.sampling
    is_plain = not sampling.adjusts_logits and sampling.top_logprobs is None
    return is_plain and request.constraint is None and group.bars is None
