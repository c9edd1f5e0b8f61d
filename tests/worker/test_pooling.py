"""Pooled samples on workers of a tiny LLaMA: the vectors are the last hidden states of Transformers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.executors.local import LocalExecutor
from quire.request import FinishReason
from quire.sampling_params import SamplingParams
from tests.fakes.core import CoreClient
from tests.models.families import FAMILIES
from tests.models.harness import randomize, save
from tests.worker.conftest import ON_A_CPU, MakeDriver
from tests.worker.driver import Driver, sampling_of

PROMPTS = [[5, 9, 2], list(range(1, 38)), [7], [3, 3, 3, 8, 1, 1, 4, 60, 61, 62, 2, 2, 2, 17, 18, 19, 20]]
EXACT = {"matmul_precision": "float32"}
DRAWN = sampling_of(SamplingParams(temperature=0.9, logprobs=2, prompt_logprobs=1), seed=5)
TOLERANCE = 1e-5


def last_hidden(reference: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return reference.model(torch.tensor([prompt])).last_hidden_state[0, -1].float()


def pooled_alone(driver: Driver, prompt: list[int]) -> list[float]:
    driver.add(99, prompt, pooling=True)
    driver.step({99: len(prompt)})
    vector = driver.release(99).vector
    assert vector is not None
    return vector


@pytest.mark.parametrize("options", [{}, {"attention_backend": "torch"}], ids=["default", "torch"])
def test_pooled_and_generated_samples_of_one_step(
    make_driver: MakeDriver, reference: PreTrainedModel, options: dict[str, object], platform: str
) -> None:
    if platform == "device" and options:
        pytest.skip("a device has its own attention")
    driver = make_driver(block_size=4, **options, **(EXACT if platform == "cpu" else {}))
    alone = [pooled_alone(driver, prompt) for prompt in PROMPTS]
    driver.add(10, PROMPTS[0], DRAWN)
    driver.decode(6)
    expected = driver.release(10)

    driver.add(0, PROMPTS[0], pooling=True)
    driver.add(1, PROMPTS[1], pooling=True)
    driver.add(10, PROMPTS[0], DRAWN)
    driver.add(3, PROMPTS[3], pooling=True)
    result = driver.step({0: 3, 1: 20, 10: 3, 3: 17})
    assert [bool(tokens) for tokens in result.token_ids] == [False, True, False]
    assert sorted(result.pooled) == [0, 2]
    driver.add(2, PROMPTS[2], pooling=True)
    driver.step({1: 17, 2: 1, 10: 1})
    driver.decode(4, [10])

    for index, prompt in enumerate(PROMPTS):
        vector = driver.sequences[index].vector
        assert vector == alone[index], "the batch has changed it"
        error = (torch.tensor(vector) - last_hidden(reference, prompt)).abs().max()
        assert float(error) < TOLERANCE
    found = driver.sequences[10]
    assert (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs)
    assert found.prompt_logprobs == expected.prompt_logprobs


def test_nothing_but_pooled_samples(make_driver: MakeDriver, reference: PreTrainedModel) -> None:
    driver = make_driver()
    driver.add(0, PROMPTS[3], pooling=True)
    driver.add(1, PROMPTS[1], pooling=True)
    result = driver.step({0: 17, 1: 37})
    assert result.token_ids == [[], []]
    assert sorted(result.pooled) == [0, 1]
    assert not result.nonfinite
    assert len(result.pooled[0]) == reference.config.hidden_size


@ON_A_CPU
@pytest.mark.parametrize("queue_depth", [1, 2])
def test_from_the_engine_core_to_the_update(
    model_path: Path, reference: PreTrainedModel, executors: list[LocalExecutor], queue_depth: int, platform: str
) -> None:
    """In a pool that is too small for all at once, in chunks, and from the prefix cache."""
    options = {"queue_depth": queue_depth, "num_blocks_override": 30, "block_size": 4, "max_num_batched_tokens": 24}
    settings = {"model": str(model_path), "max_num_seqs": 8, "max_model_len": 64, "num_threads": 1, **EXACT, **options}
    config = resolve(EngineOptions.from_keywords(settings))
    executors.append(LocalExecutor(config))
    client = CoreClient(config, executors[0])
    for turn in range(2):
        for index, prompt in enumerate(PROMPTS):
            client.add(f"pooled {index} {turn}", prompt, pooling=True, max_tokens=1)
            client.add(f"generated {index} {turn}", prompt, max_tokens=20, ignore_eos=True)
        client.run()
    for index, prompt in enumerate(PROMPTS):
        assert client.pooled[f"pooled {index} 0"] == client.pooled[f"pooled {index} 1"]
        error = (torch.tensor(client.pooled[f"pooled {index} 0"]) - last_hidden(reference, prompt)).abs().max()
        assert float(error) < TOLERANCE
        with torch.no_grad():
            text = reference.generate(torch.tensor([prompt]), max_new_tokens=20, min_new_tokens=20, do_sample=False)
        for turn in range(2):
            assert client.tokens[f"generated {index} {turn}", 0] == text[0, len(prompt) :].tolist()
    assert client.core.stats().preemptions_total > 0


@ON_A_CPU
def test_a_vector_that_is_not_finite(
    model_path: Path, tmp_path: Path, executors: list[LocalExecutor], platform: str
) -> None:
    model = randomize(FAMILIES["llama"]())
    with torch.no_grad():
        model.get_input_embeddings().weight[77] = math.nan
    settings = {"model": str(save(model, tmp_path)), "num_blocks_override": 30, "num_threads": 1}
    config = resolve(EngineOptions.from_keywords(settings))
    executors.append(LocalExecutor(config))
    client = CoreClient(config, executors[0])
    client.add("good", [1, 2, 3], pooling=True, max_tokens=1)
    client.add("bad", [1, 77, 3], pooling=True, max_tokens=1)
    client.add("generated", [1, 2, 3], max_tokens=4)
    client.add("damaged", [77, 2, 3], max_tokens=4)
    client.run()
    assert list(client.pooled) == ["good"]
    assert client.finished["bad", 0] is client.finished["damaged", 0] is FinishReason.ERROR
    assert len(client.tokens["generated", 0]) == 4
