from __future__ import annotations

from quire.config.checks import choice
from quire.config.model_shape import AttentionShape
from quire.config.options import EngineOptions
from quire.errors import ConfigError

MLA_PROMPTS = ("auto", "absorbed", "expanded")


def expands_prompts(
    options: EngineOptions, attention: AttentionShape | None, architecture: str, *, is_invariant: bool
) -> bool:
    """Value of `ModelConfig.expands_prompts`. "auto" expands only where bits may depend on the batch anyway. attention:
    None for a model that Transformers computes. Raises ConfigError for a model whose attention cannot be expanded."""
    asked = choice("mla_prompt", options.mla_prompt, MLA_PROMPTS)
    reason = _why_not_expanded(attention)
    if asked == "auto":
        return reason is None and not is_invariant
    if asked == "absorbed" and attention is not None and attention.kind == "latent":
        return False
    if reason is not None:
        raise ConfigError(f"mla_prompt={asked!r} is not possible: {architecture} {reason}", param="mla_prompt")
    if options.batch_invariant:
        raise ConfigError("mla_prompt='expanded' and batch_invariant contradict each other", param="mla_prompt")
    return True


def _why_not_expanded(attention: AttentionShape | None) -> str | None:
    if attention is None or attention.kind != "latent":
        return "has no latent attention"
    if attention.index_top:
        return "has an indexer, which chooses other keys for each token"
    if attention.key_dim + attention.value_dim >= attention.latent_dim + attention.latent_rank:
        return "has heads as large as its latents: nothing would be saved"
    return None
