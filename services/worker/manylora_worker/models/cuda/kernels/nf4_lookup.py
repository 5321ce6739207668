"""Codes of 4 bits in registers: how a kernel turns a word of eight of them into eight numbers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from manylora_worker.models.cuda.kernels.nf4_format import CODEBOOK


def bf16_bits(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32).bfloat16().view(torch.int16).item()) & 0xFFFF


# The lookup is what such a kernel spends its time on: integer units allow 2.5 lane operations an element if it is to
# take half of bf16's time. Byte permutes take 2.6 (3.1 to float32) and no memory pipe: a register pair holds 8 table
# bytes, `prmt` picks 4 at once. A tree of selects takes 15; a 64-byte table in L1 or tl.gather 1 at half the rate, and
# 2 for the address. Triton's interpreter cannot run PTX and takes the loads.
def _repeated_bits(value: float) -> int:
    # the 16 bits 'hi lo' for which float32 'hi lo lo lo' is nearest to the value
    near = bf16_bits(value)
    candidates = [bits for bits in (near - 1, near, near + 1) if 0 <= bits <= 0xFFFF and bits >> 15 == near >> 15]
    return min(candidates, key=lambda bits: abs(_repeated_value(bits) - value)) if value else 0


def _repeated_value(bits: int) -> float:
    low = bits & 0xFF
    word = bits << 16 | low << 8 | low
    return float(torch.tensor(word - (1 << 32) if word >> 31 else word, dtype=torch.int32).view(torch.float32).item())


PAIR_BITS = tuple(bf16_bits(value) for value in CODEBOOK)
REPEATED_BITS = tuple(_repeated_bits(value) for value in CODEBOOK)
# what `_reduction_kernel` multiplies by: within half a bf16 step of the codebook
REDUCTION_CODEBOOK = tuple(_repeated_value(bits) for bits in REPEATED_BITS)


def _table_words(entries: tuple[int, ...], shift: int) -> list[int]:
    # four 32-bit words with byte `shift / 8` of the 16 entries
    chosen = [entry >> shift & 0xFF for entry in entries]
    return [sum(chosen[4 * word + i] << 8 * i for i in range(4)) for word in range(4)]


def _lookup_asm(entries: tuple[int, ...], word: str, registers: tuple[str, ...]) -> list[str]:
    # Low bytes go into l0, l1 and high bytes into h0, h1, in the order of the word's nibbles. `prmt` takes a
    # byte's number in 3 bits of a nibble; bit 3 must be clear (else it copies signs). Bit 3 of the code chooses
    # between the table's halves: result byte i comes from byte i or byte 4 + i. The instruction takes one
    # immediate, so every second table word comes in a register (`register_words`); as constants they would be
    # loaded anew for each permute.
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


def register_words(entries: tuple[int, ...]) -> list[int]:
    low, high = _table_words(entries, 0), _table_words(entries, 8)
    return [low[0], low[2], high[0], high[2]]


# Little-endian words and high nibble first: element e of a word is nibble e ^ 1.
_PAIR_SELECTORS = (0x4051, 0x6273)
_FLOAT_SELECTORS = (0x5111, 0x4000, 0x7333, 0x6222)


def _floats_asm() -> str:
    # $0..$7: 8 float32 of the word $8; $9..$12 table words
    lines = _lookup_asm(REPEATED_BITS, "$8", ("$9", "$10", "$11", "$12"))
    lines += [f"prmt.b32 ${e}, l{e // 4}, h{e // 4}, {_FLOAT_SELECTORS[e % 4]:#06x};" for e in range(8)]
    return "{ " + " ".join(lines) + " }"


def scaled_pairs_asm(entries: tuple[int, ...]) -> str:
    """$0..$7: 8 bf16 of the word $8, multiplied by $13 (float32, rounded to bf16 first); $9..$12 `register_words`."""
    lines = [".reg .b32 r, scale;", "cvt.rn.bf16x2.f32 scale, $13, $13;"]
    lines += _lookup_asm(entries, "$8", ("$9", "$10", "$11", "$12"))
    for pair in range(4):
        half = pair // 2
        lines.append(f"prmt.b32 r, l{half}, h{half}, {_PAIR_SELECTORS[pair % 2]:#06x};")
        lines.append("mul.rn.bf16x2 r, r, scale;")
        lines.append(f"mov.b32 {{${2 * pair}, ${2 * pair + 1}}}, r;")
    return "{ " + " ".join(lines) + " }"


# of the high bits of two neighbours of four bytes, and of their low bits
_BYTE_SELECTORS = (0x7351, 0x6240)


def bytes_asm(entries: tuple[int, ...]) -> str:
    """$0, $1: bf16 of the high bits of the four bytes $4; $2, $3: of the low bits. A table word comes four times, once
    a byte: $5, $9, $13 and $17 are `register_words`.
    """
    lines = _lookup_asm(entries, "$4", ("$5", "$9", "$13", "$17"))
    for i, selector in enumerate(_BYTE_SELECTORS):
        lines += [f"prmt.b32 ${2 * i + half}, l{half}, h{half}, {selector:#06x};" for half in (0, 1)]
    return "{ " + " ".join(lines) + " }"


# 128 + n in bf16 is 0x4300 + n, for n below 128. A byte's low bits stay where they are, each byte in a half of a word.
_INTEGERS_ASM = tl.constexpr(
    "{ .reg .b32 t, u, s, v; prmt.b32 t, $4, 0, 0x4140; prmt.b32 u, $4, 0, 0x4342; shr.b32 s, t, 4; shr.b32 v, u, 4; "
    + " ".join(
        f"lop3.b32 ${output}, {word}, 0x000f000f, 0x43004300, 0xea;"  # (a & b) | c
        for output, word in enumerate(("s", "v", "t", "u"))
    )
    + " }"
)
_INTEGERS_CONSTRAINTS = tl.constexpr("=r,=r,=r,=r,r")
FLOATS_ASM = tl.constexpr(_floats_asm())
FLOATS_CONSTRAINTS = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 5))
PAIRS_CONSTRAINTS = tl.constexpr(",".join(["=h"] * 8 + ["r"] * 6))
_BYTES_CONSTRAINTS = tl.constexpr(",".join(["=r"] * 4 + ["r"] * 17))


@triton.jit
def table_values(words, table_ptr):
    """Eight tensors of table entries, by element."""
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
def byte_values(codes, table_ptr, lookup, ASM: tl.constexpr, dtype: tl.constexpr):
    """What the high and the low bits of uint8 codes stand for. To bf16 by ASM (`bytes_asm`), with its `register_words`
    in lookup.
    """
    if dtype == tl.bfloat16:
        high, low = tl.inline_asm_elementwise(
            ASM, _BYTES_CONSTRAINTS, [codes, lookup[0], lookup[1], lookup[2], lookup[3]],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        high, low = tl.load(table_ptr + (codes >> 4)).to(dtype), tl.load(table_ptr + (codes & 15)).to(dtype)
    return high, low


@triton.jit
def integers_from_128(codes, dtype: tl.constexpr):
    """128 + the high bits, and 128 + the low bits of uint8 codes."""
    if dtype == tl.bfloat16:
        high, low = tl.inline_asm_elementwise(
            _INTEGERS_ASM, _INTEGERS_CONSTRAINTS, [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        high, low = (codes >> 4).to(dtype) + 128.0, (codes & 15).to(dtype) + 128.0
    return high, low


@triton.jit
def interleave(v0, v1, v2, v3, v4, v5, v6, v7):
    """[..., 2, 2, 2] whose last three dimensions are the element's number in binary."""
    return tl.join(
        tl.join(tl.join(v0, v4), tl.join(v2, v6)),
        tl.join(tl.join(v1, v5), tl.join(v3, v7)),
    )
