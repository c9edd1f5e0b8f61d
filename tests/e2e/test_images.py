"""Images in prompts: tokens are Transformers', whatever the chunks, the caches and the requests beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import PreTrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from quire.llm import LLM
from quire.sampling_params import SamplingParams
from tests.models.harness import randomize, save
from tests.models.vision_models import IMAGE_TOKEN, PROCESSOR, qwen3_vl
from tests.multimodal.pictures import draw

NUM_TOKENS = 6
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
WIDE, TALL, SMALL = (draw(seed, size=size) for seed, size in ((1, (48, 24)), (2, (16, 40)), (3, (8, 8))))
START, END = 80, 81


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
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, **options
        )
    return output[0, len(token_ids) :].tolist()


def engine(directory: Path, **options: Any) -> LLM:
    settings = {"max_num_seqs": 4, "num_blocks_override": 120, "block_size": 4, "skip_tokenizer_init": True}
    return LLM(str(directory), dtype="float32", **{**settings, "matmul_precision": "float32", **options})


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
