"""Pictures in simulations: a trace's column, seconds and memory of the tower, and caches that a picture's name hits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quire.config.parallel import ParallelConfig
from quire.config.vision import VisionConfig
from quire.errors import UserError
from quire.image_orders import EncodeSlice, ImageOrders
from quire.simulator.cost import CostModel
from quire.simulator.hardware import find
from quire.simulator.replica import Observer, simulate
from quire.simulator.shape import find_vision
from quire.simulator.tower import TowerWork, placed
from quire.simulator.trace import TraceImage, TraceRequest, read_trace
from tests.simulator.making import settings, shape

VISION = VisionConfig(
    num_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=2,
    channels=3,
    frames=2,
    patch_size=4,
    merge_size=2,
    output_size=256,
    table_side=4,
    deepstack_layers=(0,),
    activation="gelu",
    rope_theta=1e4,
)
CAT = TraceImage(40, "cat")


def cost(layout: ParallelConfig | None = None) -> CostModel:
    return CostModel(shape(), find("a100-40g"), layout, vision=VISION)


def test_a_column_of_pictures(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival,input_tokens,output_tokens,images\n0,50,7,9 cat:40\n1,50,7,\n")
    assert [each.images for each in read_trace(path)] == [(TraceImage(9), CAT), ()]
    lines = path.with_suffix(".jsonl")
    lines.write_text('{"arrival": 0, "input_tokens": 50, "output_tokens": 7, "images": 9}\n')
    assert [each.images for each in read_trace(lines)] == [(TraceImage(9),)]
    for images, tokens, message in (
        ("0", 50, "t.csv:2: images must be numbers of tokens"),
        ("cat:", 50, "not 'cat:'"),
        ("x", 50, "not 'x'"),
        ("99999", 50, "up to 65536"),
        ("20 30", 50, "leave none of the 50 input_tokens for text"),
    ):
        path.write_text(f"arrival,input_tokens,output_tokens,images\n0,{tokens},7,{images}\n")
        with pytest.raises(UserError, match=message):
            list(read_trace(path))


def test_seconds_of_a_layer_by_hand() -> None:
    """Products of 8 x 64 x 64 weights with 160 patches are shorter than their bytes; four products of 64 for a pair."""
    tower, gpu = cost().tower, find("a100-40g")
    assert tower is not None
    weights, patches = (4 * 64 + 2 * 128) * 64, 160
    by_peak = 2 * weights * (patches + gpu.half_rows) / (gpu.peaks["float16"] * gpu.factors.compute)
    by_bytes = weights * 2 / (gpu.bandwidth * gpu.factors.bandwidth)
    pairs = 4 * 64 * patches**2 / (gpu.peaks["float16"] * gpu.factors.attention_compute)
    assert tower.layer_seconds(40) == pytest.approx(max(by_peak, by_bytes) + pairs + 10 * gpu.launch_overhead)
    assert tower.layer_seconds(4000) > 50 * tower.layer_seconds(40) - 50 * 10 * gpu.launch_overhead


def test_seconds_of_orders() -> None:
    """Slices add up to a picture's, and ranks compute side by side."""
    tower = cost(ParallelConfig(tp=2)).tower
    assert tower is not None
    request = TraceRequest(0.0, 100, 4, images=(CAT, TraceImage(30)))
    first, second = placed(0, request, tower)
    assert (first.start, second.start) == (0, 40)
    whole = 2 * tower.layer_seconds(40) + tower.end_seconds(40)
    work = TowerWork(tower)
    sliced = [work.seconds(ImageOrders([], [EncodeSlice(first.key, 1, each)])) for each in (first, None)]
    assert sum(sliced) == pytest.approx(whole)
    both = [EncodeSlice(first.key, 2, first, 0), EncodeSlice(second.key, 2, second, 1)]
    assert work.seconds(ImageOrders([], both)) == pytest.approx(whole)
    assert work.seconds(ImageOrders([], [EncodeSlice(first.key, 1, first)])) == pytest.approx(tower.layer_seconds(40))
    assert work.seconds(ImageOrders([first.key], [])) == work.seconds(None) == 0.0


def test_a_picture_is_encoded_once() -> None:
    """Features of a name are kept, blocks behind a shared beginning are found, and a picture without a name is new."""
    trace = [
        TraceRequest(0.0, 100, 4, "g", 32, images=(CAT,)),
        TraceRequest(9.0, 100, 4, "g", 32, images=(CAT,)),
        TraceRequest(18.0, 100, 4, images=(CAT, TraceImage(8))),
        TraceRequest(27.0, 100, 4),
    ]
    found: list[tuple[int, float]] = []
    observer = Observer(on_record=lambda record: found.append((record.num_cached, record.ttft)))
    metrics = simulate(trace, cost(), settings(), observer=observer)
    assert metrics.stats.encoded_images_total == metrics.as_json()["encoded_images"] == 2
    assert [cached for cached, _ in found] == [0, 64, 0, 0], "four blocks: the group's, and the picture's first 32"
    assert found[2][1] > found[3][1], "encoding takes time"


def test_memory_of_a_tower() -> None:
    with_tower, without = cost(), CostModel(shape(), find("a100-40g"))
    assert with_tower.weight_bytes_per_device - without.weight_bytes_per_device == 2 * VISION.num_elements


def test_models_without_a_tower_refuse_pictures() -> None:
    with pytest.raises(UserError, match="images need a model with a vision tower"):
        simulate([TraceRequest(0.0, 100, 4, images=(CAT,))], CostModel(shape(), find("a100-40g")), settings())


def test_a_tower_on_the_first_of_two_stages() -> None:
    """A text token costs a stage half as much, so a picture's layers count for twice as many."""
    whole, staged = cost().tower, cost(ParallelConfig(pp=2)).tower
    assert whole is not None
    assert staged is not None
    assert staged.costs.patch_factor == pytest.approx(2 * whole.costs.patch_factor)
    found = simulate([TraceRequest(0.0, 100, 4, images=(CAT,))], cost(ParallelConfig(pp=2)), settings())
    assert found.stats.encoded_images_total == 1
    deep = replace(VISION, deepstack_layers=tuple(range(shape().num_layers - 1)))
    assert len(CostModel(shape(), find("a100-40g"), ParallelConfig(pp=2), vision=deep).shape.stages(2)[1]) == 1
    with pytest.raises(UserError, match=r"pp=3 exceeds the .* layers of .*, whose first .* take images' features"):
        CostModel(shape(), find("a100-40g"), ParallelConfig(pp=3), vision=deep)


def test_towers_of_checkpoints() -> None:
    found = find_vision("bundled-sights")
    assert found is not None
    assert found.num_layers > 1
    assert find_vision("llama-3-8b") is None
