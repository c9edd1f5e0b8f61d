"""The paper's evaluation on this machine: workloads of the same shape, what is measured, and the paper's numbers."""
