"""Random arrivals, aborts, forks, preemptions, prefix hits and windows over the device worker, planned ahead: every
completion has, bit by bit, the tokens and log-probabilities of a lone run. The model itself is computed by plain
operators (tests/fakes/host_math.py), so that there is time for many steps."""

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
from tests.e2e.device_models import MODELS
from tests.e2e.test_random_schedules import Client, assert_as_alone, made_consistent, run_script
from tests.fakes.host_math import HostMathExecutor
from tests.models.harness import randomize, save

MAX_MODEL_LEN = 32
NUM_GROUPS = {"full": 1, "mixed": 2, "latent": 1}
PREFIX = [(13 * i) % 96 + 1 for i in range(12)]
EXERCISED = ("preemptions_total", "swap_preemptions_total", "prefix_cache_hits_total", "copied_blocks_total")

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.5, "top_k": 9},
    {"temperature": 1.0, "n": 2},
    {"logprobs": 0},
    {"repetition_penalty": 1.4, "stop_token_ids": list(range(0, 97, 9)), "min_tokens": 2},
    {"n": 2, "use_beam_search": True},
]
requests = st.fixed_dictionaries(
    {
        "shared": st.sampled_from([0, 5, 12]),
        "own": st.lists(st.integers(0, 96), min_size=1, max_size=5),
        "kind": st.sampled_from(KINDS),
        "max_tokens": st.sampled_from([1, 6, 10, 10]),
        "seed": st.integers(0, 2),
    }
)
events = st.one_of(
    requests, requests, st.integers(1, 4), st.tuples(st.integers(0, 6), st.sampled_from([None, None, 0, 1]))
)
engines = st.fixed_dictionaries(
    {
        "model": st.sampled_from(sorted(MODELS)),
        "spare": st.integers(0, 2),
        "max_num_batched_tokens": st.sampled_from([6, 20]),
        "queue_depth": st.sampled_from([2, 2, 1]),
        "preemption": st.sampled_from([{}, {"preemption_mode": "swap", "swap_space": "1MiB"}]),
    }
)


@pytest.fixture(scope="module")
def make_client(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Client]:
    directories: dict[str, Path] = {
        name: save(randomize(make()), tmp_path_factory.mktemp(name)) for name, make in MODELS.items()
    }

    def make(model: str, **options: Any) -> Client:
        fixed = {"attention_backend": "triton", "device": "cpu", "dtype": "float32", "max_model_len": MAX_MODEL_LEN}
        shape = {"model": str(directories[model]), "block_size": 4, "max_num_seqs": 5}
        config = resolve(EngineOptions.from_keywords({**shape, **fixed, **options}))
        return Client(config, HostMathExecutor(config))

    return make


@pytest.fixture(scope="module")
def alone(make_client: Callable[..., Client]) -> Iterator[Callable[..., tuple[Client, str]]]:
    """What a request gives in a roomy engine that does one step at a time and serves nothing else meanwhile."""
    clients: dict[str, Client] = {}
    known: dict[str, str] = {}

    def generate(model: str, request: dict[str, Any]) -> tuple[Client, str]:
        if model not in clients:
            clients[model] = make_client(model, queue_depth=1, num_blocks_override=100, enable_prefix_caching=False)
        client, description = clients[model], f"{model} {request}"
        if description not in known:
            known[description] = f"alone{len(known)}"
            client.add(known[description], **request)
            client.run()
        return client, known[description]

    yield generate
    for client in clients.values():
        client.core.shutdown()


def engine_request(shared: int, own: list[int], kind: dict[str, Any], **params: Any) -> dict[str, Any]:
    return made_consistent({"prompt": PREFIX[:shared] + own, **params, **kind})


@pytest.mark.long
def test_every_completion_is_that_of_a_lone_run(make_client: Callable[..., Client], alone: Callable[..., Any]) -> None:
    totals: Counter[str] = Counter()

    @settings(
        max_examples=7,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        phases=[Phase.explicit, Phase.generate],
        report_multiple_bugs=False,
    )
    @given(engine=engines, script=st.lists(events, min_size=6, max_size=10))
    def check(engine: dict[str, Any], script: list[Any]) -> None:
        options = dict(engine)
        model, spare = options.pop("model"), options.pop("spare")
        num_blocks = NUM_GROUPS[model] * (MAX_MODEL_LEN // 4 + spare)
        client = make_client(model, num_blocks_override=num_blocks, **options.pop("preemption"), **options)
        try:
            made, aborted = run_script(client, script, engine_request)
            totals.update({name: getattr(client.core.stats(), name) for name in EXERCISED})
        finally:
            client.core.shutdown()
        for name, request in made.items():
            if name not in client.refused:
                assert_as_alone(client, name, aborted, *alone(model, request))

    check()
    assert all(totals[name] > 0 for name in EXERCISED), f"the random engines were too roomy: {totals}"
