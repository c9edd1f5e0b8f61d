"""StarCoder 2."""

from quire.config.families.family import Bias, Family

_BIAS = Bias("use_bias", True)
FAMILIES = (
    Family(
        "starcoder2",
        gated=False,
        tied=True,
        affine=True,
        query_bias=_BIAS,
        output_bias=_BIAS,
        mlp_bias=_BIAS,
        windows="everywhere",
    ),
)
