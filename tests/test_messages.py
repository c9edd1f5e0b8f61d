"""Every struct that crosses a process border survives msgpack, field by field."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import msgspec
import pytest

from quire import adapter_orders, image_orders, outputs, prompt_image, request, step
from quire.adapter_orders import AdapterOrders, AdapterRef
from quire.engine import messages
from quire.engine.messages import (
    Abort,
    AddRequest,
    Ask,
    Call,
    CallResult,
    ClientMessage,
    Ended,
    EngineFailed,
    EngineOutputs,
    EngineReady,
    QuestionAnswer,
    RequestRejected,
    Shutdown,
)
from quire.image_orders import EncodeSlice, ImageOrders, ImagePlace
from quire.kv_cache import stats
from quire.kv_cache.stats import EngineStats
from quire.outputs import RequestTiming, SequenceUpdate
from quire.prompt_image import PromptImage, ReadyImage
from quire.request import EngineRequest, FinishReason, ResumePoint
from quire.sampling_params import SamplingParams, ThinkingBudget
from quire.scheduler import snapshot
from quire.scheduler.snapshot import KVSnapshot, RequestView, SequenceView
from quire.step import (
    Candidates,
    HostTransfers,
    NewSequence,
    PromptLogprobs,
    SamplingInputs,
    SequenceFork,
    SequenceSampling,
    StepPlan,
    StepResult,
    StoreReport,
    StoreTransfers,
    TokenLogprobs,
    TokenValues,
)

PARAMS = SamplingParams(n=2, temperature=0.5, stop=["</s>", "é"], logit_bias={3: -1.5}, seed=-4, logprobs=2)
SAMPLING = SequenceSampling(
    PARAMS, seed=2**64 - 1, stop_token_ids=[2, 7], bad_token_sequences=[[1, 2], [3]], num_candidates=9
)
TOKEN_VALUES = TokenValues(2, [9, -8])
ADAPTER = AdapterRef("/adapter", b"digest", "sql", 0.5)
IMAGE = PromptImage((1, 2, 2), b"key", b"pixels", (8, 4), True, False, 3, 2)
NEW_SEQUENCE = NewSequence(
    8,
    [5, 6, 7],
    2,
    [[1, 2], [3]],
    SAMPLING,
    {"segments": 1},
    {"segments": TOKEN_VALUES},
    [ImagePlace(b"key", 3, 5)],
    "key",
    [4],
)
ENCODINGS = ImageOrders([b"old"], [EncodeSlice(b"key", 2, IMAGE, 1)])
FORK = SequenceFork(8, 9, SAMPLING, token_ids=[5, 6, 8])
LOGPROBS = TokenLogprobs([4, 5], [-0.25, -1.5], rank=1, num_listed=1)
CANDIDATES = Candidates([42, 7], [-0.5, -3.0])
PROMPT_LOGPROBS = PromptLogprobs(1, [LOGPROBS, LOGPROBS])
TIMING = RequestTiming(1.5, 2.5, 3.5, num_preemptions=4, can_wait=True)
UPDATE = SequenceUpdate(
    "r-1",
    1,
    [4, 9],
    logprobs=[LOGPROBS],
    prompt_logprobs=PROMPT_LOGPROBS,
    finish_reason=FinishReason.STOP,
    stop_reason=9,
    ends_in_text=True,
    num_cached_tokens=16,
    timing=TIMING,
    ranking=(-2.5, -1.25),
    pooled=[0.5, -1.25],
    drafts=bytes((3, 2)),
)
LISTS: dict[str, Any] = {
    "expert_counts": {3: [4, 5]},
    "expert_ranks": {3: [[0, 1], [2, 0]]},
    "accepted_drafts_by_position": [6, 2],
    "running_adapters": ["sql"],
    "waiting_adapters": ["chat"],
}
NUMBERS = [name for name in EngineStats.__struct_fields__ if name not in LISTS]
STATS = EngineStats(**{name: number for number, name in enumerate(NUMBERS, start=1)}, **LISTS)
REQUEST = EngineRequest(
    prediction=[4, 5],
    images=[IMAGE],
    is_processed=True,
    is_background=True,
    adapter=ADAPTER,
    request_id="r-1",
    prompt_token_ids=[1, 2, 3],
    params=PARAMS,
    max_tokens=12,
    seed=77,
    eos_token_ids=[2],
    bad_token_sequences=[[4, 5]],
    cache_salt="tenant",
    priority=-2,
    first_index=6,
    register_prefix=True,
    pooling=True,
    constraint="digits",
    constraint_start=[3, 4],
    thinking_budget=ThinkingBudget(5, [[6]], [[7, 8]], True),
    resume_point=ResumePoint([[9], []], [1], 2, 0.5),
    columns={"segments": 2},
    token_columns={"segments": TOKEN_VALUES},
    client="key 1",
    each_step=True,
)
SEQUENCE_VIEW = SequenceView(
    1, num_output_tokens=4, num_stored_tokens=21, num_filled_slots=5, tables=[[7, 9], [0, 3]], host_tables=[[1, 2]]
)
REQUEST_VIEW = RequestView(
    "r-1",
    "running",
    17,
    16,
    2,
    9,
    waits_for_prefix=True,
    sequences=[SEQUENCE_VIEW],
    seconds=2.5,
    tokens_per_second=20.0,
    is_background=True,
)
SNAPSHOT = KVSnapshot(
    block_size=16,
    block_sizes=[16, 64],
    windows=[None, 128],
    states=bytes([0, 1, 254, 255]),
    host_states=bytes([0, 1]),
    requests=[REQUEST_VIEW],
)
RESULT = CallResult(3, value=STATS, error="why", kv=SNAPSHOT, is_internal=True)
REFUSAL = RequestRejected("r-2", "too long", param="prompt", is_asleep=True, is_culprit=True)
REPORT = StoreReport(
    found=[(0, b"\x02" * 32)],
    gone=[(1, b"\xfe" * 32)],
    loaded=[3],
    failed=[4],
    released=[5],
    num_stored=6,
    num_store_failures=7,
    num_bytes=8,
    load_seconds=0.5,
    token_seconds=0.25,
    is_scanning=True,
)
SWAPS = HostTransfers([(4, 2)], [(3, 5)], awaits_report=True)
ORDERS = StoreTransfers(
    [(4, 2)], [(3, 5)], awaits_report=True, stores=[(2, 1, b"\x01" * 32)], loads=[(0, b"\xff" * 32, 7)]
)
EXAMPLES: list[msgspec.Struct] = [
    SWAPS,
    ORDERS,
    REPORT,
    NEW_SEQUENCE,
    SAMPLING,
    IMAGE,
    ADAPTER,
    AdapterOrders([(1, ADAPTER)], awaits_report=True),
    ENCODINGS,
    *ENCODINGS.slices,
    *NEW_SEQUENCE.images,
    ReadyImage((1, 2, 2), b"key", b"pixels", (8, 4), True, False),
    TOKEN_VALUES,
    FORK,
    StepPlan(
        step_id=1,
        seq_ids=[8, 9],
        start_positions=[0, 4],
        num_tokens=[4, 1],
        sample_seq_ids=[8],
        sample_from=[0],
        new_sequences=[NEW_SEQUENCE],
        new_blocks={9: [[4], []]},
        replaced_blocks=[(9, 0, 1, 6)],
        block_copies=[(2, 6)],
        forks=[FORK],
        released=[3],
        beam_reorders=[SequenceFork(8, 10, SAMPLING)],
        token_overrides=[(8, 77), (10, 78)],
        appended={9: [5, 6]},
        transfers=ORDERS,
        adapters=AdapterOrders([(1, ADAPTER)], awaits_report=True),
        images=ENCODINGS,
        num_drafts=[1],
        drafts={8: [42]},
        trimmed_tables={8: [3, 1]},
        pooled=[0],
        masked_samples=[0],
        sampled=[(3, 9, [7, 8])],
        is_dummy=True,
    ),
    SamplingInputs(1, {0: bytes([255, 0, 1, 254])}, [2], {0: [b"", bytes(4)]}),
    LOGPROBS,
    PROMPT_LOGPROBS,
    CANDIDATES,
    StepResult(
        1,
        [[42, 7]],
        logprobs={0: [LOGPROBS, LOGPROBS]},
        prompt_logprobs={8: PROMPT_LOGPROBS},
        candidates={0: CANDIDATES},
        num_drafts=3,
        found_drafts={0: 2},
        draft_token_ids={0: [5, 6]},
        transfers=REPORT,
        adapters=[(1, "damaged")],
        failed={8: "why"},
        nonfinite=[42],
        pooled={0: [0.5, -1.25]},
        encoder_seconds=0.5,
        checksum=7,
    ),
    UPDATE,
    TIMING,
    STATS,
    REQUEST,
    REQUEST.resume_point,
    AddRequest(REQUEST, [b"\x91\x05"]),
    Abort("r-1", index=1),
    Call(3, "unregister_prefix", "p-1"),
    Shutdown(),
    SEQUENCE_VIEW,
    REQUEST_VIEW,
    SNAPSHOT,
    RESULT,
    REFUSAL,
    EngineOutputs([UPDATE], stats=STATS, results=[RESULT], rejections=[REFUSAL]),
    EngineReady(
        max_model_len=128, num_blocks=40, block_size=16, seconds={"load": 0.5}, backend="native", max_concurrency=2.5
    ),
    Ask(4, "echo", b"why"),
    Ask(4, 2, b"why"),
    QuestionAnswer(4, 2, b"so"),
    Ended(3),
    EngineFailed(
        "bad value", is_user_error=True, error_type="ConfigError", param="dtype", summary="bad", error_id="e-1"
    ),
]


def structs(module: ModuleType) -> set[type[Any]]:
    return {
        kind
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__
    }


def name_of(example: msgspec.Struct) -> str:
    return type(example).__name__


def test_there_is_an_example_of_every_struct() -> None:
    modules = (adapter_orders, image_orders, prompt_image, step, outputs, stats, request, messages, snapshot)
    for_users = {outputs.RequestOutput, outputs.CompletionOutput, outputs.RequestMetrics, outputs.Logprob}
    wanted = set().union(*map(structs, modules)) - for_users
    assert wanted == {type(example) for example in EXAMPLES}


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_the_example_sets_every_field(example: msgspec.Struct) -> None:
    """Else a field that is lost on the way would not be missed."""
    for field in msgspec.structs.fields(example):
        value = getattr(example, field.name)
        assert value != field.default, field.name
        assert value not in ([], {}, None), field.name


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_round_trip(example: msgspec.Struct) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(example), type=type(example)) == example


@pytest.mark.parametrize("example", [AddRequest(REQUEST), Abort("r-1"), Call(3, "check"), Shutdown()], ids=name_of)
def test_client_messages_are_told_apart(example: msgspec.Struct) -> None:
    decoded: Any = msgspec.msgpack.decode(msgspec.msgpack.encode(example), type=ClientMessage)
    assert decoded == example


@pytest.mark.parametrize("orders", [SWAPS, ORDERS, None], ids=["copies alone", "offload", "none"])
def test_the_orders_of_a_plan_keep_their_type(orders: HostTransfers | None) -> None:
    plan = StepPlan(1, [], [], [], [], [], transfers=orders)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)
    assert decoded == plan
    assert type(decoded.transfers) is type(orders)


@pytest.mark.parametrize("value", [STATS, 0, 3, None])
def test_results_of_calls_keep_their_type(value: object) -> None:
    result = CallResult(1, value)  # type: ignore[arg-type]
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=CallResult)
    assert decoded == result
    assert type(decoded.value) is type(value)


@pytest.mark.parametrize("junk", [b"", b"\xc1", b"\x90", msgspec.msgpack.encode(["exec", "x"]), b"\xa3abc"])
def test_junk_is_an_error_of_the_decoder(junk: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        msgspec.msgpack.decode(junk, type=ClientMessage)


def test_a_request_with_impossible_sampling_does_not_decode() -> None:
    """The checks of SamplingParams hold on the wire as well."""
    encoded = msgspec.msgpack.encode(REQUEST)
    broken = encoded.replace(msgspec.msgpack.encode("temperature") + msgspec.msgpack.encode(0.5),
                             msgspec.msgpack.encode("temperature") + msgspec.msgpack.encode(-0.5))  # fmt: skip
    assert broken != encoded
    with pytest.raises(msgspec.ValidationError, match="temperature"):
        msgspec.msgpack.decode(broken, type=EngineRequest)


def test_plan_counts_its_tokens() -> None:
    plan = next(example for example in EXAMPLES if isinstance(example, StepPlan))
    assert plan.total_tokens == 5
