"""Gemma 3 with images, whose tokens see one another: tokens are Transformers', whatever the chunks and the caches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from quire.errors import ConfigError, UserError
from quire.llm import LLM
from quire.sampling_params import SamplingParams
from tests.e2e.test_images import GREEDY, NUM_TOKENS, num_encoded, prompt, tokens
from tests.e2e.test_images import engine as open_engine
from tests.models.harness import save
from tests.models.vision_models import (
    BOUND,
    GEMMA_PROCESSOR,
    GEMMA_TOKENS,
    IMAGE_TOKEN,
    TEMPLATE,
    random_gemma3,
    save_chat,
)
from tests.multimodal.pictures import draw

WIDE, TALL, SMALL = (draw(seed, size=size) for seed, size in ((1, (48, 24)), (2, (17, 41)), (3, (8, 8))))
PROMPTS = [
    prompt(5, 6, 7, WIDE, 8, 9),
    prompt(WIDE, 8, TALL, TALL, 5),
    prompt(5, 6, 7, TALL, 8, 9),
    {"prompt_token_ids": [5, 6, 7, 8, 9, 10, 11]},
    prompt(*range(10, 47), SMALL, 3, WIDE),
]
LEAST = GEMMA_TOKENS + 3
"""Least budget of a step for four sequences."""


def engine(directory: Path, **options: Any) -> LLM:
    return open_engine(directory, **{"max_num_batched_tokens": LEAST, **options})


def continued(model: PreTrainedModel, given: dict[str, Any]) -> tuple[list[int], torch.Tensor]:
    """Transformers' greedy tokens, and the log-probabilities of all tokens at their places."""
    images = given.get("multi_modal_data", {}).get("image", [])
    token_ids: list[int] = []
    for token in given["prompt_token_ids"]:
        token_ids += [token] * (GEMMA_TOKENS if token == IMAGE_TOKEN else 1)
    options: dict[str, Any] = {}
    if images:
        features = Gemma3ImageProcessorPil(**GEMMA_PROCESSOR)(images=images, return_tensors="pt")
        options["pixel_values"] = features["pixel_values"]
        options["token_type_ids"] = torch.tensor([[int(token == IMAGE_TOKEN) for token in token_ids]])
    options |= {"do_sample": False, "return_dict_in_generate": True, "output_scores": True, "eos_token_id": None}
    ids = torch.tensor([token_ids])
    with torch.inference_mode():
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, **options)
    return found.sequences[0, len(token_ids) :].tolist(), torch.cat(found.scores).log_softmax(-1)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return random_gemma3()


@pytest.fixture(scope="module")
def directory(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save(model, tmp_path_factory.mktemp("gemma3"))
    (path / "preprocessor_config.json").write_text(json.dumps(GEMMA_PROCESSOR))
    return path


@pytest.fixture(scope="module")
def references(model: PreTrainedModel) -> list[tuple[list[int], torch.Tensor]]:
    found = [continued(model, each) for each in PROMPTS]
    assert found[0][0] != found[2][0], "the image matters"
    return found


@pytest.fixture(scope="module")
def expected(references: list[tuple[list[int], torch.Tensor]]) -> list[list[int]]:
    return [token_ids for token_ids, _ in references]


@pytest.fixture(scope="module", params=["torch", "native"])
def llm(request: pytest.FixtureRequest, directory: Path) -> Iterator[LLM]:
    with engine(directory, attention_backend=request.param) as opened:
        yield opened


def test_log_probabilities_are_those_of_transformers(
    llm: LLM, references: list[tuple[list[int], torch.Tensor]]
) -> None:
    """In chunks, beside others; from the prefix cache, with hits that would end inside images; and each alone."""
    params = msgspec.structs.replace(GREEDY, logprobs=5)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for output, (token_ids, scores) in zip(outputs, references, strict=True):
        assert list(output.outputs[0].token_ids) == token_ids
        for likely, row in zip(output.outputs[0].logprobs or (), scores, strict=True):
            wanted = {token_id: row[token_id].item() for token_id in likely}
            assert {token_id: each.logprob for token_id, each in likely.items()} == pytest.approx(wanted, abs=BOUND)
    hits = llm.stats()["prefix_cache_hits_total"]
    again = llm.generate(PROMPTS, params, use_tqdm=False)
    assert llm.stats()["prefix_cache_hits_total"] - hits > 40
    llm.reset_prefix_cache()
    alone = [llm.generate([each], params, use_tqdm=False)[0] for each in PROMPTS]
    for output, *others in zip(outputs, again, alone, strict=True):
        for other in others:
            assert other.outputs[0].logprobs == output.outputs[0].logprobs, "other bits"


def test_a_hit_ends_before_an_image_that_is_cached_in_part(directory: Path, model: PreTrainedModel) -> None:
    """Blocks of four tokens: the image's last one has the text behind it too, which is another one's here."""
    given, other = (prompt(10, 11, 12, 13, 5, WIDE, token, 9) for token in (8, 7))
    with engine(directory) as llm:
        tokens(llm, [other])
        assert tokens(llm, [given]) == [continued(model, given)[0]]
        assert llm.stats()["prefix_cache_hits_total"] == 4, "of the twenty tokens of five equal blocks"


def test_preempted_and_swapped_prompts(directory: Path, expected: list[list[int]]) -> None:
    for swap in (0, 2**20):
        with engine(directory, num_blocks_override=48, swap_space=swap) as llm:
            assert tokens(llm, PROMPTS[:4] * 2) == expected[:4] * 2
            assert llm.stats()["preemptions_total"] > 0


def test_an_image_cannot_get_its_tokens_beside_decodes_at_first(directory: Path, expected: list[list[int]]) -> None:
    """Three sequences run; the step's budget leaves an image its tokens and not one more."""
    with engine(directory, max_num_seqs=4) as llm:
        params = msgspec.structs.replace(GREEDY, max_tokens=30)
        texts = [{"prompt_token_ids": [20 + number, 6, 7]} for number in range(3)]
        outputs = llm.generate([*texts, PROMPTS[4], PROMPTS[1]], params, use_tqdm=False)
        assert [list(each.outputs[0].token_ids[:NUM_TOKENS]) for each in outputs[3:]] == [expected[4], expected[1]]


def test_several_samples_and_scored_prompts(llm: LLM, expected: list[list[int]]) -> None:
    params = SamplingParams(temperature=0, n=2, max_tokens=NUM_TOKENS, ignore_eos=True, prompt_logprobs=0)
    (output,) = llm.generate([PROMPTS[1]], params, use_tqdm=False)
    assert [list(each.token_ids) for each in output.outputs] == [expected[1]] * 2
    assert len(output.prompt_logprobs or ()) == len(output.prompt_token_ids or ())


@pytest.mark.parametrize(
    "options",
    [
        {"queue_depth": 2},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}},
        {"quantization": "w8a8", "dtype": "bfloat16", "matmul_precision": "auto"},
        {"dtype": "bfloat16", "matmul_precision": "auto"},
        {"kv_cache_dtype": "int8", "block_size": 16},
    ],
    ids=["two steps in flight", "drafts", "quantised", "bfloat16", "8-bit cache"],
)
def test_tokens_do_not_depend_on_chunks_and_neighbours(directory: Path, options: dict[str, Any]) -> None:
    with engine(directory, max_num_batched_tokens=LEAST + 9, **options) as llm:
        beside = tokens(llm, PROMPTS)
        assert tokens(llm, PROMPTS) == beside
    with engine(directory, max_num_batched_tokens=200, enable_prefix_caching=False, **options) as llm:
        assert [tokens(llm, [each])[0] for each in PROMPTS] == beside


def test_a_chat_template_marks_where_an_image_begins(model: PreTrainedModel, tmp_path: Path) -> None:
    template = TEMPLATE.replace("<s> <image> </s>", "<s>")
    save_chat(model, tmp_path, template, GEMMA_PROCESSOR)
    parts = [
        {"type": "text", "text": "w5 w6"},
        {"type": "image_pil", "image_pil": WIDE},
        {"type": "text", "text": "w7"},
    ]
    with engine(tmp_path, skip_tokenizer_init=False) as llm:
        (output,) = llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == continued(model, prompt(5, 6, WIDE, 7, 8))[0]
        with pytest.raises(UserError, match="placeholders"):
            llm.generate([{"prompt": "w5", "multi_modal_data": {"image": WIDE}}], GREEDY, use_tqdm=False)


def test_equal_images_are_encoded_once(directory: Path) -> None:
    with engine(directory) as llm:
        tokens(llm, [PROMPTS[1]])
        assert num_encoded(llm) == 2, "two of the three are one"


def test_the_language_model_alone(directory: Path, expected: list[list[int]]) -> None:
    with engine(directory, language_model_only=True, max_num_batched_tokens=4) as llm:
        assert tokens(llm, PROMPTS[3:4]) == expected[3:4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_batched_tokens": LEAST - 1}, "max_num_batched_tokens .18. must be at least 19: an image"),
        ({"max_prefill_chunk": GEMMA_TOKENS - 1}, "max_prefill_chunk .15. must be at least the 16 tokens"),
        ({"mm_processor_kwargs": {"max_pixels": 64}}, "all pictures of this model have one size"),
    ],
)
def test_limits_of_a_step(directory: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message), engine(directory, **options):
        pass
