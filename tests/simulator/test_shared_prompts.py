"""Predicted steps of groups that share prompts."""

from __future__ import annotations

import pytest

from quire.config.parallel import ParallelConfig
from quire.errors import UserError
from quire.simulator.cost import CostModel
from quire.simulator.exchange import exchange_of
from quire.simulator.hardware import find
from quire.simulator.shape import find_shape
from quire.simulator.work import StepWork

PROMPT = StepWork(
    num_tokens=4096,
    num_sequences=1,
    num_sampled=1,
    num_new=1,
    num_chunks=1,
    decode_context=[0],
    prefill_context=[4096],
    prefill_pairs=[4096 * 4097 // 2],
)


def cost(name: str = "llama-3.1-8b", **sizes: int) -> CostModel:
    return CostModel(find_shape(name), find("h100"), ParallelConfig(**sizes))


def test_a_prompt_takes_a_share_and_the_exchange() -> None:
    """Half of the tokens' products and attention, all that is sampled, and the others' keys; decodes stay as they
    are."""
    alone, two = cost(), cost(pcp=2)
    seconds = two.breakdown(PROMPT)
    assert sum(seconds.values()) == pytest.approx(two.step_seconds(PROMPT))
    assert 0 < seconds["shared keys"] < 0.2 * sum(seconds.values())
    assert seconds["logits"] == alone.breakdown(PROMPT)["logits"]
    assert 0.5 < two.step_seconds(PROMPT) / alone.step_seconds(PROMPT) < 0.75
    decode = a_decode(PROMPT)
    assert two.step_seconds(decode) == alone.step_seconds(decode)
    assert two.weight_bytes_per_device == alone.weight_bytes_per_device


def test_stages_share_the_exchange() -> None:
    alone, staged, both = cost(pcp=2), cost(pp=2), cost(pp=2, pcp=2)
    assert 0.5 < both.breakdown(PROMPT)["shared keys"] / alone.breakdown(PROMPT)["shared keys"] < 0.52
    assert 0.5 < both.step_seconds(PROMPT) / staged.step_seconds(PROMPT) < 0.75
    assert both.step_seconds(a_decode(PROMPT)) == staged.step_seconds(a_decode(PROMPT))


def test_whole_experts_and_latents() -> None:
    """A rank gives a latent in place of keys and values of many heads."""
    name, sizes = "deepseek-v3", {"tp": 8, "ep": 8}
    assert 0.5 < cost(name, **sizes, pcp=2).step_seconds(PROMPT) / cost(name, **sizes).step_seconds(PROMPT) < 0.75
    assert exchange_of(find_shape(name), ParallelConfig(pcp=2)).prompt == 61 * (512 + 64) * 4


def a_decode(work: StepWork) -> StepWork:
    decode = StepWork(num_tokens=1, num_sequences=1, num_sampled=1, num_decodes=1)
    decode.decode_context, decode.prefill_context, decode.prefill_pairs = work.prefill_context, [0], [0]
    return decode


@pytest.mark.parametrize(("name", "sizes"), [("qwen3-next-80b-a3b", {}), ("mixtral-8x7b", {"dp": 2, "ep": 2})])
def test_refused(name: str, sizes: dict[str, int]) -> None:
    with pytest.raises(UserError, match="pcp=2 is not possible"):
        cost(name, pcp=2, **sizes)
