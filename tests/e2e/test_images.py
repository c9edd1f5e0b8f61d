"""Images in prompts: tokens are Transformers', whatever the chunks, the caches and the requests beside them."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import PreTrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from quire.config.options import EngineOptions
from quire.config.vision import EncoderCosts
from quire.engine.async_engine import AsyncLLM
from quire.errors import UserError
from quire.image_orders import ImageOrders
from quire.llm import LLM
from quire.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler
from quire.worker.images import ImageOverlays
from tests.e2e.test_restart import GUARD_SECONDS, open_engine
from tests.fakes.fates import Fates
from tests.long import all_but_long
from tests.models.harness import randomize, save
from tests.models.vision_models import (
    BOUND,
    IMAGE_TOKEN,
    PROCESSOR,
    expected_features,
    moved,
    qwen2_5_vl,
    qwen3_5,
    qwen3_5_moe,
    qwen3_vl,
    qwen3_vl_moe,
    random_model,
    save_chat,
)
from tests.models.vision_models import IMAGE_END as END
from tests.models.vision_models import IMAGE_START as START
from tests.multimodal.pictures import draw, encoded

NUM_TOKENS = 6
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
WIDE, TALL, SMALL = (draw(seed, size=size) for seed, size in ((1, (48, 24)), (2, (16, 40)), (3, (8, 8))))


def prompt(*parts: int | Image.Image) -> dict[str, Any]:
    """A prompt of tokens and images."""
    token_ids: list[int] = []
    for part in parts:
        token_ids += [part] if isinstance(part, int) else [START, IMAGE_TOKEN, END]
    images = [part for part in parts if not isinstance(part, int)]
    return {"prompt_token_ids": token_ids, "multi_modal_data": {"image": images}}


PROMPTS = [
    prompt(5, 6, 7, WIDE, 8, 9),
    prompt(WIDE, 8, TALL, TALL, 5),
    prompt(5, 6, 7, TALL, 8, 9),
    {"prompt_token_ids": [5, 6, 7, 8, 9, 10, 11]},
    prompt(*range(10, 40), SMALL, 3, WIDE),
]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return randomize(qwen3_vl())


@pytest.fixture(scope="module")
def directory(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save(model, tmp_path_factory.mktemp("qwen3-vl"))
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return path


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> list[list[int]]:
    """Transformers' greedy tokens."""
    found = [generated(model, each) for each in PROMPTS]
    assert found[0] != found[2], "the image matters"
    return found


def generated(model: PreTrainedModel, given: dict[str, Any]) -> list[int]:
    return continued(model, given)[0]


def continued(model: PreTrainedModel, given: dict[str, Any]) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens, and the log-probabilities of all tokens at their places, [NUM_TOKENS, vocabulary]."""
    images = given.get("multi_modal_data", {}).get("image", [])
    token_ids, options = given["prompt_token_ids"], {}
    if images:
        features = Qwen2VLImageProcessorPil(**PROCESSOR)(images=images, return_tensors="pt")
        counts = iter((features["image_grid_thw"].prod(-1) // 4).tolist())
        token_ids = [
            token for each in token_ids for token in ([each] * next(counts) if each == IMAGE_TOKEN else [each])
        ]
        types = torch.tensor([[int(token == IMAGE_TOKEN) for token in token_ids]])
        options = {**features, "mm_token_type_ids": types}
    ids = torch.tensor([token_ids])
    with torch.inference_mode():
        options |= {"do_sample": False, "return_dict_in_generate": True, "output_scores": True}
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, **options)
    return found.sequences[0, len(token_ids) :].tolist(), torch.cat(found.scores).log_softmax(-1)


def engine(directory: Path, **options: Any) -> LLM:
    settings = {"max_num_seqs": 4, "num_blocks_override": 120, "block_size": 4, "skip_tokenizer_init": True}
    return LLM(str(directory), **{**settings, "dtype": "float32", "matmul_precision": "float32", **options})


def tokens(llm: LLM, prompts: Sequence[dict[str, Any]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(list(prompts), params, use_tqdm=False)]


@pytest.fixture(scope="module", params=["torch", "native"])
def llm(request: pytest.FixtureRequest, directory: Path) -> Iterator[LLM]:
    with engine(directory, attention_backend=request.param, max_num_batched_tokens=16) as opened:
        yield opened


def test_tokens_are_those_of_transformers(llm: LLM, expected: list[list[int]]) -> None:
    """In chunks that end inside images, beside other prompts; then from the prefix cache; then each alone."""
    assert tokens(llm, PROMPTS) == expected
    assert tokens(llm, PROMPTS) == expected
    llm.reset_prefix_cache()
    assert [tokens(llm, [each])[0] for each in PROMPTS] == expected


def test_preempted_and_swapped_prompts(directory: Path, expected: list[list[int]]) -> None:
    """Too few blocks for all: prompts are computed again, or come back from the host."""
    for swap in (0, 2**20):
        with engine(directory, num_blocks_override=24, max_num_batched_tokens=16, swap_space=swap) as llm:
            assert tokens(llm, PROMPTS[:4] * 2) == expected[:4] * 2
            assert llm.stats()["preemptions_total"] > 0


def test_features_that_are_dropped_are_made_again(
    directory: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for one at a time, which several requests want: each gets on."""
    monkeypatch.setattr("quire.config.vision.CACHE_BYTES", 0)
    with engine(directory, max_num_batched_tokens=8) as llm:
        assert tokens(llm, PROMPTS * 2) == expected * 2
        assert num_encoded(llm) > 3


def test_equal_images_are_encoded_once_and_hits_encode_none(directory: Path) -> None:
    with engine(directory) as llm:
        tokens(llm, [PROMPTS[1]])
        assert num_encoded(llm) == 2, "two of the three are one"
        stats = llm.stats()
        assert (stats["encoded_images_total"], stats["num_encoder_tokens"]) == (2, 18 + 10)
        assert stats["encoder_seconds_total"] > 0
        tokens(llm, [PROMPTS[1]])
        tokens(llm, [prompt(7, TALL)])
        assert num_encoded(llm) == 2
        assert llm.stats()["prefix_cache_hits_total"] > 0


def test_images_of_equal_size_share_what_is_before_them_alone(directory: Path, model: PreTrainedModel) -> None:
    """The same tokens, and other pictures: in the first, in the second, in their order."""
    other = draw(9, size=WIDE.size)
    before = range(10, 21)
    given = [prompt(*before, *images, 5) for images in ((WIDE, WIDE), (WIDE, other), (other, WIDE), (other, other))]
    with engine(directory) as llm:
        assert [tokens(llm, [each])[0] for each in given] == [generated(model, each) for each in given]
        hits = llm.stats()["prefix_cache_hits_total"]
        assert hits >= 3 * 8 + 8, "the text before, and the first picture of an earlier prompt"


def test_a_chat_that_grows_by_a_picture(directory: Path, model: PreTrainedModel) -> None:
    """What was cached before is found, although the positions behind all pictures are others."""
    parts: list[Any] = [*range(10, 16)]
    with engine(directory) as llm:
        num_cached = 0
        for turn in range(3):
            parts += [(WIDE, TALL, SMALL)[turn], 20 + turn, 30 + turn]
            before = llm.stats()["prefix_cache_hits_total"]
            (output,) = llm.generate([prompt(*parts)], GREEDY, use_tqdm=False)
            assert list(output.outputs[0].token_ids) == generated(model, prompt(*parts))
            assert llm.stats()["prefix_cache_hits_total"] - before >= num_cached
            num_cached = len(output.prompt_token_ids or ()) // 4 * 4
        assert num_cached > 40


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_bits_do_not_depend_on_slices(
    directory: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """All layers of an image in one step, and one layer in each: log-probabilities have the same bits."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)
    found = []
    for cost in (1, 10**6):
        monkeypatch.setattr(EncoderCosts, "layer_tokens", lambda self, grid, cost=cost: cost)
        with engine(directory, attention_backend=backend) as llm:
            outputs = [each.outputs[0] for each in llm.generate(PROMPTS, params, use_tqdm=False)]
            found.append([each.logprobs for each in outputs])
            assert [list(each.token_ids) for each in outputs] == expected
            steps = llm.stats()["steps_total"]
    assert found[0] == found[1]
    assert steps > 4 * 3


STATES = {"num_blocks_override": None, "kv_cache_memory": 2**23, "state_snapshot_interval": 64}


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (qwen3_vl, {}),
        (qwen3_vl_moe, {}),
        (qwen2_5_vl, {}),
        (qwen2_5_vl, {"attention_backend": "torch"}),
        (qwen3_5, STATES),
        pytest.param(qwen3_5_moe, STATES, marks=pytest.mark.long),
    ],
    ids=["deep-stack", "experts", "windows", "windows by torch", "states", "states and experts"],
)
def test_log_probabilities_of_families(
    build: Callable[[], PreTrainedModel], options: dict[str, Any], tmp_path: Path
) -> None:
    """In chunks that end inside images, then behind hits, which may end there too."""
    model = random_model(build)
    save(model, tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    prompts = [*PROMPTS, prompt(*range(10, 65), WIDE, 3)]  # states are kept at 64 tokens
    references = [continued(model, each) for each in prompts]
    expected = [token_ids for token_ids, _ in references]
    assert expected[0] != expected[2], "the image matters"
    with engine(tmp_path, max_num_batched_tokens=16, **options) as llm:
        outputs = llm.generate(prompts, msgspec.structs.replace(GREEDY, logprobs=5), use_tqdm=False)
        assert [list(each.outputs[0].token_ids) for each in outputs] == expected
        for output, (_, scores) in zip(outputs, references, strict=True):
            for likely, row in zip(output.outputs[0].logprobs or (), scores, strict=True):
                found = {token_id: row[token_id].item() for token_id in likely}
                assert {token_id: each.logprob for token_id, each in likely.items()} == pytest.approx(found, abs=BOUND)
        before = llm.stats()["prefix_cache_hits_total"]
        assert tokens(llm, prompts) == expected
        assert llm.stats()["prefix_cache_hits_total"] - before >= 64


@pytest.mark.parametrize(
    "build",
    all_but_long([qwen3_vl, qwen3_vl_moe, qwen2_5_vl, qwen3_5, qwen3_5_moe], [qwen3_vl]),
    ids=lambda build: build.__name__,
)
def test_rounding_decides_no_comparison(build: Callable[[], PreTrainedModel]) -> None:
    """Weights that differ by 128 times their rounding, beside which a processor's own is small, move log-probabilities
    by less than 128 twentieths of the bound and choose the same tokens and experts."""
    model = random_model(build)
    other = moved(model, 128 * 2**-24)
    for each in PROMPTS:
        (token_ids, scores), (found, moved_scores) = continued(model, each), continued(other, each)
        assert found == token_ids
        likely = scores.topk(5).indices
        assert float((scores - moved_scores).gather(1, likely).abs().max()) < 128 * BOUND / 20
        assert float(scores.std(-1).min()) > 0.5, "too flat to compare"


@pytest.mark.parametrize(
    "options",
    [
        {"queue_depth": 2},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}},
        {"quantization": "w8a8", "dtype": "bfloat16", "matmul_precision": "auto"},
    ],
    ids=["two steps in flight", "drafts", "quantised"],
)
def test_tokens_do_not_depend_on_chunks_and_neighbours(directory: Path, options: dict[str, Any]) -> None:
    with engine(directory, max_num_batched_tokens=16, **options) as llm:
        beside = tokens(llm, PROMPTS)
        assert tokens(llm, PROMPTS) == beside
    with engine(directory, enable_prefix_caching=False, **options) as llm:
        assert [tokens(llm, [each])[0] for each in PROMPTS] == beside


@pytest.mark.parametrize("backend", [pytest.param("torch", marks=pytest.mark.long), "native"])
def test_two_ranks(directory: Path, expected: list[list[int]], backend: str) -> None:
    """Each encodes some of the images, and gets the others' features (tests/worker/test_images.py has their bits)."""
    with engine(directory, tensor_parallel_size=2, attention_backend=backend, max_num_batched_tokens=16) as llm:
        assert tokens(llm, PROMPTS) == expected
        assert tokens(llm, PROMPTS[:1]) == expected[:1]


def test_blocks_come_back_from_disk(directory: Path, expected: list[list[int]], tmp_path: Path) -> None:
    """They are found by the pictures' content, in another engine, whose tower then has nothing to do."""
    options = {"kv_offload_dir": str(tmp_path), "swap_space": 2**22, "num_blocks_override": 40}
    with engine(directory, **options) as llm:
        assert tokens(llm, PROMPTS) == expected
    with engine(directory, **options) as llm:
        assert tokens(llm, [PROMPTS[2]]) == [expected[2]]
        assert tokens(llm, [PROMPTS[0]]) == [expected[0]]


def test_several_samples_and_scored_prompts(llm: LLM, expected: list[list[int]]) -> None:
    params = SamplingParams(temperature=0, n=2, max_tokens=NUM_TOKENS, ignore_eos=True, prompt_logprobs=0)
    (output,) = llm.generate([PROMPTS[1]], params, use_tqdm=False)
    assert [list(each.token_ids) for each in output.outputs] == [expected[1]] * 2
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids or ())
    beams = SamplingParams(temperature=0, n=2, use_beam_search=True, max_tokens=3)
    alone = [each.token_ids for each in llm.generate([PROMPTS[1]], beams, use_tqdm=False)[0].outputs]
    beside = llm.generate([PROMPTS[0], PROMPTS[1]], beams, use_tqdm=False)[1].outputs
    assert [each.token_ids for each in beside] == alone


def test_placeholders_may_be_written_out(llm: LLM, expected: list[list[int]]) -> None:
    written = prompt(5, 6, 7, WIDE, 8, 9)
    token_ids = written["prompt_token_ids"]
    place = token_ids.index(IMAGE_TOKEN)
    written["prompt_token_ids"] = [*token_ids[:place], *[IMAGE_TOKEN] * 18, *token_ids[place + 1 :]]
    assert tokens(llm, [written]) == expected[:1]


def test_forms_of_a_picture(llm: LLM, expected: list[list[int]]) -> None:
    forms: list[Any] = [np.asarray(WIDE), torch.from_numpy(np.asarray(WIDE).copy()), encoded(WIDE)]
    forms.append(f"data:image/png;base64,{base64.b64encode(encoded(WIDE)).decode()}")
    for form in forms:
        given = prompt(5, 6, 7, WIDE, 8, 9)
        given["multi_modal_data"]["image"] = form  # not in a list
        assert tokens(llm, [given]) == expected[:1]


def test_arrays_of_pictures(llm: LLM, expected: list[list[int]]) -> None:
    """A batch is one picture for each place; numbers of another type are pixels if they are bytes."""
    batch = np.stack([np.asarray(TALL)] * 2)
    whole = prompt(WIDE, 8, TALL, TALL, 5)
    for given in (batch, torch.from_numpy(batch), batch.astype(np.float32)):
        two = prompt(8, TALL, TALL, 5)
        wanted = tokens(llm, [two])
        assert tokens(llm, [two | {"multi_modal_data": {"image": given}}]) == wanted
    floats = [np.asarray(each, np.float32) for each in (WIDE, TALL, TALL)]
    assert tokens(llm, [whole | {"multi_modal_data": {"image": floats}}]) == expected[1:2]


def test_sizes_that_are_planned(directory: Path, expected: list[list[int]]) -> None:
    """An image of another shape is taken if its tokens are as few; one with more is named, as its features are."""
    limits = {"image": {"count": 3, "width": 40, "height": 16}}
    with engine(directory, limit_mm_per_prompt=limits, enable_mm_embeds=True) as llm:
        with pytest.raises(UserError, match="an image of 18 tokens is larger than the 10 that") as caught:
            tokens(llm, [prompt(5, TALL, WIDE)])
        assert caught.value.param == "multi_modal_data.image[1]"
        assert tokens(llm, [PROMPTS[2]]) == expected[2:3]
        features = {"image_embeds": torch.zeros(18, 144), "image_grid_thw": [1, 6, 12]}
        with pytest.raises(UserError, match="an image of 18 tokens"):
            tokens(llm, [PROMPTS[0] | {"multi_modal_data": {"image": features}}])
        with pytest.raises(UserError, match="at most 3 images"):
            tokens(llm, [prompt(TALL, TALL, TALL, TALL)])


def test_options_of_a_call(llm: LLM) -> None:
    """Of a prompt, and of all prompts of a call that have none; within the engine's."""
    few, many = {"max_pixels": 600}, {"max_pixels": 10**6}
    wide = prompt(5, WIDE)
    for given, options, count in (
        ({**wide, "mm_processor_kwargs": few}, {}, 8),
        (wide, {"mm_processor_kwargs": few}, 8),
        ({**wide, "mm_processor_kwargs": many}, {"mm_processor_kwargs": few}, 18),
        (wide, {"mm_processor_kwargs": many}, 18),
        (wide, {"mm_processor_kwargs": None}, 18),
    ):
        (output,) = llm.generate([given], GREEDY, use_tqdm=False, **options)
        assert (output.prompt_token_ids or []).count(IMAGE_TOKEN) == count


def test_pictures_by_their_names(llm: LLM, expected: list[list[int]]) -> None:
    """A name finds the picture that was sent last under it, in the same salt, in every form of a picture."""
    image, other = (prompt(5, 6, 7, each, 8, 9) for each in (WIDE, TALL))
    forms: list[Any] = [WIDE.copy(), np.array(WIDE), encoded(WIDE)]
    again = {**image, "multi_modal_data": {"image": [None]}, "multi_modal_uuids": {"image": ["a"]}}
    for form in forms:
        named = {**image, "multi_modal_data": {"image": form}, "multi_modal_uuids": {"image": "a"}}
        assert tokens(llm, [{**other, "multi_modal_uuids": {"image": ["a"]}}]) == expected[2:3], "not the one before"
        assert tokens(llm, [named]) == expected[:1]
        if not isinstance(form, bytes):  # the caller's own, which may change
            form.paste(0, (0, 0, 8, 8)) if isinstance(form, Image.Image) else form.fill(0)
        assert tokens(llm, [again, {**again, "multi_modal_data": None}]) == expected[:1] * 2
    with pytest.raises(UserError, match="no picture is known by the uuid 'a'"):
        tokens(llm, [{**again, "cache_salt": "other"}])


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_features_of_a_client(directory: Path, model: PreTrainedModel, expected: list[list[int]], backend: str) -> None:
    """The tower's own, those of its deep-stack layers beside them, give the tokens of the pictures."""
    parts = []
    for image in (WIDE, TALL):
        inputs = Qwen2VLImageProcessorPil(**PROCESSOR)(images=[image], return_tensors="pt")
        (features,) = expected_features(model, inputs["pixel_values"], inputs["image_grid_thw"].tolist())
        parts.append({"image_embeds": features, "image_grid_thw": inputs["image_grid_thw"]})
    wide, tall = parts
    given = [{**PROMPTS[0], "multi_modal_data": {"image": wide}}, PROMPTS[0]]
    given.append({**PROMPTS[1], "multi_modal_data": {"image": [wide, TALL, tall]}})
    with engine(directory, enable_mm_embeds=True, attention_backend=backend, max_num_batched_tokens=16) as llm:
        assert tokens(llm, given) == [expected[0], expected[0], expected[1]]
        assert tokens(llm, given[:1]) == expected[:1]
        with pytest.raises(UserError, match="features of an image have no uuid"):
            tokens(llm, [{**given[0], "multi_modal_uuids": {"image": "a"}}])
    with engine(directory) as llm, pytest.raises(UserError, match="needs enable_mm_embeds"):
        tokens(llm, given[:1])


@pytest.mark.parametrize(
    ("change", "message", "param"),
    [
        (
            {"multi_modal_data": {"image": [WIDE, WIDE]}},
            "1 placeholders .token 90., and 2 images",
            "multi_modal_data.image",
        ),
        ({"multi_modal_data": {"image": ["x"]}}, "must be data:image", "multi_modal_data.image[0]"),
        ({"multi_modal_data": {"image": [b"x"]}}, "damaged", "multi_modal_data.image[0]"),
        (
            {"multi_modal_data": {"image": [np.asarray(WIDE) / 255]}},
            "array of float64 must hold whole numbers",
            "multi_modal_data.image[0]",
        ),
        ({"multi_modal_data": {"image": draw(1, size=(900, 2))}}, "200 times", "multi_modal_data.image[0]"),
        ({"multi_modal_data": {"audio": [1]}}, "multi_modal_data.audio is not supported", "multi_modal_data.audio"),
        ({"multi_modal_data": {"video": [1]}}, "this model takes no videos", "multi_modal_data.video[0]"),
        ({"multi_modal_data": [WIDE]}, "must be an object", "multi_modal_data"),
        ({"mm_processor_kwargs": {"pixels": 5}}, "mm_processor_kwargs has no 'pixels'", "mm_processor_kwargs"),
        ({"mm_processor_kwargs": 5}, "mm_processor_kwargs must be an object", "mm_processor_kwargs"),
        ({"multi_modal_uuids": {"image": ["a", "b"]}}, "2 names for 1 images", "multi_modal_uuids.image"),
        ({"multi_modal_uuids": {"video": ["a"]}}, "videos have no uuid", "multi_modal_uuids.video"),
        ({"multi_modal_uuids": {"image": [""]}}, "1 to 1024 characters", "multi_modal_data.image[0]"),
        ({"multi_modal_data": None, "multi_modal_uuids": {"image": "?"}}, "known by", "multi_modal_data.image[0]"),
        ({"prompt_token_ids": [5] * 245 + [IMAGE_TOKEN]}, "the prompt has 263 tokens", "prompt"),
    ],
)
def test_errors_name_the_field(llm: LLM, change: dict[str, Any], message: str, param: str) -> None:
    given = prompt(5, WIDE) | change
    with pytest.raises(UserError, match=message) as caught:
        tokens(llm, [given], SamplingParams(max_tokens=1))
    assert caught.value.param == param


def test_a_model_without_settings_of_images_is_one_of_text(
    directory: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(directory / name)
    with engine(tmp_path) as llm:
        assert tokens(llm, [PROMPTS[3]]) == [expected[3]]
        with pytest.raises(UserError, match=r"has no preprocessor_config\.json"):
            tokens(llm, [PROMPTS[0]])
        with pytest.raises(UserError, match=r"has no preprocessor_config\.json"):
            llm.register_prefix(PROMPTS[0])  # type: ignore[arg-type]


async def tokens_of(engine: AsyncLLM, given: Any) -> list[int]:
    async for output in engine.generate(given, GREEDY):
        last = output
    return list(last.outputs[0].token_ids)


def settings_of(directory: Path) -> dict[str, Any]:
    exact = {"dtype": "float32", "matmul_precision": "float32", "num_threads": 1, "skip_tokenizer_init": True}
    return {"model": str(directory), "num_blocks_override": 120, "block_size": 4, "max_num_batched_tokens": 8, **exact}


@pytest.mark.parametrize("deaths", all_but_long([[2], [2, 20]], [[2]]), ids=str)
async def test_an_engine_after_one_that_was_killed_gets_the_pictures_again(
    directory: Path, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: list[int]
) -> None:
    """The first dies while it encodes, a second one while it generates."""
    fates = Fates(tmp_path, monkeypatch)
    fates.are(*(("die", step) for step in deaths))
    engine = open_engine(settings_of(directory))
    try:
        async with asyncio.timeout(GUARD_SECONDS):
            assert await asyncio.gather(*(tokens_of(engine, each) for each in PROMPTS)) == expected
        assert (engine.num_restarts, fates.num_left) == (len(deaths), 0)
    finally:
        engine.shutdown()


async def test_a_request_that_is_left_is_encoded_no_further(
    directory: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EncoderCosts, "layer_tokens", lambda self, grid: 10**6)  # one layer a step
    engine = AsyncLLM.from_options(EngineOptions.from_keywords(settings_of(directory)), in_process=True)
    begun, may_go_on, follow = threading.Event(), threading.Event(), ImageOverlays._follow

    def held(images: ImageOverlays, orders: ImageOrders) -> None:
        follow(images, orders)
        if orders.slices:
            begun.set()
            may_go_on.wait()

    monkeypatch.setattr(ImageOverlays, "_follow", held)
    try:
        for _ in range(3):
            begun.clear()
            may_go_on.clear()
            leaving = asyncio.ensure_future(tokens_of(engine, PROMPTS[1]))
            assert await asyncio.to_thread(begun.wait, GUARD_SECONDS)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            may_go_on.set()
            assert await tokens_of(engine, PROMPTS[0]) == expected[0]
            stats = await engine.stats()
            assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
        assert await tokens_of(engine, PROMPTS[1]) == expected[1]
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def chatting(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The same model with a tokenizer and a template."""
    with engine(save_chat(model, tmp_path_factory.mktemp("qwen3-vl-chat")), skip_tokenizer_init=False) as llm:
        yield llm


def picture(image: Image.Image) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(encoded(image)).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def test_a_text_with_placeholders(chatting: LLM, expected: list[list[int]]) -> None:
    given = {"prompt": "w5 w6 w7 <s> <image> </s> w8 w9", "multi_modal_data": {"image": WIDE}}
    assert tokens(chatting, [given]) == expected[:1]


def test_a_chat_with_pictures(chatting: LLM, model: PreTrainedModel) -> None:
    """In several messages, also in what a tool returns, in every form of a part."""
    text = {"type": "text", "text": "w5"}
    messages = [
        {"role": "user", "content": [text, picture(WIDE), {"type": "image_pil", "image_pil": TALL}]},
        {"role": "assistant", "content": "w6"},
        {"role": "tool", "content": [{"type": "image", "image": np.asarray(SMALL)}, text]},
    ]
    (output,) = chatting.chat(messages, GREEDY, use_tqdm=False)
    same = prompt(5, WIDE, TALL, 6, SMALL, 5, 8)
    assert list(output.outputs[0].token_ids) == generated(model, same)
    assert len(output.prompt_token_ids or ()) == 4 + 3 * 2 + 18 + 10 + 1


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            {"type": "image_url", "image_url": {"url": "https://example.com/x.png"}},
            r"content\[0\]\.image_url: images of 'example\.com' are not fetched",
        ),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, r"image_url: files are not read"),
        ({"type": "image_url", "image_url": {"url": "ftp://x/y"}}, r"image_url: a URL of an image must be data:image"),
        (
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
            r"content\[0\]\.image_url: the image is damaged",
        ),
        ({"type": "image_url"}, r"messages\[0\]\.content\[0\]: .* needs a image_url"),
        (
            {"type": "image_url", "image_url": {"url": "data:,", "detail": "much"}},
            r"content\[0\]\.image_url: detail must be one of",
        ),
        ({"type": "video_url", "video_url": {"url": "x"}}, "this model takes no videos"),
    ],
)
def test_parts_that_are_refused(chatting: LLM, part: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        chatting.chat([{"role": "user", "content": [part]}], GREEDY, use_tqdm=False)


def test_options_of_a_chat(chatting: LLM) -> None:
    messages = [{"role": "user", "content": [{"type": "image_pil", "image_pil": WIDE}]}]
    (output,) = chatting.chat(messages, GREEDY, use_tqdm=False, mm_processor_kwargs={"max_pixels": 600})
    assert (output.prompt_token_ids or []).count(IMAGE_TOKEN) == 8


def test_a_template_that_takes_text_alone_refuses_pictures(chatting: LLM) -> None:
    with pytest.raises(UserError, match="refuses these messages: it takes text alone"):
        chatting.chat(
            [{"role": "user", "content": [picture(WIDE)]}],
            GREEDY,
            use_tqdm=False,
            chat_template="{% for message in messages %}{{ message.content }}{% endfor %}",
        )


def num_encoded(llm: LLM) -> int:
    """Images whose encoding has begun."""
    scheduler = llm._client._core.scheduler  # type: ignore[attr-defined]
    assert isinstance(scheduler, Scheduler)
    return scheduler._images.num_begun
