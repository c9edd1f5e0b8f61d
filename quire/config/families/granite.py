"""Granite 3 and its mixtures of experts."""

from quire.config.families.family import NEVER, Family

FAMILIES = (Family("granite", ("GraniteForCausalLM",), is_runnable=True), Family("granitemoe", mlp_bias=NEVER))
