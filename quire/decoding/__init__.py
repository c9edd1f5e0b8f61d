"""Decoding algorithms as forks, appends and frees of sequences."""
