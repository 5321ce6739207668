"""What tokens cost their flow, in the scheduler and in the workers alike."""

from __future__ import annotations

PROMPT_TOKEN_COST = 1
OUTPUT_TOKEN_COST = 2
QUANTUM_TOKENS = 16
"""After so many tokens of a sequence its slot is given anew."""
CHUNK_COST = 512
"""Of one full chunk of a prompt: the measure in which boosts are given."""
