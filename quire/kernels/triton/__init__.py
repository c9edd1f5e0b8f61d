"""Kernels for GPUs, in Triton. Nothing here is imported unless the Triton back end computes."""
