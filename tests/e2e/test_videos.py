"""Videos in prompts: tokens and log-probabilities are Transformers', whatever the chunks and the caches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import PreTrainedModel

from quire.errors import UserError
from quire.llm import LLM
from tests.e2e.test_images import (
    GREEDY,
    NUM_TOKENS,
    STATES,
    TALL,
    WIDE,
    engine,
    settings_of,
    tokens,
    tokens_of,
)
from tests.e2e.test_restart import GUARD_SECONDS, open_engine
from tests.fakes.fates import Fates
from tests.long import all_but_long
from tests.models.vision_models import (
    BOUND,
    IMAGE_END,
    IMAGE_START,
    IMAGE_TOKEN,
    qwen2_5_vl,
    qwen3_5,
    qwen3_vl,
    random_model,
    rotary_positions,
    save_chat,
)
from tests.multimodal.pictures import draw

VIDEO_TOKEN = 91
TIMES = {"seconds>": 60, "<0.0": 61, "<0.1": 62, "<0.2": 63, "<0.3": 64, "<0.4": 67, "<1.0": 65, "<3.0": 66}
"""Words of the times, each of which is one token."""
TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}{% if part.type == 'video' %}<s> <video> </s>"
    "{% elif part.type == 'image' %}<s> <image> </s>{% else %}{{ part.text }}{% endif %} {% endfor %}{% endfor %}w8"
)
SIZES = {"size": {"shortest_edge": 64, "longest_edge": 4096}}
FRAMES = [draw(seed, size=(32, 16)) for seed in range(10, 18)]
SHORT = [draw(seed, size=(16, 24)) for seed in range(20, 23)]
Clip = tuple[list[Image.Image], list[float]]
"""Frames and times of the parts."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return with_videos(qwen3_vl)


def with_videos(build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    model = random_model(build)
    model.config.video_token_id, model.config.vision_start_token_id = VIDEO_TOKEN, IMAGE_START
    model.config.vision_end_token_id = IMAGE_END
    return model


def save_video_chat(model: PreTrainedModel, path: Path) -> Path:
    save_chat(model, path, TEMPLATE)
    (path / "video_preprocessor_config.json").write_text(json.dumps(SIZES))
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    taken = {**TIMES, "<video>": VIDEO_TOKEN}
    kept = {word: number for word, number in words.items() if number not in taken.values()}
    tokenizer["model"]["vocab"] = kept | taken
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


@pytest.fixture(scope="module")
def directory(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_video_chat(model, tmp_path_factory.mktemp("qwen3-vl-video"))


@pytest.fixture(scope="module", params=["torch", "native"])
def llm(request: pytest.FixtureRequest, directory: Path) -> Iterator[LLM]:
    options = {"attention_backend": request.param, "max_num_batched_tokens": 16}
    with engine(directory, skip_tokenizer_init=False, **options) as opened:
        yield opened


def patches(frames: Sequence[Image.Image]) -> tuple[torch.Tensor, list[int]]:
    """Patches and grid as Qwen3VLVideoProcessor.patchify computes them of frames that need no resizing."""
    values = torch.from_numpy(np.stack([np.asarray(frame) for frame in frames])).permute(0, 3, 1, 2).float()
    values = (values / 255 - 0.5) / 0.5
    if len(values) % 2:
        values = torch.cat((values, values[-1:]))
    steps, rows, columns = len(values) // 2, values.shape[2] // 4, values.shape[3] // 4
    values = values.view(1, steps, 2, 3, rows // 2, 2, 4, columns // 2, 2, 4)
    values = values.permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9)
    return values.reshape(steps * rows * columns, -1), [steps, rows, columns]


def written(*parts: int | Image.Image | Clip) -> tuple[list[int], dict[str, Any]]:
    """Tokens of a prompt with all placeholders and times, and Transformers' other inputs."""
    token_ids: list[int] = []
    given: dict[bool, list[tuple[torch.Tensor, list[int]]]] = {False: [], True: []}
    for part in parts:
        if isinstance(part, int):
            token_ids.append(part)
            continue
        is_video = isinstance(part, tuple)
        rows, grid = patches(part[0] if isinstance(part, tuple) else [part])
        given[is_video].append((rows, grid))
        count = grid[1] * grid[2] // 4
        for time in part[1] if isinstance(part, tuple) else [None]:
            token_ids += [] if time is None else [TIMES[f"<{time:.1f}"], TIMES["seconds>"]]
            token_ids += [IMAGE_START, *[VIDEO_TOKEN if is_video else IMAGE_TOKEN] * count, IMAGE_END]
    options: dict[str, Any] = {}
    for is_video, names in (
        (False, ("pixel_values", "image_grid_thw")),
        (True, ("pixel_values_videos", "video_grid_thw")),
    ):
        if given[is_video]:
            options[names[0]] = torch.cat([rows for rows, _ in given[is_video]])
            options[names[1]] = torch.tensor([grid for _, grid in given[is_video]])
    ids = torch.tensor([token_ids])
    options["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int() + 2 * (ids == VIDEO_TOKEN).int()
    return token_ids, options


def continued(model: PreTrainedModel, *parts: int | Image.Image | Clip) -> tuple[list[int], torch.Tensor]:
    """Transformers' greedy tokens behind a prompt, and the log-probabilities at their places."""
    token_ids, options = written(*parts)
    ids = torch.tensor([token_ids])
    options |= {"do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    with torch.inference_mode():
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, **options)
    return found.sequences[0, len(token_ids) :].tolist(), torch.cat(found.scores).log_softmax(-1)


MARKED = [IMAGE_START, VIDEO_TOKEN, IMAGE_END]
LISTED = {"do_sample_frames": False}


def prompts() -> list[tuple[dict[str, Any], tuple[Any, ...]]]:
    """Prompts, and what they mean: frames that are sampled, given times, an odd number, an image beside, two videos."""
    sampled = [FRAMES[0], FRAMES[2], FRAMES[5], FRAMES[7]]
    timed = FRAMES[:4], {"fps": 1.0, "frames_indices": [0, 2, 2, 4], **LISTED}
    image = [IMAGE_START, IMAGE_TOKEN, IMAGE_END]
    return [
        (
            {"prompt_token_ids": [5, *MARKED, 6], "multi_modal_data": {"video": FRAMES}},
            (5, (sampled, [1 / 24, 0.25]), 6),
        ),
        (
            {"prompt_token_ids": [5, VIDEO_TOKEN, 6], "multi_modal_data": {"video": [timed]}},
            (5, (FRAMES[:4], [1.0, 3.0]), 6),
        ),
        (
            {
                "prompt_token_ids": [*image, 7, *MARKED, 8, *image, *MARKED],
                "multi_modal_data": {
                    "image": [WIDE, TALL],
                    "video": [(np.stack([np.asarray(each) for each in SHORT]), LISTED), (FRAMES[4:6], LISTED)],
                },
            },
            (WIDE, 7, (SHORT, [1 / 48, 2 / 24]), 8, TALL, (FRAMES[4:6], [1 / 48])),
        ),
        ({"prompt_token_ids": [5, 6, 7]}, (5, 6, 7)),
    ]


@pytest.fixture(scope="module")
def references(model: PreTrainedModel) -> list[tuple[list[int], torch.Tensor]]:
    return [continued(model, *parts) for _, parts in prompts()]


def check(outputs: Sequence[Any], references: Sequence[tuple[list[int], torch.Tensor]]) -> None:
    for output, (token_ids, scores) in zip(outputs, references, strict=True):
        assert list(output.outputs[0].token_ids) == token_ids
        for likely, row in zip(output.outputs[0].logprobs or (), scores, strict=True):
            found = {token_id: row[token_id].item() for token_id in likely}
            assert {token_id: each.logprob for token_id, each in likely.items()} == pytest.approx(found, abs=BOUND)


def test_log_probabilities_are_those_of_transformers(
    llm: LLM, references: list[tuple[list[int], torch.Tensor]]
) -> None:
    """In chunks that end inside parts, beside others; from the prefix cache; and each alone."""
    params = msgspec.structs.replace(GREEDY, logprobs=5)
    given = [prompt for prompt, _ in prompts()]
    outputs = llm.generate(given, params, use_tqdm=False)
    check(outputs, references)
    hits = llm.stats()["prefix_cache_hits_total"]
    again = llm.generate(given, params, use_tqdm=False)
    assert llm.stats()["prefix_cache_hits_total"] - hits > 60
    llm.reset_prefix_cache()
    alone = [llm.generate([each], params, use_tqdm=False)[0] for each in given]
    for output, *others in zip(outputs, again, alone, strict=True):
        for other in others:
            assert other.outputs[0].logprobs == output.outputs[0].logprobs, "other bits"


def test_states(tmp_path: Path) -> None:
    """Qwen 3.5, whose layers keep states; its prompts have all placeholders, as they must without a tokenizer."""
    model = with_videos(qwen3_5)
    directory = save_video_chat(model, tmp_path)
    given = [{**prompt, "prompt_token_ids": written(*parts)[0]} for prompt, parts in prompts()]
    with engine(directory, max_num_batched_tokens=16, **STATES) as llm:
        outputs = llm.generate(given, msgspec.structs.replace(GREEDY, logprobs=5), use_tqdm=False)
    check(outputs, [continued(model, *parts) for _, parts in prompts()])


def timed(*parts: int | Image.Image | list[Image.Image]) -> tuple[list[int], dict[str, Any]]:
    """As `written` for Qwen2.5-VL: a video's placeholders between one pair of marks."""
    token_ids: list[int] = []
    _, options = written(*[(part, [0.0]) if isinstance(part, list) else part for part in parts])
    for part in parts:
        if isinstance(part, int):
            token_ids.append(part)
            continue
        rows, _ = patches(part if isinstance(part, list) else [part])
        token = VIDEO_TOKEN if isinstance(part, list) else IMAGE_TOKEN
        token_ids += [IMAGE_START, *[token] * (len(rows) // 4), IMAGE_END]
    ids = torch.tensor([token_ids])
    return token_ids, options | {"mm_token_type_ids": (ids == IMAGE_TOKEN).int() + 2 * (ids == VIDEO_TOKEN).int()}


def of_times(model: PreTrainedModel, rates: Sequence[float], *parts: Any) -> tuple[list[int], torch.Tensor]:
    """As `continued` for Qwen2.5-VL. rates: frames of a second of each video."""
    token_ids, options = timed(*parts)
    seconds = [2 / rate for rate in rates]
    options |= {"second_per_grid_ts": torch.tensor(seconds)} if seconds else {}
    ids = torch.tensor([token_ids])
    options |= {"do_sample": False, "return_dict_in_generate": True, "output_scores": True}

    def positions(ids: torch.Tensor, mm_token_type_ids: torch.Tensor, **given: Any) -> Any:
        grids = {
            kind: given[name].tolist() if given.get(name) is not None else []
            for kind, name in ((1, "image_grid_thw"), (2, "video_grid_thw"))
        }
        return rotary_positions(model, mm_token_type_ids, grids, [2 * each for each in seconds])

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        if min(rates, default=4) < 2:  # times outgrow rows and columns: see rotary_positions
            patch.setattr(model.model, "get_rope_index", positions)
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, **options)
    return found.sequences[0, len(token_ids) :].tolist(), torch.cat(found.scores).log_softmax(-1)


def test_times_in_place_of_marks(tmp_path: Path) -> None:
    """Qwen2.5-VL: an odd number of frames, sampled ones, several videos and images with text between; times that are
    fractions, and that outgrow rows and columns. In chunks, beside others, from the prefix cache, each alone."""
    model = with_videos(lambda: qwen2_5_vl(tokens_per_second=2))
    directory = save_video_chat(model, tmp_path)
    image = [IMAGE_START, IMAGE_TOKEN, IMAGE_END]
    sampled = FRAMES, {"fps": 2.5, "do_sample_frames": True}  # six frames of 3.2 seconds
    known = FRAMES[:3], {"fps": 4.0, "frames_indices": [0, 2, 4], "total_num_frames": 5}
    given = [
        (
            {"prompt_token_ids": [5, *MARKED, 6, 7], "multi_modal_data": {"video": [(FRAMES[:5], {"fps": 4})]}},
            ([4.0], 5, FRAMES[:5], 6, 7),
        ),
        (
            {
                "prompt_token_ids": [*image, 7, *MARKED, 8, *image, *MARKED, 9],
                "multi_modal_data": {"image": [WIDE, TALL], "video": [sampled, known]},
            },
            (
                [6 / 8 * 2.5, 3 / 5 * 4.0],
                WIDE,
                7,
                [FRAMES[each] for each in (0, 1, 2, 4, 5, 6)],
                8,
                TALL,
                FRAMES[:3],
                9,
            ),
        ),
        ({"prompt_token_ids": [5, *MARKED, 6], "multi_modal_data": {"video": FRAMES[:2]}}, ([24.0], 5, FRAMES[:2], 6)),
        (
            {"prompt_token_ids": [5, *MARKED, 6], "multi_modal_data": {"video": [(FRAMES[:5], {"fps": 0.7})]}},
            ([0.7], 5, FRAMES[:5], 6),
        ),
        (
            {
                "prompt_token_ids": timed(*FRAMES[7:], SHORT, 6)[0],
                "multi_modal_data": {"image": FRAMES[7], "video": [SHORT]},
            },
            ([24.0], FRAMES[7], SHORT, 6),
        ),
        ({"prompt_token_ids": [5, 6, 7]}, ([], 5, 6, 7)),
    ]
    params, prompts = msgspec.structs.replace(GREEDY, logprobs=5), [prompt for prompt, _ in given]
    with engine(directory, attention_backend="native", max_num_batched_tokens=16) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        check(outputs, [of_times(model, *parts) for _, parts in given])
        again = llm.generate(prompts, params, use_tqdm=False)
        assert llm.stats()["prefix_cache_hits_total"] > 60
        llm.reset_prefix_cache()
        alone = [llm.generate([each], params, use_tqdm=False)[0] for each in prompts]
        for output, *others in zip(outputs, again, alone, strict=True):
            assert [other.outputs[0].logprobs == output.outputs[0].logprobs for other in others] == [True, True]


@pytest.fixture(scope="module")
def timed_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = with_videos(lambda: qwen2_5_vl(tokens_per_second=2))
    return save_video_chat(model, tmp_path_factory.mktemp("qwen2-5-vl-video"))


TIMED = [
    {"prompt_token_ids": [5, *MARKED, 6, 7], "multi_modal_data": {"video": [(FRAMES[:5], {"fps": 4})]}},
    {"prompt_token_ids": [*MARKED, 8, *MARKED], "multi_modal_data": {"video": [SHORT, (FRAMES[:3], {"fps": 0.7})]}},
    {"prompt_token_ids": [5, 6, 7]},
]
"""Prompts of Qwen2.5-VL, whose references are those of test_times_in_place_of_marks."""


@pytest.fixture(scope="module")
def timed_tokens(timed_directory: Path) -> list[list[int]]:
    with engine(timed_directory, attention_backend="native", enable_prefix_caching=False) as llm:
        return [tokens(llm, [each])[0] for each in TIMED]


@pytest.mark.long
@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_ranks(timed_directory: Path, timed_tokens: list[list[int]], size: str) -> None:
    """The parts are dealt to both, or encoded by the first stage."""
    with engine(timed_directory, attention_backend="native", max_num_batched_tokens=16, **{size: 2}) as llm:
        assert tokens(llm, TIMED) == timed_tokens
        assert llm.stats()["encoder_seconds_total"] > 0


@pytest.mark.parametrize("deaths", all_but_long([[3], [2, 9]], [[3]]), ids=str)
async def test_an_engine_after_one_that_was_killed_gets_the_videos_again(
    timed_directory: Path,
    timed_tokens: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    deaths: list[int],
) -> None:
    """The times of the parts, too, on which positions and keys depend."""
    fates = Fates(tmp_path, monkeypatch)
    fates.are(*(("die", step) for step in deaths))
    engine = open_engine(settings_of(timed_directory))
    try:
        async with asyncio.timeout(GUARD_SECONDS):
            assert await asyncio.gather(*(tokens_of(engine, each) for each in TIMED)) == timed_tokens
            assert await asyncio.gather(*(tokens_of(engine, each) for each in TIMED)) == timed_tokens
        assert (engine.num_restarts, fates.num_left) == (len(deaths), 0)
        assert (await engine.stats()).prefix_cache_hits_total > 0
    finally:
        engine.shutdown()


def test_order_of_frames_matters(llm: LLM, model: PreTrainedModel) -> None:
    """The same two frames in one part and in another order, and one frame for both, are other content."""
    one, two = FRAMES[:2]
    for frames in ([one, two], [two, one], [one, one]):
        given = {"prompt_token_ids": [5, *MARKED], "multi_modal_data": {"video": [(frames, LISTED)]}}
        assert tokens(llm, [given]) == [continued(model, 5, (frames, [1 / 48]))[0]]


def test_times_need_a_tokenizer(directory: Path) -> None:
    with engine(directory) as llm, pytest.raises(UserError, match="without a tokenizer the times"):
        tokens(llm, [{"prompt_token_ids": [5, *MARKED], "multi_modal_data": {"video": FRAMES}}])


def test_a_chat(llm: LLM, model: PreTrainedModel) -> None:
    content = [{"type": "text", "text": "w5"}, {"type": "video", "video": (FRAMES[:2], LISTED)}]
    (output,) = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == continued(model, 5, (FRAMES[:2], [1 / 48]), 8)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"multi_modal_data": {"video": [FRAMES, FRAMES]}}, "1 placeholders .token 91., and 2 videos"),
        ({"multi_modal_data": {"video": [[]]}}, "must be a list of frames"),
        ({"multi_modal_data": {"video": []}}, "1 placeholders .token 91., and 0 videos"),
        ({"multi_modal_data": {"video": [b"x"]}}, "the video is of an unknown format|videos need PyAV"),
        ({"multi_modal_data": {"video": [[FRAMES[0], SHORT[0]]]}}, "frames of a video must have one size"),
        ({"multi_modal_data": {"video": [(FRAMES, {"speed": 2})]}}, "metadata of a video has fps"),
        ({"multi_modal_data": {"video": [(FRAMES, {"frames_indices": [1]})]}}, "1 frames_indices for 8 frames"),
        ({"multi_modal_uuids": {"video": ["a"]}}, "videos have no uuid"),
    ],
)
def test_errors(llm: LLM, change: dict[str, Any], message: str) -> None:
    given = {"prompt_token_ids": [5, *MARKED], "multi_modal_data": {"video": FRAMES}} | change
    with pytest.raises(UserError, match=message):
        tokens(llm, [given])


def test_models_without_videos_and_limits(directory: Path, tmp_path: Path) -> None:
    given = {"prompt_token_ids": [5, *MARKED], "multi_modal_data": {"video": FRAMES}}
    with engine(directory, limit_mm_per_prompt={"video": 0}) as llm, pytest.raises(UserError, match="at most 0 videos"):
        tokens(llm, [given])
    sized = {"video": {"count": 2, "num_frames": 2, "width": 32, "height": 16}}
    refused = pytest.raises(UserError, match=r"video\[0\]: a video of \d+ tokens is larger than the")
    with engine(directory, limit_mm_per_prompt=sized) as llm, refused:
        tokens(llm, [given])
    other = save_chat(random_model(qwen3_vl), tmp_path)
    (other / "video_preprocessor_config.json").write_text(json.dumps({"patch_size": 2}))
    with engine(other) as llm, pytest.raises(UserError, match="this model takes no videos"):
        tokens(llm, [given])
