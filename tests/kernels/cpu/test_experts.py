"""Native experts against linear layers that compute one expert after the other, and routing against plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from quire.kernels.arguments import Gating, Routing
from quire.kernels.cpu import _native
from quire.kernels.cpu._native import Activation
from quire.kernels.cpu.packing import PackedMatrix
from quire.kernels.experts import gate_rows, gated, route
from quire.parallel.expert_placement import places_of
from tests.kernels.cpu.linear_calls import CASES, ISAS, GuardedRows, pool, precision_of, random_matrix, run_linear
from tests.long import one_in

SIZE, INTERMEDIATE, EXPERTS = 72, 40, 6
each_case = pytest.mark.parametrize(("kind", "isa"), CASES)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Case:
    """Matrices of a kind of `linear_calls`, and what is done besides multiplying by them. up: where `gate_up` are the
    gates alone."""

    kind: str
    gate_up: list[PackedMatrix]
    down: list[PackedMatrix]
    limit: float = 0.0
    weighs_input: bool = False
    places: tuple[tuple[int, int, int], ...] = ()
    apart: bool = False
    up: tuple[PackedMatrix, ...] = ()


def make_case(kind: str, *, bias: bool = False, limit: float = 0.0, weighs_input: bool = False) -> Case:
    def make(inputs: int, outputs: int, seed: int, *, is_gated: bool) -> PackedMatrix:
        options = {"group_size": 8, "offsets": kind.startswith("i4")} if kind[0] == "i" else {}
        return random_matrix(kind, inputs, outputs, gated=is_gated, bias=bias, seed=seed, **options)

    gate_up = [make(SIZE, 2 * INTERMEDIATE, 10 + e, is_gated=True) for e in range(EXPERTS)]
    down = [make(INTERMEDIATE, SIZE, 50 + e, is_gated=False) for e in range(EXPERTS)]
    return Case(kind, gate_up, down, limit, weighs_input)


def run_experts(
    case: Case,
    x: torch.Tensor,
    routing: torch.Tensor,
    residual: torch.Tensor | None,
    *,
    isa: str,
    threads: int = 2,
    in_place: bool = False,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    rows = len(x)
    program = _native.Program(isa, pool(threads), rows + rows % 3 * 20, precision_of(case.kind))
    top_k, table = routing.shape[1] // 2, torch.tensor(case.places, dtype=torch.int32)
    areas = [GuardedRows(rows, SIZE, x), GuardedRows(rows, routing.shape[1], routing)]
    areas.append(GuardedRows(rows, SIZE * (top_k if case.apart else 1)))
    areas.append(GuardedRows(rows, SIZE, residual))
    if in_place:
        areas[2].values.copy_(areas[3].values)
    places = [_native.Ref(index, 0, area.stride) for index, area in enumerate(areas)]

    def biases(part: Sequence[PackedMatrix]) -> list[int]:
        return [matrix.bias.data_ptr() for matrix in part if matrix.bias is not None]

    program.experts(
        gate_up=[matrix.as_native() for matrix in case.gate_up],
        up=[matrix.as_native() for matrix in case.up],
        down=[matrix.as_native() for matrix in case.down],
        gate_up_bias=biases(case.gate_up),
        up_bias=biases(case.up),
        down_bias=biases(case.down),
        places=table.data_ptr() if case.places else 0,
        num_placed=len(case.places),
        top_k=top_k,
        activation=Activation.QUICK_GELU if case.limit else Activation.SILU,
        limit=case.limit,
        weighs_input=case.weighs_input,
        apart=case.apart,
        counts=0 if counts is None else counts.data_ptr(),
        x=places[0],
        routing=places[1],
        residual=_native.Ref() if residual is None else places[2 if in_place else 3],
        out=places[2],
    )
    scratch = torch.full((program.scratch_bytes + 128,), 99, dtype=torch.uint8)
    start = -scratch.data_ptr() % 64
    program.bind(rows, [], [], [area.address() for area in areas], scratch.data_ptr() + start)()
    for area in areas:
        area.check()
    assert bool((scratch[start + program.scratch_bytes :] == 99).all()), "the scratch that was asked for is enough"
    return areas[2].values.clone()


def one_by_one(case: Case, x: torch.Tensor, routing: torch.Tensor, isa: str) -> torch.Tensor:
    """Float64 sums of what native linear layers give for each row and expert."""
    top_k, precision = routing.shape[1] // 2, precision_of(case.kind)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, place in itertools.product(range(len(x)), range(top_k)):
        expert, share = int(routing[token, place]), routing[token, top_k + place]
        row = x[token : token + 1] * (share if case.weighs_input else 1.0)
        wide = case.gate_up[expert]
        if case.limit:
            both = row.double() @ wide.dequantize().double().T
            gate, up = (both + _bias(wide)).chunk(2, dim=1)
            inner = gated(Gating("quick_gelu", case.limit), gate, up).float()
        else:
            inner = run_linear(wide, row, isa=isa, activation=Activation.SILU, precision=precision)
            inner = inner * run_linear(case.up[expert], row, isa=isa, precision=precision) if case.up else inner
        result = run_linear(case.down[expert], inner, isa=isa, precision=precision)
        out[token] += result[0].double() * (1.0 if case.weighs_input else float(share))
    return out


def _bias(matrix: PackedMatrix) -> torch.Tensor:
    assert matrix.bias is not None
    return matrix.bias[matrix._columns(0, matrix.out_features)].double()


@pytest.mark.parametrize(("kind", "isa"), one_in(3, CASES))
def test_experts_are_linear_layers_over_their_rows(kind: str, isa: str) -> None:
    case = make_case(kind)
    x, residual = randn(29, SIZE), randn(29, SIZE, seed=1)
    logits = randn(29, EXPERTS, seed=2)
    logits[:, 4] = -50  # an expert that no row chose
    routing = route(Routing(EXPERTS, 2), logits)
    counts = torch.full((EXPERTS,), 100)
    actual = run_experts(case, x, routing, residual, isa=isa, counts=counts)
    expected = one_by_one(case, x, routing, isa) + residual.double()
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-5)
    assert counts.tolist() == [100 + int((routing[:, :2] == expert).sum()) for expert in range(EXPERTS)]
    assert torch.equal(run_experts(case, x, routing, residual, isa=isa, in_place=True), actual)
    for threads, rows in ((1, slice(0, 1)), (3, slice(5, 21))):
        part = run_experts(case, x[rows], routing[rows], residual[rows], isa=isa, threads=threads)
        assert torch.equal(part, actual[rows]), "a row has the same bits whatever else is computed"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("limit", "weighs_input"), [(0.8, False), (0.0, True)])
def test_biases_limits_and_weighted_inputs(isa: str, limit: float, weighs_input: bool) -> None:
    case = make_case("f32", bias=True, limit=limit, weighs_input=weighs_input)
    x = randn(14, SIZE)
    routing = route(Routing(EXPERTS, 3, renormalise=False), randn(14, EXPERTS, seed=2))
    actual = run_experts(case, x, routing, None, isa=isa)
    expected = one_by_one(case, x, routing, isa)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("limit", [0.0, 0.8])
def test_gate_and_up_apart_give_the_bits_of_one_matrix(isa: str, limit: float) -> None:
    case = make_case("f32", bias=True, limit=limit)
    parts: tuple[list[PackedMatrix], list[PackedMatrix]] = [], []
    for wide in case.gate_up:
        biases = _bias(wide).float().chunk(2)
        for part, rows, bias in zip(parts, wide.dequantize().chunk(2), biases, strict=True):
            part.append(PackedMatrix(wide.type, SIZE, INTERMEDIATE))
            part[-1].load_dense(rows)
            part[-1].load_bias(bias)
    x, routing = randn(29, SIZE), route(Routing(EXPERTS, 2), randn(29, EXPERTS, seed=2))
    apart = replace(case, gate_up=parts[0], up=tuple(parts[1]))
    assert torch.equal(run_experts(apart, x, routing, x, isa=isa), run_experts(case, x, routing, x, isa=isa))


@pytest.mark.parametrize("isa", ISAS)
def test_gate_and_up_of_two_types(isa: str) -> None:
    """Tiles of the two hold other numbers, and may hold other numbers of rows."""
    gates, ups = (
        [random_matrix(kind, SIZE, INTERMEDIATE, group_size=8, seed=seed + e) for e in range(EXPERTS)]
        for kind, seed in (("i4", 10), ("e4m3", 30))
    )
    case = replace(make_case("f32"), gate_up=gates, up=tuple(ups))
    x, routing = randn(29, SIZE), route(Routing(EXPERTS, 2), randn(29, EXPERTS, seed=2))
    actual = run_experts(case, x, routing, None, isa=isa)
    torch.testing.assert_close(actual.double(), one_by_one(case, x, routing, isa), rtol=0, atol=1e-5)
    for threads, rows in ((1, slice(0, 1)), (3, slice(5, 21))):
        part = run_experts(case, x[rows], routing[rows], None, isa=isa, threads=threads)
        assert torch.equal(part, actual[rows])


def test_many_rows_for_one_expert_and_every_expert_for_each_row() -> None:
    case = make_case("f32")
    isa, x = ISAS[0], randn(150, SIZE)
    for top_k in (1, EXPERTS):
        logits = randn(150, EXPERTS, seed=2)
        logits[:, 3] += 50
        routing = route(Routing(EXPERTS, top_k), logits)
        actual = run_experts(case, x, routing, None, isa=isa)
        expected = one_by_one(case, x, routing, isa)
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-5)
        alone = run_experts(case, x[77:78], routing[77:78], None, isa=isa)
        assert torch.equal(alone, actual[77:78])


@pytest.mark.parametrize("isa", ISAS)
def test_ranks_that_hold_other_experts_add_up_to_all(isa: str) -> None:
    """Each gives the sum over its own, in the order of their numbers; rows are counted for the experts of all."""
    case = make_case("f32", bias=True)
    x, residual = randn(19, SIZE), randn(19, SIZE, seed=1)
    routing = route(Routing(EXPERTS, 3), randn(19, EXPERTS, seed=2))
    total = residual.double()
    for held in ((0, 3, 5), (1, 2, 4), ()):
        numbers = held or (0,)
        counts = torch.zeros(EXPERTS, dtype=torch.int64)
        own = replace(
            case,
            gate_up=[case.gate_up[number] for number in numbers],
            down=[case.down[number] for number in numbers],
            places=tuple((numbers.index(number) if number in numbers else -1, 1, 0) for number in range(EXPERTS)),
        )
        chosen = routing if held else torch.cat((torch.ones(19, 3), routing[:, 3:]), dim=1)  # of none that is here
        part = run_experts(own, x, chosen, None, isa=isa, counts=counts)
        assert counts.sum() == 3 * len(x)
        masked = chosen.clone()
        masked[:, 3:][~torch.isin(chosen[:, :3], torch.tensor(held, dtype=torch.float32))] = 0
        torch.testing.assert_close(part.double(), one_by_one(case, x, masked, isa), rtol=0, atol=1e-5)
        assert torch.equal(run_experts(own, x[5:9], chosen[5:9], None, isa=isa, threads=3), part[5:9])
        total += part.double()
    expected = run_experts(case, x, routing, residual, isa=isa)
    torch.testing.assert_close(total, expected.double(), rtol=0, atol=1e-5)


def added(
    parts: torch.Tensor, routing: torch.Tensor, residual: torch.Tensor, isa: str, **options: bool
) -> torch.Tensor:
    """The call that adds what experts leave apart."""
    rows = len(parts)
    program = _native.Program(isa, pool(2), rows)
    areas = [GuardedRows(*each.shape, each) for each in (parts, routing, residual)]
    areas.append(GuardedRows(*residual.shape))
    refs = [_native.Ref(index, 0, area.stride) for index, area in enumerate(areas)]
    program.add_experts(routing.shape[1] // 2, options.get("weighs_input", False), residual.shape[1], *refs)
    program.bind(rows, [], [], [area.address() for area in areas], 0)()
    for area in areas:
        area.check()
    return areas[3].values.clone()


@pytest.mark.parametrize(("kind", "isa"), one_in(4, CASES))
@pytest.mark.parametrize("weighs_input", [False, True])
def test_experts_apart_on_ranks_have_the_bits_of_all_in_one_place(kind: str, isa: str, weighs_input: bool) -> None:
    """Wherever they are: in slots of any order, with copies that share an expert's rows."""
    case = make_case(kind, weighs_input=weighs_input)
    x, residual = randn(19, SIZE), randn(19, SIZE, seed=1)
    routing = route(Routing(EXPERTS, 3), randn(19, EXPERTS, seed=2))
    expected = run_experts(case, x, routing, residual, isa=isa)
    for placement in (((5, 0, 3), (2, 1, 4)), ((0, 2, 1, 5), (3, 5, 4, 0)), (tuple(range(6)), (4,), (1, 4))):
        total = torch.full((19, 3 * SIZE), -0.0)
        for rank, held in enumerate(placement):
            own = replace(
                case,
                gate_up=[case.gate_up[number] for number in held],
                down=[case.down[number] for number in held],
                places=tuple(places_of(placement, rank, EXPERTS)),
                apart=True,
            )
            counts = torch.zeros(EXPERTS, dtype=torch.int64)
            part = run_experts(own, x, routing, None, isa=isa, counts=counts)
            assert counts.sum() == 3 * len(x)
            assert bool(((total == 0) | (part == 0)).all()), "one rank computes each"
            total += part
        assert torch.equal(added(total, routing, residual, isa, weighs_input=weighs_input), expected)


def test_matrices_that_do_not_fit_together_are_refused() -> None:
    case = make_case("f32")
    x, routing = randn(2, SIZE), torch.zeros(2, 4)
    for numbers in ((0, 1, 2, 3, 4), (1, 0, 2, 3, 4, 5), (0, -1, 1, 2, 3, 4, 5, 6)):
        places = tuple((number, 1, 0) for number in numbers)
        with pytest.raises(ValueError, match="experts do not fit together"):
            run_experts(replace(case, places=places), x, routing, None, isa=ISAS[0])
    for wrong in ((0, 2, 2), (0, 1, -1), (6, 1, 0), (1, 1, 0)):
        places = (wrong, *((number, 1, 0) for number in range(1, EXPERTS)))
        with pytest.raises(ValueError, match="experts do not fit together"):
            run_experts(replace(case, places=places, apart=True), x, routing, None, isa=ISAS[0])
    with pytest.raises(ValueError, match="experts do not fit together"):
        run_experts(replace(case, gate_up=case.gate_up[:3]), x, routing, None, isa=ISAS[0])
    with pytest.raises(ValueError, match="experts do not fit together"):
        run_experts(replace(case, gate_up=case.down), x, routing, None, isa=ISAS[0])
    with pytest.raises(ValueError, match="experts do not fit together"):
        run_experts(replace(case, up=tuple(case.gate_up)), x, routing, None, isa=ISAS[0])


def run_route(routing: Routing, logits: torch.Tensor, isa: str) -> torch.Tensor:
    program = _native.Program(isa, pool(2), len(logits))
    areas = [GuardedRows(*logits.shape, logits), GuardedRows(len(logits), 2 * routing.top_k)]
    program.route(
        num_experts=routing.num_experts,
        top_k=routing.top_k,
        sigmoid=routing.scoring == "sigmoid",
        renormalise=routing.renormalise,
        factor=routing.factor,
        bias=0 if routing.bias is None else routing.bias.data_ptr(),
        num_groups=routing.num_groups,
        top_groups=routing.top_groups,
        group_best=routing.group_best,
        logits=_native.Ref(0, 0, areas[0].stride),
        out=_native.Ref(1, 0, areas[1].stride),
    )
    program.bind(len(logits), [], [], [area.address() for area in areas], 0)()
    for area in areas:
        area.check()
    return areas[1].values.clone()


@pytest.mark.parametrize("isa", ISAS)
def test_routing_is_that_of_plain_torch(isa: str) -> None:
    bias = 0.4 * randn(12, seed=5)
    for scoring, renormalise, with_bias, groups in itertools.product(
        ("softmax", "sigmoid"), (False, True), (False, True), ((1, 1, 1), (4, 2, 1), (3, 2, 2))
    ):
        logits = 2 * randn(33, 12)
        logits[4] = 0.25  # of equal scores, the first
        routing = Routing(12, 4, scoring, renormalise, 1.5, bias if with_bias else None, *groups)
        torch.testing.assert_close(run_route(routing, logits, isa), route(routing, logits), rtol=1e-5, atol=1e-6)


def test_rows_of_nan_choose_experts_that_exist() -> None:
    logits = randn(3, 5)
    logits[1] = torch.nan
    out = run_route(Routing(5, 2), logits, ISAS[-1])
    assert sorted(out[1, :2].tolist()) == [0.0, 1.0]
    assert out[1, 2:].isnan().all()
    torch.testing.assert_close(out[[0, 2]], route(Routing(5, 2), logits[[0, 2]]))


@pytest.mark.parametrize("isa", ISAS)
def test_gated_rows(isa: str) -> None:
    x, gate = randn(7, 41), randn(7, 1, seed=1)
    program = _native.Program(isa, pool(1), 7)
    areas = [GuardedRows(7, 41, x), GuardedRows(7, 1, gate), GuardedRows(7, 41)]
    refs = [_native.Ref(index, 0, area.stride) for index, area in enumerate(areas)]
    program.elementwise(_native.Elementwise.GATE_ROWS, 1.0, 41, *refs)
    program.bind(7, [], [], [area.address() for area in areas], 0)()
    for area in areas:
        area.check()
    torch.testing.assert_close(areas[2].values, gate_rows(x, gate))
