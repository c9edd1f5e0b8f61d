"""Routers and experts against the same thing written out in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.config.load import ExpertBalance
from quire.errors import ConfigError
from quire.kernels.arguments import Gating, Routing
from quire.kernels.experts import count_rows, gate_rows, gated, route
from quire.layers.expert_balance import ExpertBalancer
from quire.layers.experts import ExpertCounters
from quire.layers.moe import ExpertNames, MixtureOfExperts, MixtureShape, SharedExpert
from quire.parallel.expert_placement import Placement, busiest
from quire.parallel.interface import ProcessGroup
from quire.parallel.single import SingleRank
from tests.fakes.ranks import run_ranks
from tests.layers.helpers import torch_context

SIZE, INTERMEDIATE, EXPERTS = 20, 12, 5


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("groups", [(1, 1, 1), (4, 2, 1), (4, 2, 2)])
def test_routing(scoring: str, renormalise: bool, biased: bool, groups: tuple[int, int, int]) -> None:
    logits, bias = randn(40, 12), 0.3 * randn(12, seed=1) if biased else None
    logits[5] = 1.0  # equal scores: the first experts
    routing = Routing(12, 3, scoring, renormalise, 2.5, bias, *groups)
    num_groups, top_groups, group_best = groups
    chosen, weights = route(routing, logits).split(3, dim=1)
    for token, row in enumerate(logits.double()):
        scores = torch.softmax(row, 0) if scoring == "softmax" else torch.sigmoid(row)
        preference = scores if bias is None else scores + bias.double()
        members = preference.view(num_groups, -1)
        worth = members.sort(descending=True).values[:, :group_best].sum(1)
        best = sorted(range(num_groups), key=lambda group: (-float(worth[group]), group))[:top_groups]
        open_experts = [expert for expert in range(12) if expert // members.shape[1] in best]
        expected = sorted(sorted(open_experts, key=lambda expert: (-float(preference[expert]), expert))[:3])
        assert chosen[token].tolist() == expected
        total = scores[expected].sum() if renormalise else 1.0
        torch.testing.assert_close(weights[token].double(), 2.5 * scores[expected] / total, rtol=1e-5, atol=1e-6)


def test_top_k_of_all_experts_and_of_one() -> None:
    logits = randn(6, 4)
    everything = route(Routing(4, 4), logits)
    assert everything[:, :4].tolist() == [[0, 1, 2, 3]] * 6
    torch.testing.assert_close(everything[:, 4:], torch.softmax(logits, 1))
    one = route(Routing(1, 1), logits[:, :1])
    assert one.tolist() == [[0.0, 1.0]] * 6


def test_scores_that_round_to_the_same_number_are_chosen_by_their_logits() -> None:
    logits = torch.tensor([[30.0, 31.0, 29.0]])
    assert route(Routing(3, 1, "sigmoid", renormalise=False), logits)[0, 0] == 1


def test_gating_with_a_limit() -> None:
    gate, up = 4 * randn(9, 8), 4 * randn(9, 8, seed=1)
    actual = gated(Gating("quick_gelu", 3.0), gate, up)
    cut, kept = gate.double().clamp(max=3.0), up.double().clamp(-3.0, 3.0)
    torch.testing.assert_close(actual.double(), (kept + 1) * cut * torch.sigmoid(1.702 * cut), rtol=0, atol=1e-5)


def test_gated_rows() -> None:
    x, gate = randn(7, 9), randn(7, 1, seed=1)
    torch.testing.assert_close(gate_rows(x, gate), x * torch.sigmoid(gate))
    assert torch.equal(gate_rows(x, gate)[3:4], gate_rows(x[3:4], gate[3:4]))


def loaded(mixture: MixtureOfExperts, names: ExpertNames, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Fill the slots; what was loaded, as float64."""
    generator, drawn = torch.Generator().manual_seed(7), {}
    for name, slot in sorted(mixture.slots(names).items()):
        tensor = (torch.randn(slot.shape, generator=generator) / 3).to(dtype)
        slot.load(tensor)
        drawn[name] = tensor.double()
    return drawn


def reference(
    tensors: dict[str, torch.Tensor], x: torch.Tensor, residual: torch.Tensor, top_k: int, *, weighs_input: bool = False
) -> torch.Tensor:
    """A mixture of experts with biases, checkpointed one by one, in float64."""
    scores = torch.softmax(x @ tensors["gate.weight"].T + tensors["gate.bias"], 1)
    rows = []
    for token, row in zip(x, scores, strict=True):
        total, out = row.topk(top_k).values.sum(), torch.zeros_like(token)
        for expert in row.topk(top_k).indices.tolist():
            part = {
                name: (tensors[f"experts.{expert}.{name}.weight"], tensors[f"experts.{expert}.{name}.bias"])
                for name in ("gate_proj", "up_proj", "down_proj")
            }
            share = row[expert] / total
            given = token * share if weighs_input else token
            gate, up = (weight @ given + bias for weight, bias in (part["gate_proj"], part["up_proj"]))
            result = part["down_proj"][0] @ (torch.nn.functional.silu(gate) * up) + part["down_proj"][1]
            out += result if weighs_input else result * share
        rows.append(out)
    return residual + torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("top_k", "weighs_input"), [(2, False), (1, True), (EXPERTS, False)])
def test_a_mixture(dtype: torch.dtype, top_k: int, weighs_input: bool) -> None:
    shape = MixtureShape(SIZE, INTERMEDIATE, bias=True, router_bias=True, weighs_input=weighs_input)
    mixture = MixtureOfExperts(shape, Routing(EXPERTS, top_k), Gating("silu"), torch_context(dtype))
    tensors = loaded(mixture, ExpertNames(), dtype)
    x, residual = randn(33, SIZE).to(dtype), randn(33, SIZE, seed=1).to(dtype)
    actual = mixture(x, residual.clone())
    expected = reference(tensors, x.double(), residual.double(), top_k, weighs_input=weighs_input)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-1)
    assert torch.equal(mixture(x[7:8], residual[7:8].clone()), actual[7:8])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_fused_tensors_hold_what_single_ones_do(transposed: bool, interleaved: bool) -> None:
    def make() -> MixtureOfExperts:
        shape = MixtureShape(SIZE, INTERMEDIATE, bias=True)
        return MixtureOfExperts(shape, Routing(EXPERTS, 2), Gating("silu"), torch_context())

    single, fused = make(), make()
    tensors = {name: tensor.float() for name, tensor in loaded(single, ExpertNames(), torch.float32).items()}
    names = ExpertNames(fused_gate_up="gate_up", fused_down="down", transposed=transposed, interleaved=interleaved)
    slots = fused.slots(names)

    def stack(*parts: str) -> torch.Tensor:
        each = [torch.stack([tensors[f"experts.{e}.{part}"] for part in parts]) for e in range(EXPERTS)]
        return torch.stack([one.transpose(0, 1).flatten(0, 1) if interleaved else one.flatten(0, 1) for one in each])

    for suffix, ending in (("weight", ""), ("bias", "_bias")):
        for name, parts in (("gate_up", ("gate_proj", "up_proj")), ("down", ("down_proj",))):
            whole = stack(*(f"{part}.{suffix}" for part in parts))
            whole = whole.transpose(1, 2) if transposed and suffix == "weight" else whole
            assert slots[f"experts.{name}{ending}"].shape == tuple(whole.shape)
            slots[f"experts.{name}{ending}"].load(whole)
    slots["gate.weight"].load(tensors["gate.weight"])
    x = randn(11, SIZE)
    assert torch.equal(fused(x, torch.zeros_like(x)), single(x, torch.zeros_like(x)))


@pytest.mark.parametrize("is_gated", [False, True])
def test_a_shared_expert_and_a_correction(is_gated: bool) -> None:
    context = torch_context()
    mixture = MixtureOfExperts(
        MixtureShape(SIZE, INTERMEDIATE, has_correction=True),
        Routing(EXPERTS, 2, "sigmoid"),
        Gating("silu"),
        context,
        SharedExpert(SIZE, 16, "silu", is_gated=is_gated, context=context),
    )
    tensors = loaded(mixture, ExpertNames(), torch.float32)
    x, residual = randn(9, SIZE), randn(9, SIZE, seed=1)
    wide = x.double()
    shared = {name: tensors[f"shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down")}
    result = (torch.nn.functional.silu(wide @ shared["gate"].T) * (wide @ shared["up"].T)) @ shared["down"].T
    if is_gated:
        result = result * torch.sigmoid(wide @ tensors["shared_expert_gate.weight"].T)
    scores = torch.sigmoid(wide @ tensors["gate.weight"].T)
    for token, row in enumerate(scores):
        chosen = (row + tensors["gate.e_score_correction_bias"]).topk(2).indices.tolist()
        for expert in chosen:
            gate, up, down = (tensors[f"experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
            inner = torch.nn.functional.silu(gate @ wide[token]) * (up @ wide[token])
            result[token] += row[expert] / row[chosen].sum() * (down @ inner)
    actual = mixture(x, residual.clone())
    torch.testing.assert_close(actual.double(), residual.double() + result, rtol=0, atol=1e-5)


def test_rows_of_padding_are_not_counted() -> None:
    """As a graph replays it: the number of rows that count lies in a tensor."""
    counters = ExpertCounters(num_rows=torch.tensor([2], dtype=torch.int32))
    counts = counters.add_layer(4, torch.device("cpu"))
    routing = torch.tensor([[0, 2, 0.5, 0.5], [1, 2, 0.5, 0.5], [torch.nan, 10**6, 0.5, 0.5], [3, 3, 0.5, 0.5]])
    count_rows(counts, routing)
    assert counters.by_layer[0].tolist() == [1, 1, 2, 0]
    assert counters.num_rows is not None
    counters.num_rows.fill_(0)
    count_rows(counts, routing)
    assert counters.by_layer[0].tolist() == [1, 1, 2, 0]
    counters.num_rows.fill_(1)
    count_rows(counts, routing)
    assert counters.by_layer[0].tolist() == [2, 1, 3, 0]


class Parts(SingleRank):
    """A rank whose sums over all ranks are its own part."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("strategy", "size"), [("linear", 2), ("round_robin", 3)])
def test_whole_experts_on_each_rank(strategy: str, size: int, fused: bool) -> None:
    """The parts of the ranks, added in their order, then the residual; a rank has room for its own experts alone, and
    takes no tensor of another one's. One rank adds all experts in the order of their numbers."""
    names = ExpertNames(fused_gate_up="gate_up", fused_down="down", transposed=True) if fused else ExpertNames()
    shape = MixtureShape(SIZE, INTERMEDIATE, bias=True)

    def make(group: ProcessGroup) -> MixtureOfExperts:
        context = replace(torch_context(group=group), expert_placement=strategy)
        return MixtureOfExperts(shape, Routing(EXPERTS, 2), Gating("silu"), context)

    whole = make(SingleRank())
    tensors = {name: tensor.float() for name, tensor in loaded(whole, names, torch.float32).items()}
    x, residual = randn(21, SIZE), randn(21, SIZE, seed=1)
    expected = whole(x, residual.clone())

    def fill(mixture: MixtureOfExperts) -> list[str]:
        slots = mixture.slots(names)
        for name, slot in slots.items():
            slot.load(tensors[name])
        return sorted(slots)

    parts, taken = [], []
    for rank in range(size):
        mixture = make(Parts(rank, size))
        taken += fill(mixture)
        parts.append(mixture(x, torch.zeros_like(x)))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    assert {name for name in tensors if taken.count(name) == 1} == (
        set() if fused else {name for name in tensors if name.startswith("experts")}
    )

    def compute(group: ProcessGroup) -> torch.Tensor:
        mixture = make(group)
        fill(mixture)
        return mixture(x, residual.clone())

    for found in run_ranks(size, compute):
        assert torch.equal(found, residual + total)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_fewer_experts_than_ranks_are_refused() -> None:
    context = replace(torch_context(group=Parts(0, 4)), expert_placement="linear")
    with pytest.raises(ConfigError, match="3 experts are fewer than tensor_parallel_size=4"):
        MixtureOfExperts(MixtureShape(SIZE, INTERMEDIATE), Routing(3, 2), Gating("silu"), context)


@pytest.mark.parametrize(("size", "redundant"), [(2, 0), (2, 3), (3, 4)])
@pytest.mark.parametrize(("dtype", "weighs_input"), [(torch.float32, False), (torch.bfloat16, True)])
def test_experts_follow_their_load_without_a_changed_bit(
    size: int, redundant: int, dtype: torch.dtype, weighs_input: bool
) -> None:
    """One step after the other, of which the last ones want other experts: the bits of one rank in each."""
    shape = MixtureShape(SIZE, INTERMEDIATE, bias=True, router_bias=True, weighs_input=weighs_input)
    wanted = torch.tensor([[0.0, 6.0, 5.0, 0.0, 0.0], [0.0, 0.0, 0.0, 6.0, 5.0]])

    def fill(mixture: MixtureOfExperts, which: int) -> None:
        slots = mixture.slots(ExpertNames())
        for name, slot in slots.items():
            slot.load(wanted[which].to(dtype) if name == "gate.bias" else tensors[name])

    whole = MixtureOfExperts(shape, Routing(EXPERTS, 2), Gating("silu"), torch_context(dtype))
    tensors = {name: tensor.to(dtype) for name, tensor in loaded(whole, ExpertNames(), dtype).items()}
    steps = [(randn(21, SIZE, seed=step).to(dtype), step // 12) for step in range(24)]
    expected = []
    for x, which in steps:
        fill(whole, which)
        expected.append(whole(x, x.clone()))

    def compute(group: ProcessGroup) -> list[Placement]:
        balancer = ExpertBalancer(ExpertBalance(redundant, window_size=4, step_interval=6))
        counters = ExpertCounters()
        context = replace(
            torch_context(dtype, group=group), expert_placement="linear", balancer=balancer, expert_counts=counters
        )
        mixture = MixtureOfExperts(shape, Routing(EXPERTS, 2), Gating("silu"), context)
        fill(mixture, 0)
        balancer.begin()
        (layer,) = balancer.layers
        seen = []
        for (x, which), result in zip(steps, expected, strict=True):
            mixture.slots(ExpertNames())["gate.bias"].load(wanted[which].to(dtype))
            balancer.before_step(lambda: None)
            assert torch.equal(mixture(x, x.clone()), result)
            seen.append(layer.placement)
        return seen

    first, *others = run_ranks(size, compute)
    assert all(other == first for other in others)
    for load, placement in (([1, 21, 18, 1, 1], first[12]), ([1, 1, 1, 21, 18], first[-1])):
        assert busiest(load, placement) < busiest(load, first[0])
