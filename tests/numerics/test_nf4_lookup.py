"""The lookup of codes, by executing its PTX: Triton's interpreter cannot."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: it comes with CUDA builds of torch")

from manylora_worker.models.cuda.kernels import nf4_format, nf4_lookup
from manylora_worker.models.cuda.kernels.int4_product import VALUE_BITS, VALUES

pytestmark = pytest.mark.kernels


def run_ptx(asm: str, inputs: dict[str, int]) -> dict[str, int]:
    """Executes the straight-line integer PTX of the lookup; floating-point lines are left to the caller."""
    values = dict(inputs)

    def value(operand: str) -> int:
        return int(operand, 16) if operand.startswith("0x") else int(operand) if operand.isdigit() else values[operand]

    def permute(a: int, b: int, selector: int) -> int:
        source = (a | b << 32).to_bytes(8, "little")
        nibbles = [selector >> 4 * i & 0xF for i in range(4)]
        chosen = [source[n & 7] if n < 8 else 0xFF * (source[n & 7] >> 7) for n in nibbles]
        return int.from_bytes(bytes(chosen), "little")

    for line in asm.strip("{} ").split(";"):
        name, _, rest = line.strip().partition(" ")
        operands = re.findall(r"[$\w]+", rest)
        target, *sources = operands or [""]
        if name == "and.b32":
            values[target] = value(sources[0]) & value(sources[1])
        elif name == "shr.b32":
            values[target] = value(sources[0]) >> value(sources[1])
        elif name == "lop3.b32":
            assert value(sources[3]) == 0xEA
            values[target] = value(sources[0]) & value(sources[1]) | value(sources[2])
        elif name == "prmt.b32":
            values[target] = permute(*(value(source) for source in sources))
        elif name == "mov.b32":
            low, high, source = operands
            values[low], values[high] = value(source) & 0xFFFF, value(source) >> 16
        else:
            assert name in ("", ".reg", "cvt.rn.bf16x2.f32", "mul.rn.bf16x2"), name
    return values


@pytest.mark.parametrize("seed", range(40))
def test_the_lookup_in_ptx(seed: int) -> None:
    codes = torch.randint(16, (8,), generator=torch.Generator().manual_seed(seed)).tolist()
    packed = bytes(high << 4 | low for high, low in zip(codes[::2], codes[1::2], strict=True))
    word = int.from_bytes(packed, "little")
    registers = [f"${9 + i}" for i in range(4)]
    inputs = {"$8": word, **dict(zip(registers, nf4_lookup.register_words(nf4_lookup.REPEATED_BITS), strict=True))}
    bits = run_ptx(nf4_lookup._floats_asm(), inputs)
    floats = torch.tensor([bits[f"${i}"] for i in range(8)], dtype=torch.int64).to(torch.int32).view(torch.float32)
    assert floats.tolist() == [nf4_lookup.REDUCTION_CODEBOOK[code] for code in codes]
    for entries, values in ((nf4_lookup.PAIR_BITS, nf4_format.CODEBOOK), (VALUE_BITS, VALUES)):
        inputs.update(zip(registers, nf4_lookup.register_words(entries), strict=True))
        bits = run_ptx(nf4_lookup.scaled_pairs_asm(entries), inputs)
        pairs = torch.tensor([bits[f"${i}"] for i in range(8)], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        assert torch.equal(pairs, torch.tensor(values)[codes].bfloat16())
        words = dict(zip(("$5", "$9", "$13", "$17"), nf4_lookup.register_words(entries), strict=True))
        bits = run_ptx(nf4_lookup.bytes_asm(entries), {"$4": word, **words})
        of_bytes = torch.tensor([bits[f"${i}"] >> shift & 0xFFFF for i in range(4) for shift in (0, 16)])
        in_order = [*codes[::2], *codes[1::2]]  # high bits are the first of a byte
        assert torch.equal(of_bytes.to(torch.int16).view(torch.bfloat16), torch.tensor(values)[in_order].bfloat16())
    bits = run_ptx(nf4_lookup._INTEGERS_ASM.value, {"$4": word})
    of_bytes = torch.tensor([bits[f"${i}"] >> shift & 0xFFFF for i in range(4) for shift in (0, 16)])
    integers = of_bytes.to(torch.int16).view(torch.bfloat16).tolist()
    assert integers == [128.0 + code for code in [*codes[::2], *codes[1::2]]]


def test_the_reductions_codebook_is_within_half_a_step_of_bf16() -> None:
    for value, used in zip(nf4_format.CODEBOOK, nf4_lookup.REDUCTION_CODEBOOK, strict=True):
        assert abs(used - value) <= abs(value) * 2**-8
