"""Worker: one device's share of the model and of the KV cache."""

from quire import envs

# Here because this runs before any module of the package loads torch, and with it the OpenMP runtime.
envs.limit_openmp_spinning()
