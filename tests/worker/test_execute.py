"""Plans of every kind against a tiny LLaMA: the tokens are those of Transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from quire.sampling_params import SamplingParams
from quire.step import SequenceFork
from quire.worker.platform import cpu_step, device_step
from tests.worker.conftest import ON_A_CPU, MakeDriver
from tests.worker.driver import GREEDY, Tracked, sampling_of

PROMPTS = [[5, 9, 2], list(range(1, 38)), [7], [3, 3, 3, 8, 1, 1, 4, 60, 61, 62, 2, 2, 2, 17, 18, 19, 20]]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def expected(reference: PreTrainedModel) -> list[list[int]]:
    """Greedy continuations of PROMPTS by Transformers."""
    return [generate(reference, prompt, NUM_TOKENS) for prompt in PROMPTS]


def generate(reference: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    with torch.no_grad():
        output = reference.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("block_size", [4, 16])
def test_prompts_of_different_length_in_one_batch(
    make_driver: MakeDriver, expected: list[list[int]], block_size: int
) -> None:
    driver = make_driver(block_size=block_size)
    for seq_id, prompt in enumerate(PROMPTS):
        driver.add(seq_id, prompt)
    driver.decode(NUM_TOKENS)
    assert [driver.sequences[i].output for i in range(4)] == expected


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks_of_one_prompt_mixed_with_tokens_of_another(
    make_driver: MakeDriver, expected: list[list[int]], chunk: int
) -> None:
    driver = make_driver(block_size=4)
    driver.add(0, PROMPTS[0])
    driver.step({0: 3})
    driver.add(1, PROMPTS[1])
    long = driver.sequences[1]
    while long.computed < long.num_prompt:
        work = {1: min(chunk, long.num_prompt - long.computed)}
        if len(driver.sequences[0].output) < NUM_TOKENS:
            work[0] = 1
        driver.step(work)
    driver.decode(NUM_TOKENS - len(driver.sequences[0].output), [0])
    driver.decode(NUM_TOKENS - 1, [1])
    assert [driver.sequences[i].output for i in (0, 1)] == expected[:2]


@ON_A_CPU
def test_arrivals_and_departures_between_steps(make_driver: MakeDriver, expected: list[list[int]]) -> None:
    """Rows and blocks are handed to others at once; the order of the batch changes from step to step."""
    driver = make_driver(max_num_seqs=2, num_blocks=1 + 2 * 4, block_size=16)
    waiting = list(range(4)) * 3
    done: list[tuple[int, Tracked]] = []
    seq_id = 0
    prompt_of: dict[int, int] = {}
    while waiting or driver.sequences:
        for finished in [s for s, sequence in driver.sequences.items() if len(sequence.output) == NUM_TOKENS]:
            done.append((prompt_of[finished], driver.release(finished)))
        while waiting and len(driver.sequences) < 2:
            prompt_of[seq_id] = waiting.pop()
            driver.add(seq_id, PROMPTS[prompt_of[seq_id]])
            seq_id += 1
        order = sorted(driver.sequences, reverse=bool(seq_id % 2))
        if order:
            driver.step({s: driver.sequences[s].length - driver.sequences[s].computed for s in order})
    assert len(done) == 12
    for prompt, sequence in done:
        assert sequence.output == expected[prompt]


@ON_A_CPU
def test_forks_share_blocks_until_they_write(make_driver: MakeDriver) -> None:
    """Three children of one prompt draw what three requests of their own would draw."""
    params = SamplingParams(temperature=0.9, top_p=0.95, presence_penalty=0.5, seed=1)
    driver, alone = make_driver(block_size=4), make_driver(block_size=4)
    driver.add(0, PROMPTS[1], sampling_of(params, seed=100))
    forks = [SequenceFork(0, child, sampling_of(params, seed=100 + child)) for child in (1, 2)]
    first = driver.step({0: 37}, forks)
    driver.decode(12)
    for seq_id in range(3):
        alone.add(seq_id, PROMPTS[1], sampling_of(params, seed=100 + seq_id))
        alone.decode(13, [seq_id])
        assert driver.sequences[seq_id].output == alone.sequences[seq_id].output
        assert first.token_ids[seq_id] == alone.sequences[seq_id].output[:1]
    assert len({tuple(driver.sequences[i].output) for i in range(3)}) == 3
    assert sum(len(plan.block_copies) for plan in driver.plans) == 2
    assert driver.sequences[0].blocks[:9] == driver.sequences[1].blocks[:9] == driver.sequences[2].blocks[:9]


def test_a_child_knows_every_token_of_its_prompt(make_driver: MakeDriver) -> None:
    """The last token of the prompt would win by its bias, were it not penalised as seen."""
    params = SamplingParams(temperature=0, logit_bias={PROMPTS[1][-1]: 50.0}, repetition_penalty=100.0)
    driver = make_driver()
    driver.add(0, PROMPTS[1], GREEDY)
    driver.step({0: 37}, [SequenceFork(0, 1, sampling_of(params))])
    assert driver.sequences[1].output[0] != PROMPTS[1][-1]


def test_a_copied_block_leaves_its_source_alone(make_driver: MakeDriver, expected: list[list[int]]) -> None:
    """The parent writes into the shared block first, the child into its copy: neither sees the other."""
    driver = make_driver(block_size=16)
    driver.add(0, PROMPTS[3])
    biased = sampling_of(SamplingParams(temperature=0, logit_bias={11: 100.0}))
    driver.step({0: 17}, [SequenceFork(0, 1, biased)])
    driver.decode(5)
    driver.decode(NUM_TOKENS - 6, [0])
    assert driver.sequences[0].output == expected[3]
    assert driver.sequences[1].output == [11] * 6


def test_a_child_with_a_history_catches_up(make_driver: MakeDriver, expected: list[list[int]]) -> None:
    """As after a preemption: the child is not sampled when it forks, but computes its own tokens first."""
    driver = make_driver(block_size=4)
    history = [*PROMPTS[1], 40, 41, 42]
    driver.add(0, PROMPTS[1])
    result = driver.step({0: 37}, [SequenceFork(0, 1, GREEDY, history)])
    assert len(result.token_ids) == 1
    driver.decode(10)
    assert driver.sequences[0].output == expected[1][:11]
    alone = make_driver(block_size=4)
    alone.add(0, PROMPTS[1], GREEDY, [40, 41, 42])
    alone.decode(10)
    assert driver.sequences[1].output == alone.sequences[0].output


@ON_A_CPU
def test_preempted_and_resumed_with_other_blocks(make_driver: MakeDriver, expected: list[list[int]]) -> None:
    """The resumed sequence draws the tokens it would have drawn; penalties count what it had generated."""
    params = SamplingParams(temperature=1.0, frequency_penalty=0.7, repetition_penalty=1.1)
    driver, steady = make_driver(block_size=4), make_driver(block_size=4)
    for one in (driver, steady):
        one.add(0, PROMPTS[0])
        one.add(1, PROMPTS[1], sampling_of(params, seed=9))
    driver.decode(6)
    preempted = driver.release(1)
    driver.decode(3, [0])
    driver.add(1, PROMPTS[1], preempted.sampling, preempted.output)
    driver.step({0: 1, 1: 20})
    driver.decode(8, [1])
    steady.decode(14)
    assert driver.sequences[1].output == steady.sequences[1].output
    assert driver.sequences[0].output == expected[0][:10]


def test_a_prefix_hit_starts_after_the_shared_blocks(make_driver: MakeDriver, expected: list[list[int]]) -> None:
    driver = make_driver(block_size=4)
    driver.add(0, PROMPTS[1])
    driver.decode(3)
    driver.add(1, PROMPTS[1], prefix=driver.sequences[0].blocks[:8])
    assert driver.step({1: 5}).token_ids == [expected[1][:1]]
    driver.release(0)
    driver.decode(4, [1])
    assert driver.sequences[1].output == expected[1][:5]


def test_prompt_logprobs_whatever_the_chunks(
    make_driver: MakeDriver, reference: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (cpu_step, device_step):
        monkeypatch.setattr(module, "PROMPT_LOGITS_ELEMENTS", 500)
    asking = sampling_of(SamplingParams(temperature=0, prompt_logprobs=3, logprobs=2))
    driver = make_driver(block_size=4)
    driver.add(0, PROMPTS[1], asking)
    driver.add(1, PROMPTS[3])
    for work in ({0: 1, 1: 4}, {0: 20, 1: 13}, {1: 1, 0: 16}, {0: 1, 1: 1}):
        driver.step(work)
    whole = make_driver(block_size=4)
    whole.add(0, PROMPTS[1], asking)
    whole.step({0: 37})
    entries = driver.sequences[0].prompt_logprobs
    assert entries == whole.sequences[0].prompt_logprobs
    assert driver.sequences[1].prompt_logprobs == []
    with torch.no_grad():
        log_probs = torch.log_softmax(reference(torch.tensor([PROMPTS[1]])).logits[0].double(), dim=-1)
    assert len(entries) == 36
    for position, entry in enumerate(entries):
        row, token = log_probs[position], PROMPTS[1][position + 1]
        order = row.argsort(descending=True)
        assert entry.token_ids == [token, *order[:3].tolist()]
        assert entry.rank == order.tolist().index(token) + 1
        np.testing.assert_allclose(entry.logprobs, row[entry.token_ids].numpy(), atol=1e-4)
    sampled = driver.sequences[0].logprobs[0]
    assert sampled.token_ids == [*log_probs[36].topk(1).indices.tolist(), *log_probs[36].topk(2).indices.tolist()]


def test_a_plan_that_only_releases(make_driver: MakeDriver) -> None:
    driver = make_driver(max_num_seqs=1)
    driver.add(0, PROMPTS[0])
    driver.decode(2)
    driver.release(0)
    assert driver.step({}).token_ids == []
    driver.add(1, PROMPTS[0])
    driver.decode(1)


def test_a_chunk_that_samples_nothing(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add(0, PROMPTS[1])
    assert driver.step({0: 10}).token_ids == []


def test_a_token_that_was_not_sampled_is_a_bug_that_shows(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add(0, PROMPTS[0])
    driver.step({0: 3})
    driver.sequences[0].computed += 1
    with pytest.raises(AssertionError, match="no step has sampled"):
        driver.step({0: 1})


def test_planned_ahead_while_results_come_late(make_driver: MakeDriver, expected: list[list[int]]) -> None:
    """One plan is always in flight while the next is submitted; what a step leaves for the host is read only then."""
    driver = make_driver(block_size=4)
    for seq_id, prompt in enumerate(PROMPTS):
        driver.add(seq_id, prompt)
    for step in range(6):
        driver.submit({s: sequence.length - sequence.computed for s, sequence in driver.sequences.items()})
        if step > 0:
            driver.apply()
    driver.apply()
    assert [driver.sequences[i].output for i in range(4)] == [tokens[:6] for tokens in expected]
