"""How much contiguous KV space a request reserves when it starts (paper §6.1, "Baseline 2: Orca")."""

from __future__ import annotations

from typing import Protocol


class Reservation(Protocol):
    """Token slots that each sequence of a request reserves, at least `num_prompt_tokens` + `max_tokens`."""

    def __call__(self, num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> int:
        """max_tokens: what the request will generate (with `ignore_eos`; else at most)."""
        ...


def reserve_max(num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> int:
    """Orca (Max), and FasterTransformer: the longest sequence that the model takes."""
    return max_model_len


def reserve_pow2(num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> int:
    """Orca (Pow2): the prompt, and the output's length rounded up to a power of two (25 tokens reserve 32)."""
    return min(num_prompt_tokens + (1 << (max_tokens - 1).bit_length()), max_model_len)


def reserve_oracle(num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> int:
    """Orca (Oracle): as if the length of the output were known."""
    return num_prompt_tokens + max_tokens
