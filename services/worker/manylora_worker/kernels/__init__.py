"""Triton kernels of the device path. Each module holds its kernels and the plain functions that launch them.

They run on CUDA devices, and under Triton's interpreter on the CPU (TRITON_INTERPRET=1) in the tests. Nothing outside
`manylora_worker.device` imports them: a worker on the CPU needs no Triton.
"""
