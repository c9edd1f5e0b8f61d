"""Command R and R7B."""

from quire.config.families.family import NEVER, Family

FAMILIES = (
    Family("cohere", tied=True, norms=1, mlp_bias=NEVER, head_norms="whole", head_norms_key="use_qk_norm"),
    Family("cohere2", tied=True, norms=1, mlp_bias=NEVER, windows=4),
)
