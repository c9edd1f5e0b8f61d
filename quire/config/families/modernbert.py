"""ModernBERT: an encoder with rotated positions, gated MLPs, and a window in most layers."""

from quire.config.families.family import Family

FAMILIES = (
    Family(
        "modernbert",
        ("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"),
        is_runnable=True,
        is_bidirectional=True,
        num_kv_heads=(),
        tied=True,
        checkpoint_surplus=r"^(head|decoder)\.",
    ),
)
