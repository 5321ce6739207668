"""What tokens cost their flow: the unit in which fair queuing counts, in the scheduler and in the workers alike."""

from __future__ import annotations

PROMPT_TOKEN_COST = 1
OUTPUT_TOKEN_COST = 2
"""Cost counts tokens that are really computed; an output token costs a whole pass over the weights."""
QUANTUM_TOKENS = 16
"""A decode quantum: after so many tokens of a sequence its slot is given anew."""
CHUNK_COST = 512
"""Of one full chunk of a prompt: the measure in which boosts are given."""
