"""The whole engine on the device worker, its kernels in Triton's interpreter, through the public API."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from quire import LLM, AsyncLLM, SamplingParams
from tests.e2e.conftest import exact
from tests.e2e.device_models import MODELS, OPTIONS, continuation, greedy, open_engine, run
from tests.long import all_but_long
from tests.models.harness import random_prompts, randomize, save

PROMPTS = random_prompts([3, 13, 6], 97, seed=4)
NUM_TOKENS = 4


@dataclass
class Tiny:
    """A model on disk, Transformers' instance of it, an engine over it that tests share, with queue depth 2."""

    reference: PreTrainedModel
    directory: Path
    llm: LLM


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Tiny]]:
    with ExitStack() as engines:
        made = {}
        for name, make in MODELS.items():
            reference = randomize(make())
            directory = save(reference, tmp_path_factory.mktemp(name))
            llm = engines.enter_context(open_engine(directory, batch_invariant=True))
            made[name] = Tiny(reference, directory, llm)
        yield made


@pytest.fixture(scope="module", params=all_but_long(MODELS, ["full", "latent"]))
def tiny(request: pytest.FixtureRequest, models: dict[str, Tiny]) -> Tiny:
    return models[request.param]


@pytest.fixture(scope="module")
def full(models: dict[str, Tiny]) -> Tiny:
    return models["full"]


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> list[list[int]]:
    return [continuation(tiny.reference, prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def together(tiny: Tiny) -> list[object]:
    """Tokens and log-probabilities of a batch whose prompts are computed in chunks, beside one another's tokens."""
    outputs = run(tiny.llm, PROMPTS, greedy(NUM_TOKENS, logprobs=0))
    return exact(outputs)


def test_greedy_tokens_are_those_of_transformers(
    tiny: Tiny, together: list[tuple[list[int], object]], expected: list[list[int]]
) -> None:
    assert [tokens for tokens, _ in together] == expected


def test_the_fastest_kernels_one_step_at_a_time(full: Tiny) -> None:
    with open_engine(full.directory, queue_depth=1) as llm:
        outputs = run(llm, PROMPTS[:2], greedy(3))
    expected = [continuation(full.reference, prompt, 3) for prompt in PROMPTS[:2]]
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_the_same_bits_alone_and_with_a_prefix_hit(tiny: Tiny, together: list[object]) -> None:
    tiny.llm.reset_prefix_cache()
    (missed,) = run(tiny.llm, PROMPTS[1:2], greedy(NUM_TOKENS, logprobs=0))
    (hit,) = run(tiny.llm, PROMPTS[1:2], greedy(NUM_TOKENS, logprobs=0))
    assert (missed.num_cached_tokens, hit.num_cached_tokens) == (0, 12)
    assert exact([missed]) == exact([hit]) == together[1:2]


def test_the_same_bits_preempted(tiny: Tiny, together: list[object]) -> None:
    """By recomputation, and in the model with two groups of blocks by swapping."""
    num_blocks, options = 7, {}
    if tiny.llm.model_config.sliding_windows[0] is not None:
        num_blocks, options = 10, {"preemption_mode": "swap", "swap_space": "1MiB"}
    with open_engine(
        tiny.directory, batch_invariant=True, num_blocks_override=num_blocks, enable_prefix_caching=False, **options
    ) as llm:
        outputs = run(llm, PROMPTS, greedy(NUM_TOKENS, logprobs=0))
        stats = llm.stats()
    assert stats["preemptions_total"] > 0
    assert stats["swap_preemptions_total"] == (stats["preemptions_total"] if options else 0)
    assert exact(outputs) == together


def test_log_probabilities_are_those_of_transformers(full: Tiny) -> None:
    prompt = PROMPTS[2]
    full.llm.reset_prefix_cache()
    (output,) = run(full.llm, [prompt], greedy(1, logprobs=2, prompt_logprobs=1))
    with torch.inference_mode():
        rows = torch.log_softmax(full.reference(torch.tensor([prompt])).logits[0].double(), -1)
    entries = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]
    for row, entry in zip(rows, entries, strict=True):
        for token, found in entry.items():
            assert found.logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert found.rank == int((row > row[token]).sum()) + 1
    assert int(rows[-1].argmax()) in entries[-1]


def test_parallel_samples_share_their_prompt(full: Tiny) -> None:
    """Each of the n is what the CPU engine draws with the same seed."""
    params = SamplingParams(temperature=2.0, n=3, seed=5, max_tokens=4, ignore_eos=True, detokenize=False, top_k=20)
    (output,) = run(full.llm, [PROMPTS[2]], params)
    with LLM(str(full.directory), num_blocks_override=60, dtype="float32", skip_tokenizer_init=True) as cpu:
        (reference,) = run(cpu, [PROMPTS[2]], params)
    drawn = [completion.token_ids for completion in output.outputs]
    assert drawn == [completion.token_ids for completion in reference.outputs]
    assert len({tuple(tokens) for tokens in drawn}) == 3


def test_beams_are_those_of_transformers(full: Tiny) -> None:
    prompt = PROMPTS[0]
    params = SamplingParams(
        use_beam_search=True, n=2, best_of=3, max_tokens=4, ignore_eos=True, detokenize=False, temperature=0.0
    )
    (output,) = run(full.llm, [prompt], params)
    with torch.inference_mode():
        found = full.reference.generate(
            torch.tensor([prompt]),
            do_sample=False,
            num_beams=3,
            num_return_sequences=2,
            max_new_tokens=4,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    assert [each.token_ids for each in output.outputs] == found.sequences[:, len(prompt) :].tolist()
    scores = [each.score for each in output.outputs]
    assert scores == pytest.approx(found.sequences_scores.tolist(), abs=2e-4)


@pytest.mark.long
async def test_an_engine_process_of_its_own(tmp_path: Path) -> None:
    """Streamed, one of two requests aborted on the way."""
    reference = randomize(MODELS["full"]())
    directory = save(reference, tmp_path)
    engine = AsyncLLM(model=str(directory), **OPTIONS)
    try:

        async def first_tokens(prompt: list[int], count: int) -> list[int]:
            tokens: list[int] = []
            async for output in engine.generate({"prompt_token_ids": prompt}, greedy(NUM_TOKENS)):
                tokens = output.outputs[0].token_ids
                if len(tokens) >= count:
                    break
            return tokens

        cut, whole = await asyncio.gather(first_tokens(PROMPTS[0], 2), first_tokens(PROMPTS[2], NUM_TOKENS))
    finally:
        engine.shutdown()
    assert cut == continuation(reference, PROMPTS[0], NUM_TOKENS)[: len(cut)]
    assert whole == continuation(reference, PROMPTS[2], NUM_TOKENS)


@pytest.mark.long
def test_a_machine_with_torch_and_triton_alone(full: Tiny) -> None:
    """In process: without the packages of the server, of the engine process and of the native CPU kernels."""
    script = f"""
        import sys
        for name in ("zmq", "fastapi", "uvicorn", "pydantic", "prometheus_client", "quire.kernels.cpu._native"):
            sys.modules[name] = None
        from quire import SamplingParams
        from tests.e2e.device_models import greedy, open_engine, run
        with open_engine({str(full.directory)!r}) as llm:
            print(run(llm, [{PROMPTS[0]}], greedy(1))[0].outputs[0].token_ids)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(continuation(full.reference, PROMPTS[0], 1))


@pytest.mark.parametrize("name", ["full", "latent"])
def test_a_cache_of_8_bits(name: str, models: dict[str, Tiny]) -> None:
    """The tokens of plain torch over such a cache, and the same bits alone as beside others."""
    tiny = models[name]
    with open_engine(tiny.directory, batch_invariant=True, kv_cache_dtype="fp8") as llm:
        together = run(llm, PROMPTS[:2], greedy(2, logprobs=0))
        alone = run(llm, PROMPTS[1:2], greedy(2, logprobs=0))
    assert exact(alone) == exact(together[1:])
    exactly_kept = run(tiny.llm, PROMPTS[:2], greedy(2, logprobs=0))
    assert exact(together) != exact(exactly_kept), "what is kept is rounded"
    if name == "full":
        options = {"attention_backend": "torch", "kv_cache_dtype": "fp8"}
        with open_engine(tiny.directory, **options) as llm:
            expected = run(llm, PROMPTS[:2], greedy(2))
        assert [each.outputs[0].token_ids for each in together] == [each.outputs[0].token_ids for each in expected]
