"""GPT-NeoX and Pythia."""

from quire.config.families.family import ALWAYS, Bias, Family

_BIAS = Bias("attention_bias", True)
FAMILIES = (Family("gpt_neox", gated=False, affine=True, query_bias=_BIAS, output_bias=_BIAS, mlp_bias=ALWAYS),)
