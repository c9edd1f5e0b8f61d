"""`python -m benchmarks.kernels`: every native kernel beside its plain torch twin and the limits of the machine."""
