"""Seed-OSS."""

from quire.config.families.family import Bias, Family

FAMILIES = (
    Family("seed_oss", query_bias=Bias("attention_bias", True), output_bias=Bias("attention_out_bias"), head_dim=128),
)
