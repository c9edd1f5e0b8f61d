"""Native kernels for CPUs: the Python side of csrc/."""
