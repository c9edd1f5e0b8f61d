"""Images in the scheduler: encoded in slices between the tokens of steps, within a cache, and read when they are."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.config.vision import EncoderCosts, VisionConfig
from quire.image_orders import EncodeSlice, ImagePlace
from quire.kv_cache.layout import KVCacheLayout
from quire.kv_cache.manager import KVCacheManager
from quire.prompt_image import PromptImage
from quire.request import ResumePoint
from quire.scheduler.preemption import PreemptionCosts
from quire.scheduler.scheduler import Scheduler
from quire.step import StepPlan
from tests.fakes.core import CoreDriver, generate_alone, make_config

NUM_LAYERS = 4
PLACEHOLDER = 90


class Workers:
    """What workers hold, as plans tell them; every plan is checked."""

    def __init__(self) -> None:
        self.layers: dict[bytes, int] = {}
        self.slices: list[list[EncodeSlice]] = []
        """By plan."""
        self.dropped: list[bytes] = []
        self.num_tokens: list[int] = []
        self.current: dict[int, bytes] = {}
        """Begun image, by rank."""
        self.shown: dict[int, list[ImagePlace]] = {}

    def follow(self, plan: StepPlan) -> None:
        self.shown |= {new.seq_id: new.images for new in plan.new_sequences}
        orders = plan.images
        for key in [] if orders is None else orders.dropped:
            del self.layers[key]
            self.dropped.append(key)
            self.current = {rank: each for rank, each in self.current.items() if each != key}
        self.slices.append([] if orders is None else orders.slices)
        self.num_tokens.append(plan.total_tokens)
        for part in self.slices[-1]:
            assert part.num_layers > 0
            assert (part.image is not None) == (part.key not in self.layers), "the image comes with its first layers"
            assert self.current.get(part.rank) in (None, part.key), "a rank encodes one at a time"
            assert (self.current.get(part.rank) is None) == (part.image is not None), "to its end on one rank"
            self.layers[part.key] = self.layers.get(part.key, 0) + part.num_layers
            assert self.layers[part.key] <= NUM_LAYERS
            self.current.pop(part.rank, None)
            if self.layers[part.key] < NUM_LAYERS:
                self.current[part.rank] = part.key
        for seq_id, start, count in zip(plan.seq_ids, plan.start_positions, plan.num_tokens, strict=True):
            for image in self.shown.get(seq_id, ()):
                if image.start < start + count and image.end > start:
                    assert self.layers.get(image.key) == NUM_LAYERS, "a token is computed of what is not encoded"


def make_driver(
    cost: float, cache_tokens: int = 1000, num_ranks: int = 1, **options: Any
) -> tuple[CoreDriver, Workers]:
    """cost: of a layer, for each token of an image."""
    encoder = EncoderCosts(NUM_LAYERS, cache_tokens, patch_factor=cost, pair_factor=0, patches=1, num_ranks=num_ranks)

    def make_scheduler(config: EngineConfig, layout: KVCacheLayout, costs: PreemptionCosts | None) -> Scheduler:
        kv = KVCacheManager(layout, enable_prefix_caching=config.cache.enable_prefix_caching)
        return Scheduler(config.scheduler, kv, costs, encoder=encoder)

    driver, workers = CoreDriver(make_config(**options), make_scheduler=make_scheduler), Workers()
    follow = driver.executor.observe
    assert follow is not None

    def observe(plan: StepPlan) -> None:
        follow(plan)
        workers.follow(plan)

    driver.executor.observe = observe
    return driver, workers


def shown(*parts: int | str) -> dict[str, Any]:
    """A prompt of tokens and images, whose name is a letter and a number of tokens."""
    prompt: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, int):
            prompt.append(part)
            continue
        count = int(part[1:])
        images.append(PromptImage((1, 1, count), part.encode(), b"pixels", (1, 1), part[0] == "f", False, len(prompt)))
        prompt += [PLACEHOLDER] * count
    return {"prompt": prompt, "images": images}


def layers(workers: Workers) -> list[list[tuple[str, int]]]:
    return [[(part.key.decode(), part.num_layers) for part in parts] for parts in workers.slices]


def test_features_cost_nothing_and_are_kept_as_others() -> None:
    """All layers of an image that a client encoded are ordered at once, without budget."""
    driver, workers = make_driver(cost=100, cache_tokens=9)
    driver.add("image", **shown(3, "f6", 5, "b3", "f4"), max_tokens=2)
    driver.run()
    parts = [part for each in layers(workers) for part in each]
    assert parts == [("f6", NUM_LAYERS), *[("b3", 1)] * NUM_LAYERS, ("f4", NUM_LAYERS)]
    assert workers.dropped


def test_what_is_kept_is_told() -> None:
    driver, _ = make_driver(cost=100, cache_tokens=20)
    driver.add("image", **shown(3, "a6", 5, "b3"), max_tokens=20)
    (view,) = driver.scheduler.snapshot(driver.clock.now()).requests
    assert view.num_image_tokens == 9
    for _ in range(NUM_LAYERS + 1):
        driver.step()
    stats = driver.scheduler.stats()
    assert (stats.max_encoder_tokens, stats.num_encoder_tokens, stats.encoded_images_total) == (20, 6, 2)


def test_streams_go_on_while_an_image_is_encoded() -> None:
    driver, workers = make_driver(cost=100)
    driver.add("stream", [1, 2], max_tokens=20)
    driver.step()
    driver.add("image", **shown(3, 4, "a6", 5), max_tokens=2)
    for _ in range(NUM_LAYERS):
        driver.step()
    # The text before the image, then the stream alone: a layer in each step.
    assert layers(workers)[1:] == [[("a6", 1)]] * NUM_LAYERS
    assert workers.num_tokens == [2, 3, 1, 1, 1]
    assert len(driver.tokens["stream", 0]) == 1 + NUM_LAYERS
    driver.step()
    assert workers.num_tokens[-1] == 1 + 7
    driver.run()
    assert driver.tokens["image", 0] == generate_alone(shown(3, 4, "a6", 5)["prompt"], max_tokens=2)[0]


def test_layers_count_against_the_budget() -> None:
    driver, workers = make_driver(cost=2, max_num_batched_tokens=32)
    driver.add("image", **shown("a5", 5), max_tokens=2)
    driver.add("other", **shown(1, "b4", 5), max_tokens=2)
    driver.step()
    # 10 tokens a layer of the first, 8 of the second; one token was computed.
    assert layers(workers) == [[("a5", 3)]]
    driver.step()
    assert layers(workers)[1:] == [[("a5", 1), ("b4", 2)]]
    driver.run()
    assert [parts for parts in layers(workers)[2:] if parts] == [[("b4", 2)]]
    assert len(driver.tokens["image", 0]) == len(driver.tokens["other", 0]) == 2


def test_images_are_dealt_to_ranks() -> None:
    """Whole ones, each rank with the step's budget; the next goes to the rank that has most of it left."""
    driver, workers = make_driver(cost=2, num_ranks=2, max_num_batched_tokens=32)
    given = {"images": shown("a8", 1, "b3", 2), "more": shown(3, "c1", 4)}
    for name, prompt in given.items():
        driver.add(name, **prompt, max_tokens=2)
    for _ in range(3):
        driver.step()
    assert [[(part.rank, part.key.decode(), part.num_layers) for part in parts] for parts in workers.slices] == [
        [(0, "a8", 1), (1, "c1", 4), (1, "b3", 3)],  # what a request wants now comes before its later images
        [(0, "a8", 1), (1, "b3", 1)],
        [(0, "a8", 1)],
    ]
    driver.run()
    assert workers.layers == {b"a8": 4, b"b3": 4, b"c1": 4}
    for name, prompt in given.items():
        assert driver.tokens[name, 0] == generate_alone(prompt["prompt"], max_tokens=2)[0]


def test_room_for_one_image_leaves_the_other_rank_idle() -> None:
    driver, workers = make_driver(cost=100, cache_tokens=9, num_ranks=2)
    driver.add("first", **shown("a9", 1), max_tokens=2)
    driver.add("second", **shown("b9", 2), max_tokens=2)
    driver.run()
    assert [part.rank for parts in workers.slices for part in parts] == [0] * 2 * NUM_LAYERS
    assert len(driver.tokens) == 2


def test_an_abort_ends_the_encoding() -> None:
    driver, workers = make_driver(cost=100)
    driver.add("image", **shown("a6", 5))
    driver.add("same", **shown("a6", 6))
    driver.step()
    driver.abort("image")
    driver.step()
    assert workers.layers == {b"a6": 2}, "another request waits for it"
    requests = list(driver.scheduler._requests.values())
    driver.abort("same")
    assert not any(request.images for request in requests), "pixels are let go of at once"
    driver.add("next", **shown("b6", 5))
    driver.step()
    assert workers.dropped == [b"a6"]
    assert workers.layers == {b"b6": 1}
    driver.run()


def test_what_the_prefix_cache_has_is_not_encoded() -> None:
    driver, workers = make_driver(cost=1, cache_tokens=9)
    for name in ("a9", "b9", "a9"):
        driver.add("request", **shown(1, 2, name, 3, 4, 5), max_tokens=2)
        driver.run()
        driver.finished.clear()
    assert [part.key for parts in workers.slices for part in parts if part.image is not None] == [b"a9", b"b9"]
    assert workers.dropped == [b"a9"]


def test_an_engine_that_takes_over_encodes_again() -> None:
    """The request brings its pixels, and what was generated."""
    given, expected = shown(1, "a9", 3), generate_alone(shown(1, "a9", 3)["prompt"], max_tokens=6)[0]
    for num_known in (1, 3):
        driver, workers = make_driver(cost=1)
        point = ResumePoint([expected[:num_known]], [], 0, 0.0)
        driver.add("image", **given, max_tokens=6, resume_point=point)
        driver.run()
        assert [part.key for parts in workers.slices for part in parts if part.image is not None] == [b"a9"]
        assert expected[:num_known] + driver.tokens["image", 0] == expected


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("queue_depth", "num_ranks"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("cache_tokens", [12, 24])
def test_traffic_with_room_for_few_images(seed: int, queue_depth: int, num_ranks: int, cache_tokens: int) -> None:
    """Several requests want more than the cache holds, some are preempted, one is aborted: each plan keeps the rules,
    and all requests come to their end with the tokens that they get alone."""
    rng = random.Random(seed)
    options = {"num_blocks": 20, "max_num_batched_tokens": 16, "max_num_seqs": 4, "queue_depth": queue_depth}
    driver, _ = make_driver(cost=3, cache_tokens=cache_tokens, num_ranks=num_ranks, **options)
    given = {}
    for number in range(12):
        parts: list[int | str] = [rng.randrange(80)]
        for _ in range(rng.randrange(4)):
            name = rng.choice("abcd")
            parts += [f"{name}{4 + 5 * 'abcd'.index(name)}", *(rng.randrange(80) for _ in range(rng.randrange(3)))]
        if rng.random() < 0.5:
            parts.append(rng.randrange(80))
        given[f"r{number}"] = shown(*parts)
    for name, prompt in given.items():
        driver.add(name, **prompt, priority=rng.randrange(3), max_tokens=4)
        for _ in range(rng.randrange(4)):
            driver.step()
        if name == "r7":
            driver.abort(rng.choice(list(given)))
    driver.run()
    for (name, _), tokens in driver.tokens.items():
        assert tokens == generate_alone(given[name]["prompt"], max_tokens=4)[0][: len(tokens)]


def test_costs_are_shares_of_a_token_of_text() -> None:
    config = VisionConfig(
        num_layers=2,
        hidden_size=8,
        intermediate_size=16,
        num_heads=2,
        channels=3,
        frames=2,
        patch_size=4,
        merge_size=2,
        output_size=8,
        table_side=4,
        deepstack_layers=(0,),
        activation="gelu",
        rope_theta=1e4,
    )
    costs = EncoderCosts.of(config, text_elements=1000)
    assert costs.cache_tokens == 2**28 // 64
    # Two frames of 24 patches: products of 8 x (32 + 32) elements a patch, and 2 x 24 x 8 for its scores and values.
    assert costs.layer_tokens((2, 2, 3)) == -(-2 * 24 * (512 + 384) // 1000)
