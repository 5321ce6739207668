"""What transformers answers greedily where a constraint's mask bars the rest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from manylora_shared.constraints.constraint import Constraint
from manylora_shared.constraints.grammar import LIMITS, grammar_of
from transformers import AutoModelForCausalLM, AutoTokenizer


class MaskedOracle:
    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ends = self._model.generation_config.eos_token_id
        self._ends = [ends] if isinstance(ends, int) else list(ends)
        self._words = LLTokenizer(
            self.tokenizer.backend_tokenizer.to_str(), n_vocab=self._model.config.vocab_size, eos_token=self._ends
        )

    def greedy(self, prompt: str, constraint: Constraint, count: int) -> tuple[list[int], bool]:
        """The tokens, and whether they ended by themselves."""
        prompt_ids: Sequence[int] = self.tokenizer(prompt)["input_ids"]
        matcher, output = LLMatcher(self._words, grammar_of(constraint), limits=LIMITS), list[int]()
        while len(output) < count:
            if matcher.is_stopped():
                return output, True
            with torch.no_grad():
                logits = self._model(torch.tensor([[*prompt_ids, *output]])).logits[0, -1].float().numpy()
            bits = np.unpackbits(
                np.frombuffer(matcher.compute_bitmask(), np.uint8), count=len(logits), bitorder="little"
            )
            token = int(np.where(bits == 1, logits, -np.inf).argmax())
            if token in self._ends:
                return output, True
            assert matcher.consume_token(token)
            output.append(token)
        return output, False
