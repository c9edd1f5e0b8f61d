"""Links between stages, and what a stage has of a model and of its cache."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from quire.config.parallel import ParallelConfig
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.spec import AttentionSpec, LayerSpec, SlidingWindowSpec
from quire.kv_cache.stage_layout import layout_of_stage, most_pages
from quire.parallel.link_files import NUM_SLOTS, LinkFiles
from quire.parallel.stage import WHOLE_MODEL, Link, NetworkLink, SharedMemoryLink, Stage
from quire.parallel.torch_dist import LOOPBACK, NetworkMeeting
from quire.simulator.shape import find_shape

FULL, WINDOW = AttentionSpec(1, 8, 8, 4), SlidingWindowSpec(1, 8, 8, 4, window=32)


def ends() -> tuple[SharedMemoryLink, SharedMemoryLink]:
    files = LinkFiles.create(4 * 64)
    return SharedMemoryLink(LinkFiles(*map(os.dup, files))), SharedMemoryLink(files)


def test_tensors_pass_over_the_network() -> None:
    """In their order, of any type, and as they were when they were sent; two links of one meeting do not mix."""
    first_process = NetworkMeeting.open(LOOPBACK)
    ways = [(f"{number}", sends) for number in range(2) for sends in (True, False)]
    with ThreadPoolExecutor(len(ways)) as threads:

        def join(way: tuple[str, bool]) -> NetworkLink:
            meeting = NetworkMeeting.at(LOOPBACK, first_process.port, LOOPBACK)
            return NetworkLink(meeting.of(way[0]), sends=way[1])

        found: list[Link] = list(threads.map(join, ways))
        for number, (first, second) in enumerate((found[:2], found[2:])):
            sent = [torch.full((4, size), float(size + number), dtype=torch.bfloat16) for size in (1, 16, 3, 8, 5)]

            def send(link: Link = first, tensors: list[torch.Tensor] = sent) -> None:
                for tensor in tensors:
                    row = tensor.clone()
                    link.send(row)
                    row.zero_()

            sending = threads.submit(send)
            for tensor in sent:
                assert torch.equal(second.receive(tuple(tensor.shape), torch.bfloat16), tensor)
                second.release()
            sending.result(60)


def test_tensors_arrive_in_order_and_a_full_link_waits() -> None:
    """The sender is as many tensors ahead as there are slots, and writes none that is read."""
    first, second = ends()
    sent = [torch.full((4, size), float(size)) for size in (1, 16, 3, 8, 5)]
    ahead = threading.Semaphore(0)

    def send() -> None:
        for tensor in sent:
            first.send(tensor)
            ahead.release()

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    for _ in range(NUM_SLOTS):
        assert ahead.acquire(timeout=60)
    for number, tensor in enumerate(sent):
        received = second.receive(tuple(tensor.shape), torch.float32)
        assert torch.equal(received, tensor)
        assert not ahead.acquire(blocking=False), f"a tensor went over the one that is read, number {number}"
        second.release()
        if number + NUM_SLOTS < len(sent):
            assert ahead.acquire(timeout=60)
    thread.join(60)


def test_other_types_pass() -> None:
    first, second = ends()
    first.send(torch.arange(6, dtype=torch.bfloat16).view(2, 3))
    assert second.receive((2, 3), torch.bfloat16).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_what_belongs_to_the_ends() -> None:
    slots = {"a": 1}
    first, middle, last = (Stage(number, 3) for number in range(3))
    assert [stage.at_entrance(slots) for stage in (first, middle, last)] == [slots, {}, {}]
    assert [stage.at_entrance(slots, is_head=True) for stage in (first, middle, last)] == [slots, {}, slots]
    assert [stage.at_exit(slots) for stage in (first, middle, last)] == [{}, {}, slots]
    assert WHOLE_MODEL.at_entrance(slots) == WHOLE_MODEL.at_exit(slots) == slots


@pytest.mark.parametrize(
    ("specs", "pages", "layers"),
    [
        ([FULL] * 6, [3, 3], [((0, 1, 2),), ((3, 4, 5),)]),
        ([FULL, WINDOW] * 3, [2, 2], [((0, 2), (1, 3)), ((2, 4), (3, 5))]),
        ([WINDOW] * 4 + [FULL] * 2, [2, 2], [((0, 1), (2, 3), (4, 5)), ((0, 1), (2, 3), (4, 5))]),
    ],
)
def test_pages_of_a_stage(specs: list[LayerSpec], pages: list[int], layers: list[tuple[tuple[int, ...], ...]]) -> None:
    """A page that holds layers of both stages is on both; the last layer is a draft model's."""
    groups, count = group_layers(specs, 16)
    layout = KVCacheLayout(16, 10, groups, count)
    stages = (range(3), range(3, 5))
    found = [layout_of_stage(layout, stage, is_last=stage is stages[-1]) for stage in stages]
    assert [each.layers_per_group for each in found] == pages
    assert [tuple(group.layers for group in each.groups) for each in found] == layers
    assert most_pages(groups, stages) == max(pages)


@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-3-27b", "deepseek-v3", "opt-125m"])
@pytest.mark.parametrize("pp", [1, 2, 3, 7, 12])
def test_all_layers_are_dealt(name: str, pp: int) -> None:
    shape = find_shape(name)
    stages = shape.stages(pp)
    assert [layer for stage in stages for layer in stage] == list(range(shape.num_layers))
    assert len(stages) == pp == ParallelConfig(pp=pp).num_devices
    assert all(len(stage) > 0 for stage in stages)
    assert len(stages[-1]) <= len(stages[0])


@pytest.mark.parametrize(("vocab", "sizes"), [(49152, [16, 14]), (1024, [15, 15]), (200_000, [19, 11])])
def test_layers_are_dealt_for_decodes_and_prompts(vocab: int, sizes: list[int]) -> None:
    """The output projection counts in full for decodes, not at all for prompts: neither has a stage that is much longer
    than the mean."""
    eight_billion = find_shape("llama-3-8b")
    layer = replace(eight_billion.layers[0], projections=((576, 576), (576, 384), (576, 576)), intermediate=1536)
    shape = replace(eight_billion, vocab=vocab, hidden=576, embedding_width=576, layers=(layer,) * 30)
    assert [len(stage) for stage in shape.stages(2)] == sizes
