"""Prints which of Hopper's matrix products a kernel's variants are compiled to, a line each. No GPU is asked for."""

from __future__ import annotations

import re
from itertools import product

import triton
from manylora_worker.models.cuda.kernels.experts_product import _codes_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_POINTERS = {
    "x_ptr": "*bf16", "scales_ptr": "*fp32", "shifts_ptr": "*fp32", "codebook_ptr": "*fp32", "lookup_ptr": "*i32",
    "bias_ptr": "*bf16", "out_ptr": "*bf16", "order_ptr": "*i32", "tiles_ptr": "*i32", "count_ptr": "*i32",
    "weights_ptr": "*bf16", "table_ptr": "*i64", "row_adapters_ptr": "*i32", "low_rank_ptr": "*fp32",
    "stride_out": "i32", "stride_entry": "i32", "stride_split": "i32", "stride_pair": "i32",
}  # fmt: skip


def operands(name: str, groups: int, block_m: int, has_lora: bool) -> str:
    """Name of the instruction, and what its first operand is."""
    four_bits = name != "fp8"
    constants = {
        "N": 768, "K": 2048, "GROUPS": groups, "GROUP_SIZE": 2048 // groups, "FOUR_BITS": four_bits,
        "NF4": name == "nf4", "SHIFTED": name == "int4", "PAIRS_A_ROW": 8, "HALVES": 2,
        "BIAS": False, "GATES": True, "ACTIVATION": "silu",
        "HAS_LORA": has_lora, "TOP_K": 8, "MAX_RANK": 64, "A_GROUPS": 4, "SPLITS": 1,
        "BLOCK_M": block_m, "BLOCK_N": 64, "BLOCK_K": 64 if block_m == 64 or name == "nf4" else 128,
        "STAGES": 3 if block_m == 64 else 5, "PDL": False,
    }  # fmt: skip
    types = _POINTERS | {"w_ptr": "*u8" if four_bits else "*fp8e4nv"} | dict.fromkeys(constants, "constexpr")
    names = _codes_kernel.arg_names
    source = ASTSource(
        fn=_codes_kernel,
        signature={name: types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in constants},
    )
    warps = 8 if block_m == 64 else 4
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"]
    found = set()
    for each in re.finditer(r"wgmma\.mma_async[^{]*\{[^}]*\},\s*(\{|%rd)", ptx):
        following = re.findall(r"\t(bra|wgmma\.\w+[^;]*)", ptx[each.end() : each.end() + 2000])[:2]
        waits = following == ["wgmma.commit_group.sync.aligned", "wgmma.wait_group.sync.aligned 0"]
        where = "shared memory" if each[1] == "%rd" else "registers"
        found.add(where + ", waited for at once" * (waits and where == "registers"))
    kinds = [f"wgmma {each}" for each in sorted(found)] + ["mma.sync"] * ("mma.sync" in ptx)
    return " and ".join(kinds)


if __name__ == "__main__":
    for name, groups in (*product(("fp8", "int4"), (1, 16)), ("nf4", 32)):
        for block_m, has_lora in ((16, False), (32, False), (64, False), (64, True)):
            print(name, groups, block_m, operands(name, groups, block_m, has_lora))
