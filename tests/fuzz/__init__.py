"""Fuzzers: hostile input, made at random from corpora of what once did harm.

`python -m tests.fuzz --help` says how to run them at length. Each module beside `harness.py` holds one `Fuzzer`, listed
in `tests/fuzz/registry.py`.
"""
