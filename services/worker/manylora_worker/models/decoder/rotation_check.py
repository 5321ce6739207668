"""Whether an adapter's own rotation can be computed, asked where adapters are read."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

from manylora_shared.stores.adapter_rope import RopeScaling


@dataclass(frozen=True)
class RotationCheck:
    """Readers of adapters have it, and import transformers only where an adapter rotates."""

    config: bytes  # the base model's, of the text part, pickled

    def __call__(self, scaling: RopeScaling) -> str:
        """The problem; empty: there is none. In a step it would be everybody's."""
        import torch

        from manylora_worker.models.rope import scaled_frequencies

        try:
            frequencies, scale = scaled_frequencies(pickle.loads(self.config), scaling, torch.device("cpu"))
        except Exception as error:  # transformers' own arithmetic, with numbers that a tenant wrote
            return f"gives no frequencies: {type(error).__name__}: {str(error)[:200]}"
        found = torch.cat((frequencies, torch.tensor([scale])))  # the scale, too, becomes a 32-bit float
        return "" if found.isfinite().all() else "gives frequencies that are not finite"
