"""What one rank of a worker with `--tensor-parallel` has of a model: cut as models/ranks/cuts.py of the worker cuts."""

from __future__ import annotations

from dataclasses import replace

from manylora.capacity.planning.parts import BadConfig, Cut, Parts, Product, check_kernels

_WIDTHS = 8  # an adapter's matrices of experts begin at multiples of it


def share_of(parts: Parts, ranks: int) -> Parts:
    """The first rank's. `vocab` is what it has of the output head. Raises BadConfig where the worker refuses it."""
    option = f"--tensor-parallel {ranks}"
    odd = [f"{name} {count}" for name, count in parts.counts if count % ranks]
    odd += [f"{name} {width} into multiples of {_WIDTHS}" for name, width in parts.widths if width % (ranks * _WIDTHS)]
    if odd:
        raise BadConfig(f"{option}: does not divide {' and '.join(odd)}")
    share = replace(
        parts,
        vocab=-(-parts.vocab // ranks),
        products=[_cut(each, ranks) for each in parts.products],
        cut_others=parts.cut_others // ranks,
        token_kv=parts.token_kv // ranks,
        state=(parts.state - parts.whole_state) // ranks + parts.whole_state,
        experts=[_cut(each, ranks) for each in parts.experts],
    )
    check_kernels(share)
    return share


def _cut(product: Product, ranks: int) -> Product:
    if product.cut is Cut.OUTPUTS:
        return replace(product, outputs=(product.outputs - product.on_each) // ranks + product.on_each)
    return replace(product, inputs=product.inputs // ranks) if product.cut is Cut.INPUTS else product
