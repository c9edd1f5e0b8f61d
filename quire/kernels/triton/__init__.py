"""Triton kernels for GPUs; imported only by the Triton back end."""
