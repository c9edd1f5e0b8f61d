"""Random arrivals, aborts, forks, preemptions, prefix hits and windows over the real worker: every completion has,
bit by bit, the tokens and log-probabilities of a lone run.

The fake executor of the scheduler's state machine proves that plans are consistent; this proves that rows, block
tables, copies, attention and the sampler do what the plans say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.executors.local import LocalExecutor
from quire.request import FinishReason
from quire.scheduler.preemption import PreemptionCosts
from tests.fakes.core import CoreClient
from tests.models.eagle_heads import HeadTwin
from tests.models.families import llama, mistral, qwen3
from tests.models.harness import randomize, save

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
MODELS = {
    "full": lambda: llama(num_hidden_layers=2, **SIZES),
    "window": lambda: mistral(num_hidden_layers=2, sliding_window=5, **SIZES),
    # Seven layers in groups of three: the last one of the four sliding layers has a group to itself.
    "mixed": lambda: qwen3(
        num_hidden_layers=7,
        use_sliding_window=True,
        sliding_window=11,
        layer_types=["sliding_attention", "full_attention"] * 3 + ["sliding_attention"],
        **SIZES,
    ),
}
POOL_TOKENS = {"full": (90,), "window": (45,), "mixed": (90, 45, 45)}
"""Tokens that the smallest pool has room for in each KV group: enough for one request of any length."""
HEAD_TOKENS = {"full": (90, 90), "window": (90,), "mixed": (90, 90)}
"""What the layer of a head takes besides, and layers that form more groups beside it."""
PREFIXES = [[(13 * family + 5 * i) % 96 + 1 for i in range(40)] for family in range(2)]
MAX_MODEL_LEN = 90

EXERCISED = (
    "preemptions_total",
    "recomputed_tokens_total",
    "swap_preemptions_total",
    "swapped_in_blocks_total",
    "prefix_cache_hits_total",
    "copied_blocks_total",
    "evictions_total",
    "timed_out_requests_total",
)

COUNTED = (*EXERCISED, "draft_tokens_total", "accepted_draft_tokens_total")

Client = CoreClient
MakeClient = Callable[..., Client]

EXTRAS: list[dict[str, Any]] = [
    {},
    {"prompt_logprobs": 1},
    {"repetition_penalty": 1.7, "frequency_penalty": 0.8},
    {"stop_token_ids": list(range(0, 97, 6)), "min_tokens": 8},
    {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
    {"bad": [[token] for token in range(40)] + [[50, 51], [60, 61, 62]], "presence_penalty": 2.0},
    {"logit_bias": dict.fromkeys(range(97), -100.0)},
    {"allowed_token_ids": [3, 4, 5, 90, 91], "top_k": 200},
    {"use_beam_search": True, "best_of": 3, "temperature": 0.0, "stop_token_ids": list(range(0, 97, 12))},
    {"use_beam_search": True, "best_of": 3, "temperature": 0.0, "early_stopping": "never", "frequency_penalty": 0.5},
]

KINDS: list[dict[str, Any]] = [
    {},
    {},
    {"n": 2},
    {"n": 3},
    {"n": 1, "best_of": 3},
    {"n": 2, "use_beam_search": True},
    {"n": 1, "best_of": 3, "use_beam_search": True, "early_stopping": "never", "length_penalty": 0.5},
]
NOT_FOR_BEAMS = {"temperature", "top_k", "top_p", "min_p"}
"""What a beam search refuses: nothing is drawn."""

requests = st.fixed_dictionaries(
    {
        "family": st.integers(0, 1),
        "shared": st.sampled_from([0, 3, 16, 31, 32, 40, 40]),
        "own": st.lists(st.integers(0, 96), min_size=1, max_size=18),
        "kind": st.sampled_from(KINDS),
        "max_tokens": st.sampled_from([1, 9, 30, 30, 30]),
        "seed": st.integers(0, 2),
        "temperature": st.sampled_from([0.0, 0.7, 4.0]),
        "logprobs": st.sampled_from([None, 0, 2]),
        "extra": st.sampled_from(EXTRAS),
        "priority": st.sampled_from([0, 0, 0, -1, 2]),
        "timeout_s": st.sampled_from([None, None, None, None, 0.05, 0.3]),  # of a clock that counts steps
    }
)
events = st.one_of(
    requests,
    requests,
    st.integers(1, 7),  # steps
    st.tuples(st.integers(0, 20), st.sampled_from([None, None, 0, 1])),  # abort of (request, completion)
)
engines = st.fixed_dictionaries(
    {
        "model": st.sampled_from(sorted(MODELS)),
        "dtype": st.sampled_from(["float32", "bfloat16"]),
        "block_size": st.sampled_from([1, 4, 16]),
        "spare": st.integers(0, 20),
        "max_num_seqs": st.integers(3, 8),
        "max_num_batched_tokens": st.sampled_from([8, 33, 200]),
        "queue_depth": st.sampled_from([1, 2]),
        "enable_prefix_caching": st.booleans(),
        "preemption": st.sampled_from(
            [
                {},
                {"preemption_mode": "swap", "swap_space": "16KiB"},
                {"preemption_mode": "swap", "swap_space": "1MiB"},
                {"preemption_mode": "auto", "swap_space": "1MiB"},
            ]
        ),
    }
)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save(randomize(make()), tmp_path_factory.mktemp(name)) for name, make in MODELS.items()}


@pytest.fixture(scope="module")
def heads(directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A head for drafts of each model, which guesses ten tokens."""
    twin = HeadTwin(48, 32, 97, (1,), [0, 6, 12, 18, *range(60, 66)], flags={"norm_before_residual": True})
    return {name: twin.save(tmp_path_factory.mktemp(f"{name}-head")) for name in directories}


class TimelessExecutor(LocalExecutor):
    def measure_preemption_costs(self) -> PreemptionCosts:
        """No measurement, which would have the load of the machine choose between both kinds of preemption."""
        return PreemptionCosts(seconds_per_block=1.0, seconds_per_token=0.5)


@pytest.fixture(scope="module")
def make_client(directories: dict[str, Path], heads: dict[str, Path]) -> MakeClient:
    def make(model: str, **options: Any) -> Client:
        drafts = options.get("speculative_config", {})
        if drafts.get("method") == "eagle3":
            options["speculative_config"] = {**drafts, "model": str(heads[model])}
        config = resolve(
            EngineOptions.from_keywords(
                {"model": str(directories[model]), "num_threads": 1, "max_model_len": MAX_MODEL_LEN, **options}
            )
        )
        return Client(config, TimelessExecutor(config))

    return make


@pytest.fixture(scope="module")
def alone(make_client: MakeClient) -> Iterator[Callable[..., Client]]:
    """What a request gives in a large engine that serves nothing else meanwhile."""
    engines: dict[tuple[str, str], Client] = {}
    known: dict[str, str] = {}

    def generate(model: str, dtype: str, request: dict[str, Any]) -> tuple[Client, str]:
        key = (model, dtype)
        request = {name: value for name, value in request.items() if name not in ("priority", "timeout_s")}
        if key not in engines:
            engines[key] = make_client(model, dtype=dtype, enable_prefix_caching=False, num_blocks_override=400)
        client, description = engines[key], f"{key} {request}"
        if description not in known:
            known[description] = f"alone{len(known)}"
            client.add(known[description], **request)
            client.run()
        return client, known[description]

    yield generate
    for client in engines.values():
        client.core.shutdown()


def engine_request(
    family: int, shared: int, own: list[int], extra: dict[str, Any], kind: dict[str, Any], **params: Any
) -> dict[str, Any]:
    return made_consistent({"prompt": PREFIXES[family][:shared] + own, **params, **extra, **kind})


def made_consistent(request: dict[str, Any]) -> dict[str, Any]:
    """The request without what its other parameters do not allow."""
    if "min_tokens" in request:
        request["min_tokens"] = min(request["min_tokens"], request["max_tokens"])
    if "use_beam_search" in request:
        request = {name: value for name, value in request.items() if name not in NOT_FOR_BEAMS}
    return request


def run_script(
    client: Client, script: list[Any], make_request: Callable[..., dict[str, Any]] = engine_request
) -> tuple[dict[str, dict[str, Any]], set[tuple[str, int | None]]]:
    """Requests, numbers of steps and aborts, in order; then on to the end. Returns what was requested and aborted."""
    made: dict[str, dict[str, Any]] = {}
    aborted: set[tuple[str, int | None]] = set()
    for event in script:
        match event:
            case dict():
                name = f"r{len(made)}"
                made[name] = make_request(**event)
                client.add(name, **made[name])
            case int():
                for _ in range(event):
                    if client.core.has_work:
                        client.step()
                        client.scheduler.check()
            case (number, index):
                client.abort(f"r{number}", index)
                aborted.add((f"r{number}", index))
    client.run()
    return made, aborted


def test_every_completion_is_that_of_a_lone_run(make_client: MakeClient, alone: Callable[..., Any]) -> None:
    totals = run_at_random(make_client, alone, 60)
    assert all(totals[name] > 4 for name in EXERCISED), f"the random engines were too roomy: {totals}"


DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix", "suffix_decoding_max_spec_factor": 2.0},
    "hostile": {"method": "custom_class", "model": "tests.fakes.drafts.HostileDrafter"},
    "eagle3": {"method": "eagle3"},
}


@pytest.mark.parametrize(
    ("drafter", "examples"),
    [
        pytest.param("hostile", 8),
        *(pytest.param(name, 60, marks=pytest.mark.long) for name in DRAFTERS),
    ],
)
def test_with_drafts(make_client: MakeClient, alone: Callable[..., Any], drafter: str, examples: int) -> None:
    drafts = {"num_speculative_tokens": 4, **DRAFTERS[drafter]}
    totals = run_at_random(make_client, alone, examples, speculative_config=drafts)
    assert 0 < totals["accepted_draft_tokens_total"] < totals["draft_tokens_total"]
    assert examples < 60 or all(totals[name] > 0 for name in EXERCISED), f"the engines were too roomy: {totals}"


def run_at_random(make_client: MakeClient, alone: Callable[..., Any], examples: int, **chosen: Any) -> Counter[str]:
    """Random engines and scripts, compared with lone runs; returns what they did. chosen: options of all engines."""
    totals: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        phases=[Phase.explicit, Phase.generate],
        report_multiple_bugs=False,
    )
    @given(engine=engines, script=st.lists(events, min_size=16, max_size=32))
    def check(engine: dict[str, Any], script: list[Any]) -> None:
        options = dict(engine)
        model, spare = options["model"], options.pop("spare")
        pool = POOL_TOKENS[model]
        if chosen.get("speculative_config", {}).get("method") == "eagle3":
            pool = (*pool, *HEAD_TOKENS[model])
        num_blocks = sum(-(-(tokens + spare) // options["block_size"]) for tokens in pool)
        client = make_client(num_blocks_override=num_blocks, **options.pop("preemption"), **options, **chosen)
        try:
            made, aborted = run_script(client, script)
            totals.update({name: getattr(client.core.stats(), name) for name in COUNTED})
        finally:
            client.core.shutdown()
        for name, request in made.items():
            if name not in client.refused and not may_end_early(request):
                assert_as_alone(client, name, aborted, *alone(model, options["dtype"], request))

    check()
    return totals


def may_end_early(request: dict[str, Any]) -> bool:
    """A beam search that runs out of time brings the best that it had by then, of which some had ended."""
    return "use_beam_search" in request and request.get("timeout_s") is not None


def assert_as_alone(
    client: Client, name: str, aborted: set[tuple[str, int | None]], lone: Client, lone_name: str
) -> None:
    """What was aborted or ran out of time is the beginning of the lone run's completion, all else the whole of it."""
    timed_out = False
    for (found, index), expected in lone.tokens.items():
        if found != lone_name:
            continue
        tokens, logprobs = client.tokens.get((name, index), []), client.logprobs.get((name, index), [])
        if client.finished.get((name, index)) is FinishReason.TIMEOUT:
            timed_out = True
        assert tokens == expected[: len(tokens)]
        assert logprobs == lone.logprobs[found, index][: len(logprobs)]
        if client.finished.get((name, index)) is FinishReason.TIMEOUT:
            continue
        if not {(name, None), (name, index)} & aborted:
            assert len(tokens) == len(expected)
            assert client.finished[name, index] is lone.finished[found, index] is not FinishReason.ABORT
            assert client.rankings.get((name, index)) == lone.rankings.get((found, index))
    if not timed_out and all(aborted_name != name for aborted_name, _ in aborted):
        assert client.prompt_logprobs.get(name) == lone.prompt_logprobs.get(lone_name)
