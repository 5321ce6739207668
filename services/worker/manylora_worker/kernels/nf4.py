"""Products with a weight kept in 4 bits (NF4, as bitsandbytes stores it), and the weight's quantization.

Owns the format: codes of 4 bits, two a byte with the first in the high nibble, one scale (absmax) a block of 64 inputs.
bitsandbytes keeps the scales in 8 bits again (a dynamic map of 256 values, blocks of 256 with a float32 scale, one
offset). We undo that once at load: 4.5 bits a weight instead of 4.13, 0.33 GB more for the 7 G weights of an 8B model,
and no dependent load in the kernels. The float32 scale is the very number that bitsandbytes computes.

The ways to a product. The first rounds the code values to bf16 and nothing else, the second to 8 bits of significand,
the third rounds code value, scale and their product to bf16, the fourth has the weight as bitsandbytes has it:

| rows | way | why |
|---|---|---|
| 1 .. 32 on Hopper | nf4_rows.py, in CUDA C++ | a table in shared memory, which Triton cannot address |
| 1 .. REDUCTION_ROWS | `_reduction_kernel`: dot-free, lanes along the inputs | only loads, lookups and FMA |
| .. FUSED_ROWS | `_product_kernel`: weights rebuilt for the tensor cores, split along the inputs | x is shared |
| more | `dequantize` to bf16, then an ordinary product | the weight is rebuilt once, not once a tile of rows |

The lookup is what such a kernel spends its time on. A step at half of bf16's time reads 3 TB/s of codes, 6e12
weights/s, or 26 a clock on each of 132 multiprocessors at 1.75 GHz, where integer units give 64 lane operations a
clock: 2.5 an element. What the ways cost there, an element:

- a tree of selects: 15, and the bits to select by;
- tl.gather: a shuffle, or a round trip through shared memory, at 32 lanes a clock: 1 and its address (2 integer);
- a load from a 64-byte table: 16 entries in 16 banks of one L1 line, so free of conflicts, at 32 lanes a clock: 1,
  and 2 integer operations for the address;
- byte permutes: a register pair holds 8 table bytes and `prmt` picks 4 of them at once. 16 entries of 2 bytes need 3
  permutes (lower half, upper half, choice by bit 3) for each byte of 4 results, then 2 to interleave the bytes: 21
  operations for 8 elements with all masks, 2.6 an element, and no memory pipe. With float32 results 25, or 3.1.

So `prmt` it is, here. Triton's interpreter cannot run PTX and takes the loads. With all that belongs to it an element
takes 3.3 integer operations of one row's 5.2, so a multiprocessor does about 19 a clock: 2.3 TB/s of codes, 1.5 ms for
7 G weights, where the memory alone would take 0.9 ms.

Source of the format: Dettmers et al., "QLoRA", 2023, section 3; the maps as bitsandbytes 0.50 computes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from triton import knobs

from manylora_worker.kernels.nf4_rows import Nf4Rows

BLOCK_SIZE = 64
"""Weights that share a scale."""
NESTED_BLOCK_SIZE = 256
"""Scales that share a scale of their own, in bitsandbytes' storage."""

REDUCTION_ROWS = 4
"""A row costs the reduction one FMA a weight; the tensor cores take up to 16 for nothing. Measured on an H200: the
reduction is ahead up to four rows."""
FUSED_ROWS = 64
"""Above, the weight is rebuilt whole. On an H200 that alone takes longer than the fused product of 64 rows."""

# fmt: off
CODEBOOK = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on
"""The 16 values of NF4 (exact in float32), ascending."""

_WORDS = BLOCK_SIZE // 8
"""32-bit words of codes a block."""


def dynamic_map() -> Tensor:
    """[256] float32, ascending: the signed dynamic map of 8-bit scales (7 exponent bits at most), as bitsandbytes
    builds it.

    Dettmers, "8-bit approximations for parallelism in deep learning", 2015, section 2.
    """
    values: list[float] = []
    for i in range(7):
        boundaries = torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32)
        means = ((boundaries[:-1] + boundaries[1:]) / 2.0) * 10 ** (i - 6)
        values += means.tolist()
        values += (-means).tolist()
    return torch.tensor(sorted([*values, 0.0, 1.0]), dtype=torch.float32)


@dataclass(frozen=True)
class Nf4Weight:
    """A weight [out_features, in_features]; in_features is a multiple of 64.

    Attributes:
        codes: [out_features, in_features / 2] uint8, contiguous; the element with even index in the high nibble.
        absmax: [out_features, in_features / 64] float32, contiguous.
    """

    codes: Tensor
    absmax: Tensor

    def __post_init__(self) -> None:
        rows, half = self.codes.shape
        assert self.codes.dtype == torch.uint8
        assert self.codes.is_contiguous()
        assert half * 2 % BLOCK_SIZE == 0
        assert self.absmax.shape == (rows, half * 2 // BLOCK_SIZE)
        assert self.absmax.dtype == torch.float32
        assert self.absmax.is_contiguous()

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1] * 2

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.absmax.nbytes


def nested_absmax(
    codes: Tensor, scales: Tensor, code_map: Tensor, offset: Tensor, block_size: int = NESTED_BLOCK_SIZE
) -> Tensor:
    """[blocks] float32 scales out of their 8-bit codes: map[code] * scale + offset, two roundings as in
    bitsandbytes."""
    values = code_map[codes.reshape(-1).long()]
    wide = scales.repeat_interleave(block_size)[: values.numel()]
    return values.mul_(wide).add_(offset)


def quantize(weight: Tensor, *, double: bool = True) -> Nf4Weight:
    """Quantizes [out, in] of any float type; codes and scales are those of bitsandbytes' Linear4bit.

    Args:
        double: round the scales to 8 bits as Linear4bit's `compress_statistics` does; the kept ones are float32 anyway.
            Their offset is a mean, whose last bit depends on the device's order of summation.

    Raises:
        ValueError: the inputs are no multiple of 64.
    """
    out_features, in_features = weight.shape
    _check_in_features(in_features)
    blocks = weight.detach().float().reshape(-1, BLOCK_SIZE)
    absmax = blocks.abs().amax(dim=-1)
    scaled = blocks.mul(1.0 / absmax.clamp(min=1e-38)[:, None]).clamp_(-1, 1)
    codebook = torch.tensor(CODEBOOK, device=weight.device)
    indices = torch.bucketize(scaled, (codebook[:-1] + codebook[1:]) / 2, out_int32=True).to(torch.uint8)
    codes = (indices[:, ::2] << 4) | indices[:, 1::2]
    if double:
        offset = absmax.mean()
        absmax = nested_absmax(*_quantize_scales(absmax - offset), offset)
    return Nf4Weight(
        codes.reshape(out_features, in_features // 2).contiguous(),
        absmax.reshape(out_features, in_features // BLOCK_SIZE).contiguous(),
    )


def _quantize_scales(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(8-bit codes, float32 scale a block of 256, the map) of a vector."""
    code_map = dynamic_map().to(values.device)
    padding = -values.numel() % NESTED_BLOCK_SIZE
    blocks = F.pad(values, (0, padding)).reshape(-1, NESTED_BLOCK_SIZE)
    scales = blocks.abs().amax(dim=-1)
    scaled = blocks.mul(1.0 / scales.clamp(min=1e-38)[:, None]).clamp_(-1, 1)
    codes = torch.bucketize(scaled, (code_map[:-1] + code_map[1:]) / 2, out_int32=True)
    return codes.reshape(-1)[: values.numel()].to(torch.uint8), scales, code_map


def _check_in_features(in_features: int) -> None:
    if in_features % BLOCK_SIZE:
        raise ValueError(f"{in_features} inputs: a row must be whole blocks of {BLOCK_SIZE}")


def dequantize_reference(weight: Nf4Weight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[out, in] in plain torch: code value times scale in float32, rounded once. The oracle of the kernels."""
    codebook = torch.tensor(CODEBOOK, device=weight.codes.device)
    indices = torch.stack([weight.codes >> 4, weight.codes & 0xF], dim=-1)
    values = codebook[indices.reshape(-1, BLOCK_SIZE).long()] * weight.absmax.reshape(-1, 1)
    return values.to(dtype).reshape(weight.out_features, weight.in_features)


# ---- the lookup


def _bf16_bits(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32).bfloat16().view(torch.int16).item()) & 0xFFFF


def _repeated_bits(value: float) -> int:
    """The 16 bits 'hi lo' for which the float32 'hi lo lo lo' is nearest to the value: one permute then makes a
    float32."""
    near = _bf16_bits(value)
    candidates = [bits for bits in (near - 1, near, near + 1) if 0 <= bits <= 0xFFFF and bits >> 15 == near >> 15]
    return min(candidates, key=lambda bits: abs(_repeated_value(bits) - value)) if value else 0


def _repeated_value(bits: int) -> float:
    low = bits & 0xFF
    word = bits << 16 | low << 8 | low
    return float(torch.tensor(word - (1 << 32) if word >> 31 else word, dtype=torch.int32).view(torch.float32).item())


PAIR_BITS = tuple(_bf16_bits(value) for value in CODEBOOK)
REPEATED_BITS = tuple(_repeated_bits(value) for value in CODEBOOK)
REDUCTION_CODEBOOK = tuple(_repeated_value(bits) for bits in REPEATED_BITS)
"""What `_reduction_kernel` multiplies by: within half a bf16 step of the codebook."""


def _table_words(entries: tuple[int, ...], shift: int) -> list[int]:
    """Four 32-bit words with byte `shift / 8` of the 16 entries."""
    chosen = [entry >> shift & 0xFF for entry in entries]
    return [sum(chosen[4 * word + i] << 8 * i for i in range(4)) for word in range(4)]


def _lookup_asm(entries: tuple[int, ...], word: str, registers: tuple[str, ...]) -> list[str]:
    """PTX that looks 8 codes up: low bytes into l0, l1 and high bytes into h0, h1, in the order of the word's nibbles.

    `prmt` takes a byte's number in 3 bits of a nibble; bit 3 of the nibble must be clear (else it copies signs).
    Bit 3 of the code chooses between both halves of the table: result byte i comes from byte i or byte 4 + i. The
    instruction takes one immediate, so every second table word comes in a register (`_register_words`); as
    constants the assembler would load them anew for each permute.
    """
    lines = [
        ".reg .b32 m0, m1, s0, s1, p, q, l0, l1, h0, h1;",
        f"and.b32 m0, {word}, 0x77777777;",
        f"shr.b32 s0, {word}, 1;",
        "lop3.b32 s0, s0, 0x44444444, 0x32103210, 0xea;",  # (a & b) | c
        "shr.b32 m1, m0, 16;",
        "shr.b32 s1, s0, 16;",
    ]
    for half in (0, 1):
        for i, (name, shift) in enumerate((("l", 0), ("h", 8))):
            table = _table_words(entries, shift)
            lines += [
                f"prmt.b32 p, {registers[2 * i]}, {table[1]:#010x}, m{half};",
                f"prmt.b32 q, {registers[2 * i + 1]}, {table[3]:#010x}, m{half};",
                f"prmt.b32 {name}{half}, p, q, s{half};",
            ]
    return lines


def _register_words(entries: tuple[int, ...]) -> list[int]:
    low, high = _table_words(entries, 0), _table_words(entries, 8)
    return [low[0], low[2], high[0], high[2]]


# Little-endian words and high nibble first: element e of a word is nibble e ^ 1.
_PAIR_SELECTORS = (0x4051, 0x6273)
_FLOAT_SELECTORS = (0x5111, 0x4000, 0x7333, 0x6222)


def _floats_asm() -> str:
    """$0..$7: 8 float32 of the word $8; $9..$12 table words."""
    lines = _lookup_asm(REPEATED_BITS, "$8", ("$9", "$10", "$11", "$12"))
    lines += [f"prmt.b32 ${e}, l{e // 4}, h{e // 4}, {_FLOAT_SELECTORS[e % 4]:#06x};" for e in range(8)]
    return "{ " + " ".join(lines) + " }"


def _scaled_pairs_asm() -> str:
    """$0..$7: 8 bf16 of the word $8, multiplied by $13 (float32, rounded to bf16 first); $9..$12 table words."""
    lines = [".reg .b32 r, scale;", "cvt.rn.bf16x2.f32 scale, $13, $13;"]
    lines += _lookup_asm(PAIR_BITS, "$8", ("$9", "$10", "$11", "$12"))
    for pair in range(4):
        half = pair // 2
        lines.append(f"prmt.b32 r, l{half}, h{half}, {_PAIR_SELECTORS[pair % 2]:#06x};")
        lines.append("mul.rn.bf16x2 r, r, scale;")
        lines.append(f"mov.b32 {{${2 * pair}, ${2 * pair + 1}}}, r;")
    return "{ " + " ".join(lines) + " }"


FLOATS_ASM = tl.constexpr(_floats_asm())
FLOATS_CONSTRAINTS = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 5))
PAIRS_ASM = tl.constexpr(_scaled_pairs_asm())
PAIRS_CONSTRAINTS = tl.constexpr(",".join(["=h"] * 8 + ["r"] * 6))


@triton.jit
def _table_values(words, table_ptr):
    """Eight tensors of table entries, by element, for a tensor of words."""
    return (
        tl.load(table_ptr + ((words >> 4) & 15)),
        tl.load(table_ptr + (words & 15)),
        tl.load(table_ptr + ((words >> 12) & 15)),
        tl.load(table_ptr + ((words >> 8) & 15)),
        tl.load(table_ptr + ((words >> 20) & 15)),
        tl.load(table_ptr + ((words >> 16) & 15)),
        tl.load(table_ptr + ((words >> 28) & 15)),
        tl.load(table_ptr + ((words >> 24) & 15)),
    )


@triton.jit
def _interleave(v0, v1, v2, v3, v4, v5, v6, v7):
    """[..., 2, 2, 2] whose last three dimensions are the element's number in binary."""
    return tl.join(
        tl.join(tl.join(v0, v4), tl.join(v2, v6)),
        tl.join(tl.join(v1, v5), tl.join(v3, v7)),
    )


@triton.jit
def _to_bf16(values, INTERPRETED: tl.constexpr):
    """To nearest even, for finite values. Triton's interpreter truncates, so there the bits are rounded by hand."""
    if INTERPRETED:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return values.to(tl.bfloat16)


# ---- dequantize


@triton.jit
def _dequantize_kernel(
    words_ptr, absmax_ptr, table_ptr, out_ptr, num_blocks, BLOCKS: tl.constexpr, INTERPRETED: tl.constexpr
):
    """out: num_blocks blocks of 64 bf16. The product of code value and scale is float32's, rounded once."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    kept = block < num_blocks
    word = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    words = tl.load(words_ptr + word, mask=kept[:, None], other=0)
    absmax = tl.load(absmax_ptr + block, mask=kept, other=0.0)
    v0, v1, v2, v3, v4, v5, v6, v7 = _table_values(words, table_ptr)
    values = _interleave(v0, v1, v2, v3, v4, v5, v6, v7).reshape(BLOCKS, 64)
    values = _to_bf16(values * absmax[:, None], INTERPRETED)
    element = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(out_ptr + element, values, mask=kept[:, None])


# ---- a few rows: a reduction


@triton.jit
def _reduction_kernel(
    x_ptr, words_ptr, absmax_ptr, table_ptr, lookup_ptr, bias_ptr, y_ptr,
    num_rows, out_features, num_words,
    ROWS: tl.constexpr, OUTS: tl.constexpr, WORDS: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """y[row, out] for OUTS outputs and all rows. x: [num_rows, num_words * 8], contiguous.

    A lane holds single words (a warp 128 bytes of a load) of OUTS outputs: all their loads are in flight at once,
    and its part of x, loaded once for them, is what a plain load of x leaves with it. With four words a lane
    every value would cross shared memory. A scale enters once a word, after its 8 products.
    """
    out = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    out_kept = out < out_features
    row = tl.arange(0, ROWS)
    row_kept = row < num_rows
    safe_out = tl.minimum(out, out_features - 1)
    safe_row = tl.minimum(row, num_rows - 1)
    word_rows = words_ptr + safe_out.to(tl.int64)[:, None] * num_words
    scale_rows = absmax_ptr + safe_out.to(tl.int64)[:, None] * (num_words // 8)
    sums = tl.zeros((ROWS, OUTS, WORDS), tl.float32)
    if not INTERPRETED:
        lookup0 = tl.load(lookup_ptr)
        lookup1 = tl.load(lookup_ptr + 1)
        lookup2 = tl.load(lookup_ptr + 2)
        lookup3 = tl.load(lookup_ptr + 3)
    for first in range(0, num_words, WORDS):
        word = first + tl.arange(0, WORDS)
        # Hints: an unknown alignment makes it one word a lane; "contiguous" gives the scales' loads the same lanes.
        at = tl.multiple_of(tl.broadcast_to(word[None, :], (OUTS, WORDS)), (1, 1))
        scale_at = tl.max_contiguous(tl.multiple_of(at >> 3, (1, 1)), (1, WORDS))
        element = first * 8 + tl.arange(0, WORDS * 8)
        x_at = x_ptr + safe_row[:, None] * (num_words * 8) + element[None, :]
        if EVEN:
            words = tl.load(word_rows + at)
            absmax = tl.load(scale_rows + scale_at)
            x = tl.load(x_at)
        else:
            words = tl.load(word_rows + at, mask=at < num_words, other=0)
            absmax = tl.load(scale_rows + scale_at, mask=at < num_words, other=0.0)
            x = tl.load(x_at, mask=(element < num_words * 8)[None, :], other=0.0)
        even, odd = tl.split(x.to(tl.float32).reshape(ROWS, 1, WORDS, 2, 2, 2))
        x04, x26 = tl.split(even)
        x15, x37 = tl.split(odd)
        x0, x4 = tl.split(x04)
        x2, x6 = tl.split(x26)
        x1, x5 = tl.split(x15)
        x3, x7 = tl.split(x37)
        words = words[None]
        if INTERPRETED:
            v0, v1, v2, v3, v4, v5, v6, v7 = _table_values(words, table_ptr)
        else:
            v0, v1, v2, v3, v4, v5, v6, v7 = tl.inline_asm_elementwise(
                FLOATS_ASM, FLOATS_CONSTRAINTS, [words, lookup0, lookup1, lookup2, lookup3],
                dtype=(
                    tl.float32, tl.float32, tl.float32, tl.float32,
                    tl.float32, tl.float32, tl.float32, tl.float32,
                ),
                is_pure=True, pack=1,
            )  # fmt: skip
        part = v0 * x0 + v1 * x1 + v2 * x2 + v3 * x3 + v4 * x4 + v5 * x5 + v6 * x6 + v7 * x7
        sums += part * absmax[None]
    y = tl.sum(sums, axis=2)
    if HAS_BIAS:
        y += tl.load(bias_ptr + out, mask=out_kept, other=0.0).to(tl.float32)[None, :]
    at = row[:, None] * out_features + out[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=row_kept[:, None] & out_kept[None, :])


# ---- up to 64 rows: tensor cores


@triton.jit
def _product_kernel(
    x_ptr, words_ptr, absmax_ptr, table_ptr, lookup_ptr, bias_ptr, y_ptr, parts_ptr, arrivals_ptr,
    num_rows, out_features, num_blocks, blocks_per_split,
    ROWS: tl.constexpr, OUTS: tl.constexpr, BLOCKS: tl.constexpr, SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """y[row, out] for OUTS outputs and all rows; program (tile of outputs, split of the inputs).

    With splits, each program leaves its part in parts_ptr [SPLITS, num_rows, out_features] and counts itself in
    arrivals_ptr [tiles]; the last one adds the parts up, always in the same order, and sets the count back to zero.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    out = tile * OUTS + tl.arange(0, OUTS)
    out_kept = out < out_features
    row = tl.arange(0, ROWS)
    row_kept = row < num_rows
    safe_out = tl.minimum(out, out_features - 1)
    end = tl.minimum(num_blocks, (split + 1) * blocks_per_split)
    wide = safe_out.to(tl.int64)[:, None, None] * num_blocks
    sums = tl.zeros((ROWS, OUTS), tl.float32)
    if not INTERPRETED:
        lookup0 = tl.load(lookup_ptr)
        lookup1 = tl.load(lookup_ptr + 1)
        lookup2 = tl.load(lookup_ptr + 2)
        lookup3 = tl.load(lookup_ptr + 3)
    for first in range(split * blocks_per_split, end, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        at = wide + block[None, :, None]
        word_at = words_ptr + at * 8 + tl.arange(0, 8)[None, None, :]
        element = first * 64 + tl.arange(0, BLOCKS * 64)
        x_at = x_ptr + row[:, None] * (num_blocks * 64) + element[None, :]
        if EVEN:
            words = tl.load(word_at)
            absmax = tl.load(absmax_ptr + at)
            x = tl.load(x_at, mask=row_kept[:, None], other=0.0)  # rows past the last cost no traffic
        else:
            kept = (block < end)[None, :, None]
            words = tl.load(word_at, mask=kept, other=0)
            absmax = tl.load(absmax_ptr + at, mask=kept, other=0.0)
            x = tl.load(x_at, mask=row_kept[:, None] & (element < end * 64)[None, :], other=0.0)
        if INTERPRETED:
            v0, v1, v2, v3, v4, v5, v6, v7 = _table_values(words, table_ptr)
            weight = _interleave(v0, v1, v2, v3, v4, v5, v6, v7).reshape(OUTS, BLOCKS, 64) * absmax
            weight = _to_bf16(weight, INTERPRETED).to(tl.float32)  # the interpreter cannot multiply bf16
            x = x.to(tl.float32)
        else:
            v0, v1, v2, v3, v4, v5, v6, v7 = tl.inline_asm_elementwise(
                PAIRS_ASM, PAIRS_CONSTRAINTS, [words, lookup0, lookup1, lookup2, lookup3, absmax],
                dtype=(
                    tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                    tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                ),
                is_pure=True, pack=1,
            )  # fmt: skip
            weight = _interleave(v0, v1, v2, v3, v4, v5, v6, v7).reshape(OUTS, BLOCKS, 64)
        sums = tl.dot(x, tl.trans(weight.reshape(OUTS, BLOCKS * 64)), sums)
    kept = row_kept[:, None] & out_kept[None, :]
    at = row[:, None] * out_features + out[None, :]
    last = True
    if SPLITS > 1:
        size = num_rows * out_features
        tl.store(parts_ptr + split * size + at, sums, mask=kept)
        tl.debug_barrier()  # every thread's part is written before the one that counts goes on
        last = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    if last:
        if SPLITS > 1:
            tl.debug_barrier()
            sums = tl.zeros((ROWS, OUTS), tl.float32)
            for other in range(SPLITS):
                # Past L1, which may hold lines of another launch.
                sums += tl.load(parts_ptr + other * size + at, mask=kept, other=0.0, cache_modifier=".cg")
            tl.store(arrivals_ptr + tile, 0)
        if HAS_BIAS:
            sums += tl.load(bias_ptr + out, mask=out_kept, other=0.0).to(tl.float32)[None, :]
        tl.store(y_ptr + at, sums.to(y_ptr.dtype.element_ty), mask=kept)


# ---- launching


@dataclass(frozen=True)
class _ReductionTile:
    outs: int
    words: int
    num_warps: int


_REDUCTION_TILES = {1: _ReductionTile(4, 128, 1), 2: _ReductionTile(4, 64, 1), 4: _ReductionTile(4, 64, 1)}
"""By rows. To be measured; compiled for sm_90, one row takes 5.2 instructions an element, 3.3 of them on integer
units."""


@dataclass(frozen=True)
class _ProductTile:
    rows: int
    outs: int
    blocks: int
    num_warps: int
    num_stages: int


_PRODUCT_TILES = (_ProductTile(16, 64, 4, 4, 2), _ProductTile(64, 64, 2, 4, 3))
"""Ascending by rows. To be measured; compiled for sm_90, 6.3 to 6.9 instructions an element. Each tile of outputs reads
x again: at 64 rows four times the bytes of its codes, out of L2. 128 outputs or 32 rows cost more: the compiler then
sends every value through shared memory in 2-byte pieces (or, with 64 x 128, fails)."""

_PROGRAMS_WANTED = 264
"""Two on each of an H200's multiprocessors: below, the inputs are split."""
_LARGEST_SPLIT = 16
_DEQUANTIZE_BLOCKS = 32


class Nf4Workspace:
    """What the kernels share on one device: lookup tables and room for split products.

    One for a model. Products that use the same workspace must follow each other on one stream (graphs included).
    9 MB on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.rows = Nf4Rows.where_it_runs(PAIR_BITS, device)
        """None where the Triton kernels have to do its work."""
        largest = max(tile.rows * tile.outs for tile in _PRODUCT_TILES)
        self.parts = torch.empty(2 * _PROGRAMS_WANTED * largest, dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(_PROGRAMS_WANTED, dtype=torch.int32, device=device)
        self.codebook = torch.tensor(CODEBOOK, dtype=torch.float32, device=device)
        self.reduction_codebook = torch.tensor(REDUCTION_CODEBOOK, dtype=torch.float32, device=device)
        self.reduction_lookup = _int32_tensor(_register_words(REPEATED_BITS), device)
        self.product_lookup = _int32_tensor(_register_words(PAIR_BITS), device)


def _int32_tensor(words: list[int], device: torch.device) -> Tensor:
    signed = [word - (1 << 32) if word >> 31 else word for word in words]
    return torch.tensor(signed, dtype=torch.int32, device=device)


def dequantize(weight: Nf4Weight, workspace: Nf4Workspace, out: Tensor | None = None) -> Tensor:
    """[out, in] bf16, bit-equal to bitsandbytes'. `out`: where to write, contiguous."""
    if out is None:
        out = torch.empty(weight.out_features, weight.in_features, dtype=torch.bfloat16, device=weight.codes.device)
    assert out.is_contiguous()
    assert out.dtype == torch.bfloat16
    num_blocks = weight.absmax.numel()
    _dequantize_kernel[(triton.cdiv(num_blocks, _DEQUANTIZE_BLOCKS),)](
        weight.codes.view(torch.int32), weight.absmax, workspace.codebook, out, num_blocks,
        BLOCKS=_DEQUANTIZE_BLOCKS, INTERPRETED=_interpreted(), num_warps=4,
    )  # fmt: skip
    return out


def product_by_reduction(
    x: Tensor, weight: Nf4Weight, workspace: Nf4Workspace, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """x @ weight.T + bias for at most 4 rows. x: [rows, in] contiguous; the result (or `out`) has x's type."""
    num_rows, out = _checked(x, weight, out, limit=max(_REDUCTION_TILES))
    rows = triton.next_power_of_2(num_rows)
    tile = _REDUCTION_TILES[rows]
    _reduction_kernel[(triton.cdiv(weight.out_features, tile.outs),)](
        x, weight.codes.view(torch.int32), weight.absmax, workspace.reduction_codebook, workspace.reduction_lookup,
        x if bias is None else bias, out, num_rows, weight.out_features, weight.in_features // 8,
        ROWS=rows, OUTS=tile.outs, WORDS=tile.words, HAS_BIAS=bias is not None,
        EVEN=weight.in_features // 8 % tile.words == 0, INTERPRETED=_interpreted(),
        num_warps=tile.num_warps,
    )  # fmt: skip
    return out


def product_by_tiles(
    x: Tensor, weight: Nf4Weight, workspace: Nf4Workspace, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """x @ weight.T + bias for at most 64 rows of bf16. x: [rows, in] contiguous. Sums do not depend on the other
    rows."""
    num_rows, out = _checked(x, weight, out, limit=_PRODUCT_TILES[-1].rows)
    tile = next(tile for tile in _PRODUCT_TILES if tile.rows >= num_rows)
    num_tiles = triton.cdiv(weight.out_features, tile.outs)
    splits, blocks_per_split = _split(num_tiles, weight.in_features // BLOCK_SIZE, tile.blocks)
    _product_kernel[(num_tiles, splits)](
        x, weight.codes.view(torch.int32), weight.absmax, workspace.codebook, workspace.product_lookup,
        x if bias is None else bias, out, workspace.parts, workspace.arrivals,
        num_rows, weight.out_features, weight.in_features // BLOCK_SIZE, blocks_per_split,
        ROWS=tile.rows, OUTS=tile.outs, BLOCKS=tile.blocks, SPLITS=splits, HAS_BIAS=bias is not None,
        EVEN=weight.in_features // BLOCK_SIZE % tile.blocks == 0, INTERPRETED=_interpreted(),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def _split(num_tiles: int, num_blocks: int, tile_blocks: int) -> tuple[int, int]:
    """(splits, blocks of 64 inputs a split): enough programs for the device, whole tiles, no empty split."""
    splits = min(-(-_PROGRAMS_WANTED // num_tiles), _LARGEST_SPLIT)
    per_split = -(-num_blocks // splits)
    per_split = -(-per_split // tile_blocks) * tile_blocks
    return -(-num_blocks // per_split), per_split


def _checked(x: Tensor, weight: Nf4Weight, out: Tensor | None, limit: int) -> tuple[int, Tensor]:
    num_rows, in_features = x.shape
    assert in_features == weight.in_features
    assert 1 <= num_rows <= limit
    assert x.is_contiguous()
    if out is None:
        out = torch.empty(num_rows, weight.out_features, dtype=x.dtype, device=x.device)
    assert out.is_contiguous()
    assert out.shape == (num_rows, weight.out_features)
    return num_rows, out


def _interpreted() -> bool:
    return bool(knobs.runtime.interpret)


class Nf4Linear(nn.Module):
    """x: [..., in] -> [..., out] in x's type (bf16), with the weight in 4 bits.

    Owns its weight and bias; shares the workspace. Immutable, so any captured graph that holds it stays right. The way
    to the product follows from the number of rows alone (the table above).

    Args:
        bias: [out] or None.
    """

    def __init__(self, weight: Nf4Weight, bias: Tensor | None, workspace: Nf4Workspace) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self.weight_bytes = weight.num_bytes
        self._weight = weight
        self._bias = None if bias is None else bias.detach()
        self._workspace = workspace

    @classmethod
    def from_weight(cls, weight: Tensor, bias: Tensor | None, workspace: Nf4Workspace) -> Nf4Linear:
        """Of an unquantized weight [out, in]."""
        return cls(quantize(weight), bias, workspace)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if rows.shape[0] == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        parts = self.parts(rows, pdl=False)
        y = parts[0] if parts.dtype == x.dtype else parts.sum(0).to(x.dtype)
        return y.reshape(*x.shape[:-1], self.out_features)

    def parts(self, x: Tensor, *, pdl: bool) -> Tensor:
        """The product of [rows, in], rows > 0, as gemm.linear returns one: [parts, rows, out] in x's type, or in
        float32 to be added up.

        Args:
            pdl: see the package.
        """
        num_rows = x.shape[0]
        x = x.contiguous()
        weight, workspace = self._weight, self._workspace
        by_rows = workspace.rows if x.dtype == torch.bfloat16 else None
        if by_rows is not None and by_rows.takes(num_rows, self.in_features, self.out_features):
            return by_rows.product(x, weight.codes, weight.absmax, self._bias, pdl=pdl)
        if num_rows <= REDUCTION_ROWS:
            return product_by_reduction(x, weight, workspace, self._bias)[None]
        if num_rows <= FUSED_ROWS:
            return product_by_tiles(x, weight, workspace, self._bias)[None]
        return F.linear(x, dequantize(weight, workspace), self._bias)[None]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self._bias is not None}"
