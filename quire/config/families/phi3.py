"""Phi 3 and 4."""

from quire.config.families.family import NEVER, Family

FAMILIES = (Family("phi3", query_bias=NEVER, output_bias=NEVER, mlp_bias=NEVER, windows="everywhere"),)
