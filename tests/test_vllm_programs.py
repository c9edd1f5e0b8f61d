"""Programs as vLLM's users write them, with one import changed: `from quire import ...` for `from vllm import ...`."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quire
from quire import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    BeamSearchParams,
    EngineArgs,
    FlexibleArgumentParser,
    LLMEngine,
    LoRARequest,
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
    UserError,
)
from quire.config.options import EngineOptions
from quire.config.vllm import KEYWORDS, MEANT, NOTED, REFUSED, TRACES, VllmFlag
from tests.models.encoders import CLASSIFIERS, ENCODERS
from tests.models.harness import randomize
from tests.test_llm_pooling import save_with_tokenizer

OPTIONS: dict[str, Any] = {"max_model_len": "256", "num_gpu_blocks_override": 64, "num_threads": 1}
PROMPTS = ["def add(a, b):", "import", "class Stack:", "for i in range("]
CONVERSATION = [
    {"role": "system", "content": "You write Python."},
    {"role": "user", "content": "Hello"},
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        model="bundled",
        trust_remote_code=True,
        dtype="float",
        swap_space=0.01,
        gpu_memory_utilization=0.9,
        enforce_eager=True,
        disable_log_stats=True,
        max_logprobs=151_936,
        **OPTIONS,
    ) as llm:
        yield llm


def test_basic(llm: LLM) -> None:
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    outputs = llm.generate(PROMPTS, sampling_params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt == prompt
        assert output.finished
        assert isinstance(output.outputs[0].text, str)
        assert len(output.outputs[0].token_ids) <= 16
        assert output.outputs[0].finished()
        assert output.outputs[0].finish_reason in ("stop", "length")
        assert output.metrics is not None


def test_forms_of_prompts(llm: LLM) -> None:
    token_ids = llm.get_tokenizer().encode(PROMPTS[0])
    greedy = SamplingParams(temperature=0, max_tokens=4)
    forms: list[Any] = [
        PROMPTS[0],
        [PROMPTS[0]],
        token_ids,
        [token_ids],
        {"prompt": PROMPTS[0]},
        TextPrompt(prompt=PROMPTS[0]),
        [TokensPrompt(prompt_token_ids=token_ids)],
        TokensPrompt(prompt_token_ids=token_ids, prompt=PROMPTS[0], cache_salt="mine"),
    ]
    found = [llm.generate(form, greedy, use_tqdm=False) for form in forms]
    assert {tuple(output.outputs[0].token_ids) for [output] in found} == {tuple(found[0][0].outputs[0].token_ids)}
    assert all(output.prompt_token_ids == token_ids for [output] in found)
    several = llm.generate(PROMPTS[:2], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)], use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in several] == [1, 2]


def test_chat_and_several_chats(llm: LLM) -> None:
    params = SamplingParams(temperature=0.5, max_tokens=3, seed=1)
    [one] = llm.chat(CONVERSATION, sampling_params=params, use_tqdm=False)
    several = llm.chat([CONVERSATION, CONVERSATION[1:]], params, use_tqdm=False)
    assert one.outputs[0].token_ids == several[0].outputs[0].token_ids
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ tools | tojson if tools }}"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    [output] = llm.chat(CONVERSATION, params, chat_template=template, tools=tools, use_tqdm=False)
    assert output.prompt == f"<system>You write Python.<user>Hello{json.dumps(tools, separators=(', ', ': '))}"
    with pytest.raises(UserError, match="chat has no argument 'documents_of'"):
        llm.chat(CONVERSATION, params, documents_of=[])  # type: ignore[call-arg]


def test_the_tokenizer_as_transformers_has_it(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(CONVERSATION, add_generation_prompt=True)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    [output] = llm.chat(CONVERSATION, SamplingParams(max_tokens=1), use_tqdm=False)
    assert (output.prompt, output.prompt_token_ids) == (text, ids)
    assert tokenizer.apply_chat_template([CONVERSATION], tokenize=False, add_generation_prompt=True) == [text]
    assert tokenizer.apply_chat_template(CONVERSATION, chat_template="{{ x }}", x=3, tokenize=False) == "3"
    assert tokenizer.eos_token_id in llm.model_config.eos_token_ids
    assert tokenizer.eos_token == tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id)
    assert tokenizer.convert_tokens_to_ids(tokenizer.eos_token) == tokenizer.eos_token_id
    assert tokenizer("import os")["input_ids"] == tokenizer.encode("import os")
    assert tokenizer(["a", "b c"])["attention_mask"][0] == [1] * len(tokenizer.encode("a"))
    assert tokenizer.batch_decode([tokenizer.encode("x = 1")], skip_special_tokens=True) == ["x = 1"]
    assert tokenizer.decode(tokenizer.eos_token_id) == tokenizer.eos_token
    assert len(tokenizer) == len(tokenizer.get_vocab()) == llm.model_config.vocab_size
    assert tokenizer.tokenize("import os")[0] in tokenizer.get_vocab()
    with pytest.raises(UserError, match="has no token 99999"):
        tokenizer.convert_ids_to_tokens([99999])


def test_keywords_of_calls(llm: LLM) -> None:
    """How texts become tokens, and what is not there."""
    greedy = SamplingParams(temperature=0, max_tokens=2)
    ids = llm.get_tokenizer().encode(PROMPTS[2])
    ends = [{"truncate_prompt_tokens": 2}, {"truncate_prompt_tokens": 2, "truncation_side": "right"}]
    for kwargs, kept in zip(ends, (ids[-2:], ids[:2]), strict=True):
        [output] = llm.generate(PROMPTS[2], greedy, use_tqdm=False, tokenization_kwargs=kwargs)
        assert output.prompt_token_ids == kept
    none = {"mm_processor_kwargs": None, "tokenization_kwargs": {"add_special_tokens": True}, "priority": 0}
    [output] = llm.chat(CONVERSATION, greedy, use_tqdm=False, **none)  # type: ignore[arg-type]
    assert output.prompt_token_ids == llm.get_tokenizer().apply_chat_template(CONVERSATION, add_generation_prompt=True)
    for refused, message in (
        ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs has no 'a'"),
        ({"tokenization_kwargs": {"max_lenght": 3}}, "unknown key of tokenization_kwargs 'max_lenght'"),
        ({"tokenization_kwargs": {"add_special_tokens": False}}, "give token ids instead"),
        ({"tokenisation_kwargs": {}}, "unknown argument 'tokenisation_kwargs'; did you mean"),
    ):
        with pytest.raises(UserError, match=message):
            llm.generate(PROMPTS[0], greedy, use_tqdm=False, **refused)  # type: ignore[arg-type]
    llm.generate(PROMPTS[0] * 20, greedy, use_tqdm=False)
    assert llm.reset_prefix_cache(reset_running_requests=True) > 0
    with pytest.raises(UserError, match="reset_connector must be False"):
        llm.reset_prefix_cache(reset_connector=True)
    with pytest.raises(UserError, match="mode must be one of abort, wait, keep"):
        llm.sleep(mode="now")


def test_logprobs_and_the_whole_vocabulary(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=3, prompt_logprobs=2)
    wide = SamplingParams(temperature=0, max_tokens=2, logprobs=-1)
    output, all_of_it = llm.generate([PROMPTS[0]] * 2, [params, wide], use_tqdm=False)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert entry[token_id].rank == 1
        assert entry[token_id].decoded_token == llm.get_tokenizer().decode(token_id)
        assert [each.rank for each in entry.values()] == [1, 2, 3]
    total = sum(
        entry[token_id].logprob for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True)
    )
    assert completion.cumulative_logprob == pytest.approx(total)
    for entry in all_of_it.outputs[0].logprobs or []:
        assert len(entry) == llm.model_config.vocab_size
        assert sum(math.exp(each.logprob) for each in entry.values()) == pytest.approx(1, abs=1e-4)
    for few, many in zip(completion.logprobs, all_of_it.outputs[0].logprobs or [], strict=True):
        assert list(few) == list(many)[:3]
        assert [few[each].logprob for each in few] == pytest.approx([many[each].logprob for each in few], abs=1e-5)


def test_logprobs_of_given_tokens(llm: LLM) -> None:
    """Bit by bit the same beside other requests, and those of the whole vocabulary but for rounding."""
    given = SamplingParams(temperature=0, max_tokens=3, logprob_token_ids=[5, 900, 5, 17])
    both = SamplingParams(temperature=0, max_tokens=3, logprobs=2, logprob_token_ids=[900])
    wide = SamplingParams(temperature=0, max_tokens=3, logprobs=-1)
    [alone] = llm.generate([PROMPTS[0]], given, use_tqdm=False)
    [first, second, third, _] = llm.generate([*PROMPTS[:1] * 3, PROMPTS[1]], [given, both, wide, both], use_tqdm=False)
    assert alone.outputs[0].logprobs == first.outputs[0].logprobs
    for chosen, few, mixed, many in zip(
        first.outputs[0].token_ids,
        *(each.outputs[0].logprobs or [] for each in (first, second, third)),
        strict=True,
    ):
        assert list(few) == list(dict.fromkeys([chosen, 5, 900, 17]))
        assert list(mixed) == list(dict.fromkeys([*list(many)[:2], 900]))
        assert few[chosen].rank == 1
        for token_id, entry in (*few.items(), *mixed.items()):
            assert entry.rank in (None, many[token_id].rank)
            assert entry.decoded_token == many[token_id].decoded_token
            assert entry.logprob == pytest.approx(many[token_id].logprob, abs=1e-5)
    with pytest.raises(UserError, match="logprob_token_ids"):
        llm.generate("a", SamplingParams(logprob_token_ids=[10**6]))


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logits", "processed_logits"])
def test_modes_of_logprobs(llm: LLM, mode: str) -> None:
    """Through the engine: filters, structured outputs, prompts, greedy requests and preempted ones."""
    free = SamplingParams(temperature=0.7, top_k=3, max_tokens=12, ignore_eos=True, logprobs=6, seed=5)
    forced = SamplingParams(temperature=0, logprobs=4, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    plain = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=4, prompt_logprobs=2)
    [raw] = llm.generate(PROMPTS[0], plain, use_tqdm=False)
    options = {**OPTIONS, "max_model_len": 48, "num_gpu_blocks_override": 4, "enable_prefix_caching": False}
    with LLM("bundled", dtype="float", logprobs_mode=mode, **options) as other:
        [alone] = other.generate(PROMPTS[0], free, use_tqdm=False)
        crowd = other.generate([PROMPTS[0]] * 4, free, use_tqdm=False)
        assert sum(output.metrics.num_preemptions for output in crowd) > 0
        assert all(output.outputs[0].logprobs == alone.outputs[0].logprobs for output in crowd)
        [greedy] = other.generate(PROMPTS[0], plain, use_tqdm=False)
        [constrained] = other.generate(PROMPTS[0], forced, use_tqdm=False)
        ranked = SamplingParams(n=1, best_of=2, max_tokens=2)
        if mode.endswith("logits"):
            with pytest.raises(UserError, match="best_of compares log-probabilities"):
                other.generate(PROMPTS[0], ranked)
        else:
            assert other.generate(PROMPTS[0], ranked, use_tqdm=False)[0].finished
    for entry in alone.outputs[0].logprobs or []:
        values = [each.logprob for each in list(entry.values())]
        assert sum(map(math.isfinite, values)) == (3 if mode.startswith("processed") else 6)
        if mode == "processed_logprobs":
            assert sum(map(math.exp, values)) == pytest.approx(1, abs=1e-5)
    first = (constrained.outputs[0].logprobs or [])[0]
    allowed = [value for value in first.values() if math.isfinite(value.logprob)]
    assert all("yes no".find((value.decoded_token or "?").strip()) >= 0 for value in allowed) == mode.startswith("proc")
    known = [*(raw.outputs[0].logprobs or []), *(raw.prompt_logprobs or [])[1:]]
    found = [*(greedy.outputs[0].logprobs or []), *(greedy.prompt_logprobs or [])[1:]]
    for expected, entry in zip(known, found, strict=True):
        assert list(entry or {}) == list(expected or {})
        offsets = {round(entry[token].logprob - value.logprob, 4) for token, value in (expected or {}).items()}
        assert len(offsets) == 1
        assert (offsets == {0.0}) == mode.endswith("logprobs")


def test_prefix_caching(llm: LLM) -> None:
    prefix = "# a long beginning that several prompts share, line after line, so that blocks fill\n" * 4
    params = SamplingParams(temperature=0.0, max_tokens=2)
    llm.generate(prefix + "x", params, use_tqdm=False)
    [again] = llm.generate(prefix + "y", params, use_tqdm=False)
    assert again.num_cached_tokens > 0
    skipping = SamplingParams(temperature=0.0, max_tokens=2, skip_reading_prefix_cache=True)
    outputs = llm.generate([prefix + "y"] * 2, skipping, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [0, 0]
    assert outputs[0].outputs[0].token_ids == again.outputs[0].token_ids


def test_beam_search(llm: LLM) -> None:
    [output] = llm.beam_search([{"prompt": PROMPTS[0]}], BeamSearchParams(beam_width=2, max_tokens=3))
    assert len(output.sequences) == 2
    assert all(sequence.text.startswith(PROMPTS[0]) for sequence in output.sequences)


def test_structured_outputs(llm: LLM) -> None:
    choice = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["Positive", "Negative"]))
    [output] = llm.generate("This is wonderful:", choice, use_tqdm=False)
    assert output.outputs[0].text in ("Positive", "Negative")


def test_embed_classify_and_score(tmp_path: Path) -> None:
    embedder = save_with_tokenizer(randomize(ENCODERS["bert"]()), tmp_path / "embedder")
    with LLM(model=str(embedder), task="embed", num_threads=1) as llm:
        [output] = llm.embed(["w1 w2"], use_tqdm=False)
        assert len(output.outputs.embedding) == llm.model_config.hidden_size
        [pooled] = llm.encode("w1 w2", pooling_task="embed", use_tqdm=False)
        assert len(pooled.outputs.data) == llm.model_config.hidden_size
        [score] = llm.score("w1 w2", "w1 w2", use_tqdm=False)
        assert score.outputs.score == pytest.approx(1.0, abs=1e-5)
        assert llm.embed("w3", pooling_params=PoolingParams(task="embed"), use_tqdm=False)
        given: dict[str, Any] = {"lora_request": None, "tokenization_kwargs": {"truncate_prompt_tokens": 4}}
        [cut] = llm.embed("w1 w2 w3 w4", use_tqdm=False, **given)
        assert len(cut.prompt_token_ids) == 4
        with pytest.raises(UserError, match="truncation_side must be 'right'"):
            llm.score("w1", "w2", tokenization_kwargs={"truncation_side": "left"})
        for task, message in (("classify", "it is no classifier"), ("other", "task must be one of")):
            with pytest.raises(UserError, match=message):
                llm.encode("w1", pooling_task=task)
        with pytest.raises(UserError, match="ask for the task 'classify'"):
            llm.embed("w3", pooling_params=PoolingParams(task="classify"))
    classifier = save_with_tokenizer(randomize(CLASSIFIERS["bert"]()), tmp_path / "classifier")
    with LLM(str(classifier), runner="pooling", num_threads=1) as llm:
        [output] = llm.classify("w1 w2", use_tqdm=False)
        assert sum(output.outputs.probs) == pytest.approx(1.0)
        assert output.outputs.num_classes == len(output.outputs.probs)


def test_a_program_with_a_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """As vLLM's examples of generation, classification and embedding read theirs."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model="bundled", max_model_len=128)
    group = parser.add_argument_group("Sampling parameters")
    group.add_argument("--max-tokens", type=int)
    line = ["--max_tokens", "3", "--num-gpu-blocks-override=64", "--hf-overrides.rope_theta", "7", "--dtype", "float"]
    found = parser.parse_args(line)
    arguments: dict[str, Any] = vars(found).copy()
    max_tokens = arguments.pop("max_tokens")
    with LLM(**arguments, num_threads=1) as llm:
        params = llm.get_default_sampling_params()
        params = SamplingParams(max_tokens=max_tokens, temperature=params.temperature)
        [output] = llm.generate(PROMPTS[0], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) <= 3
        assert (llm.ready.num_blocks, llm.ready.max_model_len) == (64, 128)
    options = EngineArgs.from_cli_args(found).to_options()
    assert (options.hf_overrides, options.dtype) == ({"rope_theta": 7}, "float32")
    for wrong in (["--max-model-len", "long"], ["--no-such-flag"]):
        with pytest.raises(SystemExit) as left:
            parser.parse_args(wrong)
        assert left.value.code == 2
    assert "unknown option '--no-such-flag'" in capsys.readouterr().err


@pytest.mark.long
def test_an_asynchronous_engine_of_gathered_arguments() -> None:
    assert AsyncLLMEngine is AsyncLLM

    async def run() -> str:
        args = AsyncEngineArgs(model="bundled", max_model_len=128, num_threads=1)
        args.num_gpu_blocks_override = 16
        engine = AsyncLLMEngine.from_engine_args(args)
        try:
            assert engine.ready.num_blocks == 16
            await engine.pause_generation(mode="wait")
            assert await engine.is_paused()
            await engine.resume_generation()
            assert not await engine.is_paused()
            last = SamplingParams(max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY)
            cut: dict[str, Any] = {"lora_request": None, "tokenization_kwargs": {"truncate_prompt_tokens": 2}}
            [output] = [output async for output in engine.generate(PROMPTS[0], last, "cut", **cut)]
            assert len(output.prompt_token_ids) == 2
            with pytest.raises(UserError, match="lora_request needs an engine with enable_lora=True"):
                await anext(engine.generate(PROMPTS[0], last, "adapted", lora_request=LoRARequest("a", 1, "b")))
            params = SamplingParams(max_tokens=4, temperature=0.0, output_kind=RequestOutputKind.DELTA)
            pieces = [
                completion.text
                async for output in engine.generate(request_id="a", prompt=PROMPTS[0], sampling_params=params)
                for completion in output.outputs
            ]
            return "".join(pieces)
        finally:
            engine.shutdown()

    text = asyncio.run(run())
    with LLM(**vars(EngineArgs(max_model_len=128, num_gpu_blocks_override=16, num_threads=1))) as llm:
        [output] = llm.generate(PROMPTS[0], SamplingParams(max_tokens=4, temperature=0.0), use_tqdm=False)
    assert output.outputs[0].text == text
    with pytest.raises(UserError, match="enable_elastic_ep is not supported"):
        AsyncLLM.from_engine_args(AsyncEngineArgs(enable_elastic_ep=True))


def test_an_engine_driven_step_by_step(llm: LLM) -> None:
    """Requests come while others run, one is aborted, one asks for what is new only; calls to the engine between
    steps lose no output. The tokens are those of `LLM.generate`."""
    args = EngineArgs(model="bundled", dtype="float", **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    news = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    waiting = [("0", PROMPTS[0], params), ("1", PROMPTS[1], news), ("2", PROMPTS[2], params)]
    finished, pieces = {}, ""
    with LLMEngine.from_engine_args(args) as engine:
        engine.add_request("gone", PROMPTS[3], params)
        assert not any(output.finished for output in engine.step())
        while waiting or engine.has_unfinished_requests():
            if waiting:
                mine = copy.copy(waiting[0][2])
                assert engine.add_request(*waiting[0][:2], mine) == waiting.pop(0)[0]
                mine.logprobs = None  # of a request that has been added nothing changes
            engine.abort_request("gone")
            assert engine.stats()["num_running"] <= 3
            for output in engine.step():
                pieces += output.outputs[0].text if output.request_id == "1" else ""
                if output.finished:
                    finished[output.request_id] = output
        assert engine.get_num_unfinished_requests() == 0
        assert engine.step() == []
        with pytest.raises(UserError, match="1100 tokens"):
            engine.add_request("3", [1] * 1100, params)
        assert not engine.has_unfinished_requests()
    assert sorted(finished) == ["0", "1", "2"]
    expected = llm.generate(PROMPTS[:3], params, use_tqdm=False)
    for number in ("0", "2"):
        assert finished[number].outputs[0].token_ids == expected[int(number)].outputs[0].token_ids
        assert finished[number].outputs[0].logprobs == expected[int(number)].outputs[0].logprobs
        assert finished[number].prompt == PROMPTS[int(number)]
    assert pieces == expected[1].outputs[0].text


def test_a_step_tells_of_one_request_that_the_engine_refuses_and_goes_on() -> None:
    with LLMEngine(model="bundled", num_gpu_blocks_override=2, max_model_len=128, num_threads=1) as engine:
        engine.add_request("large", "import", SamplingParams(n=8, max_tokens=20))
        engine.add_request("small", "import", SamplingParams(max_tokens=1))
        with pytest.raises(UserError, match="request 'large': "):
            engine.step()
        [output] = engine.step()
        assert (output.request_id, output.finished) == ("small", True)
        assert not engine.has_unfinished_requests()


def test_kinds_of_output_of_the_asynchronous_engine() -> None:
    async def texts(engine: AsyncLLM, kind: RequestOutputKind) -> list[str]:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, output_kind=kind)
        return [output.outputs[0].text async for output in engine.generate(PROMPTS[0], params, request_id="mine")]

    async def run() -> None:
        with_options = AsyncLLM(model="bundled", in_process=True, disable_log_stats=True, **OPTIONS)
        try:
            cumulative = await texts(with_options, RequestOutputKind.CUMULATIVE)
            [final] = await texts(with_options, RequestOutputKind.FINAL_ONLY)
            assert "".join(await texts(with_options, RequestOutputKind.DELTA)) == final == cumulative[-1]
        finally:
            with_options.shutdown()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("keywords", "param"),
    [
        ({"extra_args": [1]}, "extra_args"),
        ({"flat_logprobs": True}, "flat_logprobs"),
        ({"logprob_token_ids": [-1]}, "logprob_token_ids"),
        ({"logprob_token_ids": [1], "use_beam_search": True}, "logprob_token_ids"),
        ({"output_kind": 7}, "output_kind"),
        ({"prompt_logprob_token_ids": [[1]]}, "prompt_logprob_token_ids"),
        ({"prompt_logprob_start": 1}, "prompt_logprob_start"),
        ({"stream_interval": 2}, "stream_interval"),
        ({"watermarking": True}, "watermarking"),
        ({"routed_experts_prompt_start": 1}, "routed_experts_prompt_start"),
        ({"trace_decode_token_ids": [1]}, "trace_decode_token_ids"),
    ],
)
def test_parameters_that_are_refused(keywords: dict[str, Any], param: str) -> None:
    with pytest.raises(UserError) as caught:
        SamplingParams(**keywords)
    assert caught.value.param == param


def test_parameters_that_ask_for_nothing() -> None:
    plain = SamplingParams()
    assert plain == SamplingParams(
        extra_args=None, flat_logprobs=False, skip_clone=False, spaces_between_special_tokens=True
    )
    for nothing in ({"watermarking": False}, {"prompt_logprob_start": 0}, {"stream_interval": 1}):
        SamplingParams(**nothing)
    assert PoolingParams() == PoolingParams(requires_token_ids=False, extra_kwargs=None)
    for name in ("step_tag_id", "returned_token_ids", "late_interaction_params", "late_chunking_params"):
        PoolingParams(**{name: None})
        with pytest.raises(UserError, match=f"{name} is not supported"):
            PoolingParams(**{name: [1]})


@pytest.mark.parametrize("entry", [e for e in KEYWORDS.values() if e.is_keyword], ids=lambda entry: entry.name)
def test_every_keyword_does_what_the_table_says(entry: VllmFlag, caplog: pytest.LogCaptureFixture) -> None:
    values: dict[str, Any] = {
        "flag": not (True in entry.harmless and False not in entry.harmless),
        "int": 7,
        "float": 0.5,
        "text": "word",
        "count": "3k",
        "length": "2K",
        "any": "word",
        "texts": ["one"],
        "ints": [1],
        "json": {"key": 1},
        "json list": ["one"],
        "appended": ["one"],
    }
    value = values[entry.kind]
    caplog.set_level(logging.WARNING, logger="quire")
    if entry.name == "hf_token":
        value = None
    if entry.fate == REFUSED or entry.name in TRACES:
        with pytest.raises(UserError, match=f"{entry.name} is not supported: "):
            EngineOptions.from_keywords({entry.name: value})
        return
    options = EngineOptions.from_keywords({entry.name: value})
    notes = [record.getMessage() for record in caplog.records]
    if entry.name == "disable_log_stats":
        assert notes == [], "a program's engine logs none"
    elif entry.target is not None and entry.target not in (*options.__struct_fields__, "hf_token"):
        assert notes == [f"{entry.name} has no effect: it is an option of servers"]
    elif entry.fate == MEANT and entry.target is not None and (entry.known is None or value in entry.known):
        changed = {
            name for name in options.__struct_fields__ if getattr(options, name) != getattr(EngineOptions(), name)
        }
        assert changed <= {entry.target, "preemption_mode"}
        assert notes == []
    elif entry.fate == NOTED and value not in entry.harmless:
        assert [note.split()[0] for note in notes] == [entry.name]
        assert options == EngineOptions()


def test_keywords_in_vllms_words() -> None:
    import torch

    servers = {"served_model_name": "x", "enable_sleep_mode": True, "max_num_queued_reqs": 3, "shutdown_timeout": 0}
    servers |= {"block_size": None, "enable_prefix_caching": None, "tokens_only": False, "log_config_file": None}
    options = EngineOptions.from_keywords(
        servers | {"dtype": torch.float16, "max_model_len": -1, "max_num_seqs": "1k", "swap_space": 4}
    )
    assert options == EngineOptions(dtype="float16", max_num_seqs=1000, swap_space=4, preemption_mode="auto")


def test_every_name_is_there() -> None:
    for name in quire.__all__:
        assert getattr(quire, name) is not None
