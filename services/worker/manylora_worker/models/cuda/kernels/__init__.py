"""Kernels of the device path, beside the functions that launch them. Only `models.cuda` imports them.

Tests run Triton's in its interpreter (TRITON_INTERPRET=1) and the .cu files (cuda_module.py) as C++.
"""

# `pdl` (programmatic dependent launch, Hopper): a kernel may start while the one before it ends. It may read before its
# gdc_wait only what was made before the last product: weights, tables, and in attention what earlier steps left. Every
# program waits, those without work too: a kernel that ended before its predecessor would let its successor run ahead of
# both. A product lets the next kernel start after its own wait, the kernels between products at once. With LoRA the
# wait comes first: reading ahead costs more in registers than it saves (measured on an H200).
