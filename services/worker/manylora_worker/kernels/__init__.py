"""Triton kernels of the device path. Each module holds its kernels and the plain functions that launch them.

They run on CUDA devices, and under Triton's interpreter on the CPU (TRITON_INTERPRET=1) in the tests. Nothing outside
`manylora_worker.device` imports them: a worker on the CPU needs no Triton.

`pdl` (programmatic dependent launch, Hopper): a kernel may start while the one before it ends. What it reads of weights
and tables comes before its gdc_wait, what that kernel made after it. Every program waits, those without work too: a
kernel that ended before its predecessor would let its successor run ahead of both. With LoRA the wait comes first:
reading ahead then takes more registers than it saves time (measured on an H200).
"""
