"""MiniMax M2."""

from quire.config.families.family import NEVER, Family

FAMILIES = (
    Family("minimax_m2", query_bias=NEVER, output_bias=NEVER, mlp_bias=NEVER, head_norms="whole", corrects_choice=True),
)
