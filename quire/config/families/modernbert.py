"""ModernBERT: an encoder with rotated positions, gated MLPs, and a window in most layers."""

from quire.config.families.family import Family
from quire.config.rope import RopeDefaults

FAMILIES = (
    Family(
        "modernbert",
        ("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"),
        is_runnable=True,
        is_bidirectional=True,
        num_kv_heads=(),
        tied=True,
        rope=RopeDefaults(theta=160_000.0, local_theta=10_000.0, local_key="local_rope_theta"),
        checkpoint_surplus=r"^(head|decoder)\.",
    ),
)
