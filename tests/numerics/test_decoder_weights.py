"""What is not read as a decoder of known parts."""

from __future__ import annotations

from manylora_worker.models.decoder_weights import read_decoder
from manylora_worker.models.loader import load_model

from tests.numerics.conftest import FamilyOf


def test_products_that_are_not_fused_are_not_read(family_of: FamilyOf) -> None:
    """As in 4 bits on the CPU: q's product alone is not that of q, k and v."""
    assert read_decoder(load_model(str(family_of("llama").folder), quantization="nf4")) is None
