"""What tokens cost their flow."""

from __future__ import annotations

PROMPT_TOKEN_COST = 1
OUTPUT_TOKEN_COST = 2
QUANTUM_TOKENS = 16  # after so many tokens of a sequence its slot is given anew
CHUNK_COST = 512  # of one full chunk of a prompt
