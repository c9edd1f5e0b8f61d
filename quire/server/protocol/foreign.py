"""Request fields of other servers that this one lacks: OpenAI's, llama.cpp's, Ollama's and OpenRouter's.

Those that change the answer are errors, unless their value is harmless.
"""

from __future__ import annotations

NO_EFFECT: frozenset[str] = frozenset(
    {
        # OpenAI: bookkeeping, caching and speed.
        "background",
        "metadata",
        "moderation",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        # vLLM: fields of other routes, and of media that these routes do not take.
        "media_io_kwargs",
        "mm_processor_kwargs",
        "return_mm_kwargs",
        "return_token_offsets",
        "session_id",
        # llama.cpp: slots, caching, timing; parameters of samplers that are off unless another field enables them.
        "cache_prompt",
        "cache_reuse",
        "dry_allowed_length",
        "dry_base",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "dynatemp_exponent",
        "id_slot",
        "mirostat_eta",
        "mirostat_tau",
        "n_cache_reuse",
        "n_discard",
        "n_keep",
        "post_sampling_probs",
        "reasoning_in_content",
        "response_fields",
        "return_progress",
        "return_tokens",
        "slot_id",
        "speculative.n_max",
        "speculative.n_min",
        "speculative.p_min",
        "t_max_predict_ms",
        "timings_per_token",
        "xtc_threshold",
        # Ollama.
        "keep_alive",
        # OpenRouter: routing between providers, accounting.
        "provider",
        "trace",
        "usage",
    }
)
"""Accepted fields without meaning here."""

CHANGES_ANSWER: dict[str, tuple[object, ...]] = {
    # OpenAI.
    "audio": (),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "web_search_options": (),
    # llama.cpp.
    "adaptive_target": (-1.0, -1),
    "dry_multiplier": (0.0, 0),
    "dynatemp_range": (0.0, 0),
    "grammar": ("",),
    "input_prefix": ("",),
    "input_suffix": ("",),
    "json_schema": (),
    "min_keep": (0,),
    "mirostat": (0,),
    "n_predict": (),
    "n_probs": (0,),
    "penalize_nl": (False,),
    "prefill_assistant": (),
    "repeat_last_n": (),
    "repeat_penalty": (1.0, 1),
    "samplers": (),
    "tfs_z": (1.0, 1),
    "top_n_sigma": (-1.0, -1, 0, 0.0),
    "typ_p": (1.0, 1),
    "typical_p": (1.0, 1),
    "xtc_probability": (0.0, 0),
    # Ollama.
    "format": ("",),
    "images": ([],),
    "num_ctx": (),
    "num_predict": (),
    "options": ({},),
    "raw": (False,),
    "system": ("",),
    "template": ("",),
    "think": (),
    # OpenRouter.
    "models": ([],),
    "plugins": ([],),
    "reasoning": ({},),
    "route": (),
    "top_a": (0.0, 0),
    "transforms": ([],),
}
"""Unsupported fields -> harmless values, which are accepted."""

MESSAGE_NO_EFFECT: frozenset[str] = frozenset(
    {
        "annotations",
        "audio",
        "cache_control",
        "citations",
        "created",
        "created_at",
        "encrypted_content",
        "experimental_attachments",
        "experimental_providerMetadata",
        "finish_reason",
        "id",
        "index",
        "logprobs",
        "metadata",
        "object",
        "parsed",
        "parts",
        "phase",
        "prefix",
        "provider_options",
        "provider_specific_fields",
        "providerMetadata",
        "providerOptions",
        "reasoning_details",
        "refusal",
        "signature",
        "status",
        "thinking_blocks",
        "timestamp",
        "type",
    }
)
"""Fields of answers by servers and client libraries, which return with the history."""
