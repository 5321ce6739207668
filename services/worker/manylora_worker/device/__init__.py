"""The engine on a CUDA device: a decoder of fused kernels in CUDA graphs, behind the same ModelRunner seam."""
