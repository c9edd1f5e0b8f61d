"""The systems that the PagedAttention paper compares with, as schedulers of the same engine core (docs/paper.md)."""
