"""Kernels of the device path. Each module holds its kernels and the plain functions that launch them.

Triton's run on CUDA devices, and under its interpreter on the CPU (TRITON_INTERPRET=1) in the tests; the .cu files are
CUDA C++ (cuda_module.py), which the tests run on the CPU too. Nothing outside `manylora_worker.device` imports them: a
worker on the CPU needs no Triton.

`pdl` (programmatic dependent launch, Hopper): a kernel may start while the one before it ends. What it reads of weights
and tables comes before its gdc_wait, what that kernel made after it. Every program waits, those without work too: a
kernel that ended before its predecessor would let its successor run ahead of both. With LoRA the wait comes first:
reading ahead then takes more registers than it saves time (measured on an H200).

A product lets the kernel behind it start after its own wait. The kernels between products do so at once: the product
behind them reads nothing ahead but weights, and attention besides only what earlier steps left. So whatever a kernel
reads ahead was made before the last product.
"""
