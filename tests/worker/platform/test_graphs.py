"""Forward passes as graphs: the same bits as the eager pass, whatever the sizes and whatever ran before."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.attention.device_batch import DeviceBatch
from quire.config.model import ModelConfig
from quire.kernels.triton.runtime import launch
from quire.layers.overlay import RowOverlay
from quire.worker.graph_dispatch import Execution
from tests.fakes.device_attention import TwinBackend
from tests.fakes.graph_capture import CaptureError, RecordingCapture
from tests.kernels.triton.test_launch import _add_index
from tests.long import all_but_long, one_in
from tests.worker.platform.passes import (
    BLOCK_SIZE,
    DRAFT_ROWS,
    FULL,
    LONGEST,
    NUM_BLOCKS,
    NUM_ROWS,
    NUM_TOKENS,
    PIECEWISE,
    SETTINGS,
    Buffers,
    Passes,
    tiny_config,
)

PIECES = Execution("piecewise", PIECEWISE[-1], 1)
DRAFT_PASSES = [(24, 8), (12, 4), (8, 8), (6, 2), (4, 4), (3, 1), (2, 2), (1, 1)]
"""Tokens and sequences: two drafts, of sequences that have some."""


@pytest.fixture
def config(bundled_model_path: Path) -> ModelConfig:
    return tiny_config(bundled_model_path)


def random_steps(seed: int, count: int) -> list[tuple[list[int], list[int], list[list[int]]]]:
    """Steps over up to NUM_ROWS sequences: decodes of any number, some with drafts, and mixed batches."""
    draw = random.Random(seed)
    lengths = [0] * NUM_ROWS
    steps = []
    for _ in range(count):
        rows = draw.sample(range(NUM_ROWS), draw.randint(1, NUM_ROWS))
        most = draw.choice((1, 1, 1, DRAFT_ROWS, NUM_TOKENS // NUM_ROWS))
        step: tuple[list[int], list[int], list[list[int]]] = ([], [], [])
        for row in rows:
            if lengths[row] >= LONGEST - 8:
                lengths[row] = 0
            num = draw.randint(1, most)
            step[0].append(row)
            step[1].append(lengths[row])
            step[2].append([draw.randrange(50) for _ in range(num)])
            lengths[row] += num
        steps.append(step)
    return steps


@pytest.mark.parametrize(
    ("kind", "idle"), [*one_in(6, ["both", "full", "piecewise"], [False, True]), *all_but_long([("drafts", False)], [])]
)
def test_graphs_compute_what_the_eager_pass_computes(config: ModelConfig, kind: str, idle: bool) -> None:
    """idle: captured before the first step, else when a size is first used."""
    graphs, eager = Passes(config, SETTINGS[kind]), Passes(config, SETTINGS["eager"])
    if idle:
        with torch.inference_mode():
            while graphs.passes.capture_next(graphs.buffers.padded):
                assert graphs.num_rows.item() == 0
        assert graphs.passes.num_captured == len(SETTINGS[kind].executions())
    for step in random_steps(11, 30 if kind == "drafts" else 60):
        found, expected = graphs.run(*step), eager.run(*step)
        assert graphs.num_rows.item() == eager.num_rows.item() == sum(map(len, step[2])), "without padding"
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    replayed = [each for each in graphs.capture.graphs if each.num_replays]
    assert len(replayed) > (len(FULL) if kind == "drafts" else 0)
    assert kind == "drafts" or not graphs.passes.has_uncaptured


@pytest.mark.parametrize(
    ("kind", "captured", "left"),
    [
        ("full", [Execution("full", size, size) for size in reversed(FULL)], 0),
        ("piecewise", [PIECES], len(PIECEWISE) - 1),
        ("both", [PIECES, *(Execution("full", size, size) for size in reversed(FULL))], len(PIECEWISE) - 1),
        ("drafts", [Execution("full", *each) for each in DRAFT_PASSES], 0),
        ("eager", [], 0),
    ],
)
def test_no_decode_waits_for_a_capture(config: ModelConfig, kind: str, captured: list[object], left: int) -> None:
    """At the start the largest sizes come first, so that the memory they share is large enough for all; the other
    piecewise sizes are for idle time."""
    passes = Passes(config, SETTINGS[kind])
    with torch.inference_mode():
        passes.passes.capture_at_start(passes.buffers.padded)
        assert list(passes.passes._captured) == captured
        while passes.passes.capture_next(passes.buffers.padded):
            left -= 1
    assert left == 0


def test_a_start_without_memory_captures_what_fits(config: ModelConfig) -> None:
    passes = Passes(config, SETTINGS["full"], fail_after=2)
    with torch.inference_mode():
        passes.passes.capture_at_start(passes.buffers.padded)
    assert list(passes.passes._captured) == [Execution("full", 8, 8), Execution("full", 4, 4)]


@pytest.mark.parametrize("kind", all_but_long(["full", "piecewise", "both", "drafts"], ["both", "drafts"]))
def test_the_same_bits_at_the_same_sizes(config: ModelConfig, kind: str) -> None:
    """Against an eager pass over the same padded inputs, of the same sizes."""
    graphs, eager = Passes(config, SETTINGS[kind]), Passes(config, SETTINGS[kind])
    run_eagerly(eager)
    for step in random_steps(12, 30 if kind == "drafts" else 60):
        assert torch.equal(graphs.run(*step), eager.run(*step))
    assert graphs.passes.num_captured
    assert not eager.passes.num_captured
    real = slice(0, NUM_BLOCKS * BLOCK_SIZE)
    assert torch.equal(graphs.backend.keys[:, real], eager.backend.keys[:, real])
    assert torch.equal(graphs.backend.values[:, real], eager.backend.values[:, real])


def run_eagerly(passes: Passes) -> None:
    """At the sizes of graphs."""
    passes.passes.run = lambda _, *inputs: passes.passes._forward(*inputs)  # type: ignore[method-assign]


def test_stages_as_graphs_of_their_own(config: ModelConfig) -> None:
    """The hidden states of one are the input of the next, which is a static buffer; what is tapped is what they are."""
    whole = Passes(config, SETTINGS["both"], taps=(0,))
    first, second = (Passes(config, SETTINGS["both"], numbers=range(number, number + 1)) for number in range(2))
    for step in random_steps(13, 16):
        between = first.run(*step)
        expected, tapped = whole.run_tapped(*step)
        assert torch.equal(tapped[0], between)
        assert torch.equal(second.run(*step, hidden=between), expected)
    for passes in (whole, first, second):
        assert {each.kind for each in passes.passes._captured} == {"full", "piecewise"}
        assert any(graph.num_replays for graph in passes.capture.graphs)


def test_an_overlay_in_graphs(config: ModelConfig) -> None:
    """Steps with rows and steps without have graphs of their own; the rows' number is the step's."""
    graphs, eager = Passes(config, SETTINGS["both"]), Passes(config, SETTINGS["both"])
    run_eagerly(eager)
    generator = torch.Generator().manual_seed(0)
    for number, step in enumerate(random_steps(14, 16)):
        num_tokens, overlay = sum(map(len, step[2])), None
        if number % 3:
            rows = torch.randperm(num_tokens, generator=generator)[: 1 + num_tokens // 2].sort().values
            embeddings, behind = torch.randn(2, len(rows), 32, generator=generator).unbind(0)
            overlay = RowOverlay(rows, embeddings, {0: behind})
        assert torch.equal(graphs.run(*step, overlay=overlay), eager.run(*step, overlay=overlay))
    assert {(each.kind, each.overlaid) for each in graphs.passes._captured} == {
        ("full", None),
        ("piecewise", None),
        ("piecewise", (0,)),
    }
    overlaid = [made for each, made in graphs.passes._captured.items() if each.overlaid]
    assert any(piece.num_replays for made in overlaid for piece in made.graphs)  # type: ignore[attr-defined]


def test_padding_reaches_no_sequence(config: ModelConfig) -> None:
    """Whatever padded rows hold, NaN too, the others compute the same and nothing is written for them."""
    passes = Passes(config, SETTINGS["both"])
    steps = [([0, 1, 2], [0, 0, 0], [[1, 2, 3], [4, 5], [6]]), ([0, 1, 2], [3, 2, 1], [[7], [8], [9]])]
    for step in steps:
        passes.run(*step)  # captures 16 tokens, and decodes of 4
    before = passes.backend.keys.clone()
    first = [passes.run(*step) for step in steps]
    passes.passes._attended.fill_(float("nan"))
    with torch.inference_mode():
        passes.passes._results[0].fill_(float("nan"))
    passes.buffers.token_ids[6:] = 13
    assert all(torch.equal(passes.run(*step), old) for step, old in zip(steps, first, strict=True))
    assert torch.equal(passes.backend.keys[:, :-1], before[:, :-1])
    assert not first[0].isnan().any()


def test_inputs_must_stay_where_they_are(config: ModelConfig) -> None:
    passes = Passes(config, SETTINGS["both"])
    step = ([0, 1], [0, 0], [[1], [2]])
    passes.run(*step)
    passes.run(*step)
    passes.buffers = Buffers()
    with pytest.raises(AssertionError, match="must keep their addresses"):
        passes.run(*step)


def test_results_stay_where_they_are(config: ModelConfig) -> None:
    passes = Passes(config, SETTINGS["both"])
    execution = Execution("full", 2, 2)
    with torch.inference_mode():
        batch, token_ids = passes.buffers.padded(execution)
        passes.passes.run(execution, batch, token_ids)
        addresses = {passes.passes.run(execution, batch, token_ids).hidden.data_ptr() for _ in range(3)}
    assert len(addresses) == 1


class FrozenBackend(TwinBackend):
    """Uses a number of the host that differs from step to step: right when it runs eagerly, wrong in a graph."""

    factor = 1.0

    def plan(self, batch: DeviceBatch) -> Any:
        step, factor = super().plan(batch), self.factor
        attend = step.attend

        def scaled(heads: Any, qkv: torch.Tensor, rotation: Any, out: torch.Tensor | None = None) -> torch.Tensor:
            return attend(heads, qkv, rotation, out).mul_(factor)

        step.attend = scaled  # type: ignore[method-assign]
        return step


@pytest.mark.parametrize(("kind", "is_frozen"), [("full", True), ("piecewise", False)])
def test_a_frozen_value_shows(config: ModelConfig, kind: str, is_frozen: bool) -> None:
    """The recording capture is as unforgiving as a device; attention between pieces is free to use such numbers."""
    graphs, eager = (Passes(config, SETTINGS[each], FrozenBackend) for each in (kind, "eager"))
    for factor in (0.5, 2.0):
        graphs.backend.factor = eager.backend.factor = factor  # type: ignore[attr-defined]
        step = ([0], [0], [[5]])
        found, expected = graphs.run(*step), eager.run(*step)
    assert torch.allclose(found, expected) != is_frozen


def test_full_graphs_are_made_for_the_longest_sequence(config: ModelConfig) -> None:
    passes = Passes(config, SETTINGS["both"])
    passes.run([0], [0], [[1]])
    passes.run([0], [1], [[1, 2]])
    full, captured, mixed = passes.backend.planned
    assert (full.max_seq_len, captured.max_seq_len, mixed.max_seq_len) == (LONGEST, LONGEST, 3)


def test_when_memory_runs_out_the_rest_runs_eagerly(config: ModelConfig, caplog: pytest.LogCaptureFixture) -> None:
    graphs, eager = Passes(config, SETTINGS["full"], fail_after=1), Passes(config, SETTINGS["eager"])
    for step in random_steps(13, 12):
        torch.testing.assert_close(graphs.run(*step), eager.run(*step), rtol=1e-5, atol=1e-5)
    assert graphs.passes.num_captured == 1
    assert not graphs.passes.has_uncaptured
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "1 of 4 sizes" in warning


def test_what_torch_keeps_in_reserve_is_room_for_graphs(config: ModelConfig, caplog: pytest.LogCaptureFixture) -> None:
    graphs = Passes(config, SETTINGS["full"], fail_after=1, room=2)
    for step in random_steps(13, 40):
        graphs.run(*step)
    assert graphs.passes.num_captured == 3
    assert graphs.capture.num_rooms == 2
    assert len(caplog.records) == 1


def test_an_error_leaves_no_capture_open(config: ModelConfig) -> None:
    class Asking(TwinBackend):
        def plan(self, batch: DeviceBatch) -> Any:
            if len(self.planned) == 1:
                self.planned.append(batch)
                batch.seq_lens.max().item()
            return super().plan(batch)

    passes = Passes(config, SETTINGS["full"], Asking)
    step = ([0], [0], [[1]])
    with pytest.raises(CaptureError, match="during a capture"):
        passes.run(*step)
    assert passes.passes.num_captured == 0
    torch.testing.assert_close(passes.run(*step), Passes(config, SETTINGS["eager"]).run(*step))


# The recording capture itself


def capture(run: Callable[[], torch.Tensor]) -> tuple[RecordingCapture, torch.Tensor]:
    recorder = RecordingCapture()
    recorder.begin_capture()
    result = run()
    recorder.end_capture()
    return recorder, result


def test_a_capture_runs_nothing_and_a_replay_everything() -> None:
    x, out = torch.arange(16.0), torch.zeros(16)

    def work() -> torch.Tensor:
        doubled = x * 2
        launch(_add_index, (1,), doubled, 1, SIZE=16)
        out.copy_(doubled)
        return doubled

    recorder, doubled = capture(work)
    assert not out.any()
    assert doubled.isnan().all()
    recorder.graphs[0].replay()
    assert out.tolist() == [3.0 * index for index in range(16)]
    x.fill_(1.0)
    recorder.graphs[0].replay()
    assert out.tolist() == [2.0 + index for index in range(16)]


def test_a_replay_spoils_what_other_graphs_left() -> None:
    x = torch.ones(4)
    recorder = RecordingCapture()
    results = []
    for _ in range(2):
        recorder.begin_capture()
        results.append(x + 1)
        recorder.end_capture()
    recorder.graphs[0].replay()
    assert results[0].tolist() == [2.0] * 4
    recorder.graphs[1].replay()
    assert results[0].isnan().all()


def test_a_graph_that_continues_another_keeps_what_it_left() -> None:
    x = torch.ones(4)
    recorder = RecordingCapture()
    recorder.begin_capture()
    first = x + 1
    recorder.end_capture()
    recorder.begin_capture()
    second = first * 3
    recorder.end_capture()
    for graph in recorder.graphs:
        graph.replay()
    assert second.tolist() == [6.0] * 4


@pytest.mark.parametrize(
    "ask", [lambda x: x.sum().item(), lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: x + torch.tensor([1.0])]
)
@pytest.mark.parametrize("inference", [False, True])
def test_waiting_for_the_device_is_refused(ask: Callable[[torch.Tensor], Any], inference: bool) -> None:
    recorder = RecordingCapture()
    with torch.inference_mode(inference):
        recorder.begin_capture()
        try:
            with pytest.raises(CaptureError):
                ask(torch.ones(3))
        finally:
            recorder.abandon()
