"""`quire bench`: latency and throughput of the engine in this process, or of any OpenAI-compatible server."""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from quire import envs
from quire.bench.datasets import (
    LengthRange,
    PromptSpec,
    RandomImages,
    RandomPrompts,
    as_messages,
    as_text,
    read_dataset,
)
from quire.bench.metrics import METRICS, parse_goodput, summarize
from quire.cli.bench_mode import Mode, count_flag, json_flag, options_json
from quire.cli.engine_flags import add_engine_flags, engine_options
from quire.cli.main import EXIT_INTERRUPTED
from quire.cli.parser import Parser
from quire.cli.session import import_executor
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.errors import UserError, nearest_name
from quire.outputs import RequestOutput, raise_if_nonfinite
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.bench.metrics import RequestRecord
    from quire.bench.offline import Generator
    from quire.engine.input_processor import Prompt

DEFAULT_TOKEN_IDS = "300:3999"
"""Range of random prompts' token ids: ordinary tokens in most vocabularies."""


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    name = arguments[0]
    if name not in MODES:
        raise UserError(f"unknown benchmark {name!r}{nearest_name(name, MODES)} (known: {', '.join(MODES)})")
    return MODES[name].main(f"quire bench {name}", arguments[1:])


def _usage() -> str:
    lines = [f"  {name:<11} {mode.summary}" for name, mode in MODES.items()]
    return "\n".join(
        ["usage: quire bench MODE [options]", "", *lines, "", "`quire bench MODE --help` lists the options."]
    )


def _latency_flags(parser: Parser) -> None:
    group = parser.add_argument_group("benchmark options")
    count_flag(group, "--input-len", 32, "prompt tokens of each sequence")
    count_flag(group, "--output-len", 128, "generated tokens of each sequence (end-of-sequence is ignored)")
    count_flag(group, "--batch-size", 8, "sequences in the batch")
    count_flag(group, "--num-warmups", 2, "repeats before the timed ones", minimum=0)
    count_flag(group, "--num-repeats", 10, "timed repeats")
    json_flag(group)
    add_engine_flags(parser)


def _latency(namespace: argparse.Namespace) -> int:
    from quire.bench import offline
    from quire.cli import report

    report.check_writable(namespace.json)
    options = engine_options(namespace)
    shape = offline.BatchShape(
        batch_size=namespace.batch_size,
        input_len=namespace.input_len,
        output_len=namespace.output_len,
        vocab_size=resolve(options).model.vocab_size,
    )
    repeats = namespace.num_warmups + namespace.num_repeats
    with (
        _generator(options, show_progress=False) as generate,
        report.progress_bar("repeats", repeats) as tick,
    ):
        result = offline.measure_latency(
            generate,
            shape,
            num_warmups=namespace.num_warmups,
            num_repeats=namespace.num_repeats,
            seed=options.seed,
            on_done=tick,
        )
    report.print_rows(
        f"latency of {shape.batch_size} x {shape.input_len} in, {shape.output_len} out ({options.model})",
        [
            ("output throughput", f"{result.output_throughput:,.2f} tokens/s"),
            ("time per step", f"{result.seconds_per_step * report.MILLISECONDS:,.2f} ms"),
        ],
    )
    report.print_distributions("Seconds", {"batch latency": result.distribution}, factor=1.0)
    report.write_json(
        namespace.json,
        {
            "benchmark": "latency",
            "options": options_json(namespace),
            "seconds": list(result.seconds),
            "latency_seconds": report.distribution_json(result.distribution, 1.0),
            "output_throughput": result.output_throughput,
            "seconds_per_step": result.seconds_per_step,
        },
    )
    return 0


def _throughput_flags(parser: Parser) -> None:
    group = parser.add_argument_group("benchmark options")
    _prompt_flags(group, num_prompts=64, ids_help="range of the random token ids (default: the whole vocabulary)")
    group.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="generate all of the output length"
    )
    group.add_argument(
        "--oracle", metavar="P", type=float, help="replay a run without drafts; each draft is right with probability P"
    )
    json_flag(group)
    add_engine_flags(parser)


def _throughput(namespace: argparse.Namespace) -> int:
    from quire.bench import offline
    from quire.cli import report

    report.check_writable(namespace.json)
    options = engine_options(namespace)
    every_id = f"0:{resolve(options).model.vocab_size - 1}"
    prompts = _prompts(namespace, random.Random(options.seed), every_id)
    plain: offline.ThroughputResult | None = None
    if namespace.oracle is not None:
        if options.speculative_config is None:
            raise UserError("--oracle needs --speculative-config, whose drafts it replaces", param="oracle")
        with _generator(msgspec.structs.replace(options, speculative_config=None), show_progress=True) as generate:
            plain = offline.measure_throughput(generate, prompts, ignore_eos=namespace.ignore_eos)
        drafts = {**options.speculative_config, "oracle": namespace.oracle}
        options = msgspec.structs.replace(options, speculative_config=drafts)
    predicted = () if plain is None else plain.outputs
    with _generator(options, show_progress=True) as generate:
        result = offline.measure_throughput(generate, prompts, ignore_eos=namespace.ignore_eos, predicted=predicted)
    gain = [] if plain is None else [("times that without drafts", f"{plain.seconds / result.seconds:.2f}")]
    report.print_rows(
        f"throughput of {options.model}",
        [
            ("requests", f"{result.num_requests:,}"),
            ("duration", f"{result.seconds:,.2f} s"),
            ("prompt tokens", f"{result.num_prompt_tokens:,} ({result.num_cached_tokens:,} from the prefix cache)"),
            ("output tokens", f"{result.num_output_tokens:,}"),
            ("request throughput", f"{result.requests_per_second:,.2f} requests/s"),
            ("output throughput", f"{result.output_throughput:,.2f} tokens/s"),
            ("total throughput", f"{result.total_throughput:,.2f} tokens/s"),
            *gain,
        ],
    )
    report.write_json(
        namespace.json,
        {
            "benchmark": "throughput",
            "duration_without_drafts": None if plain is None else plain.seconds,
            "options": options_json(namespace),
            "duration": result.seconds,
            "num_requests": result.num_requests,
            "num_prompt_tokens": result.num_prompt_tokens,
            "num_cached_tokens": result.num_cached_tokens,
            "num_output_tokens": result.num_output_tokens,
            "request_throughput": result.requests_per_second,
            "output_throughput": result.output_throughput,
            "total_token_throughput": result.total_throughput,
        },
    )
    return 0


def _serve_flags(parser: Parser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--base-url", metavar="URL", default="http://127.0.0.1:8000", help="with or without /v1")
    server.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    server.add_argument("--model", metavar="NAME", help="default: the first of /v1/models")
    server.add_argument("--api-key", metavar="KEY", help="default: QUIRE_API_KEY")
    server.add_argument("--timeout", metavar="S", type=float, default=600.0, help="seconds without a byte (600)")
    requests = parser.add_argument_group("requests")
    _prompt_flags(requests, num_prompts=100, ids_help=f"range of the random token ids (default: {DEFAULT_TOKEN_IDS})")
    requests.add_argument(
        "--prompt-format",
        choices=("ids", "text"),
        help="random prompts as token ids (completions only, exact length) or as words (about one token each)",
    )
    requests.add_argument("--images", metavar="N|LO:HI", help="random pictures of each request (0; chat only)")
    requests.add_argument(
        "--image-size", metavar="WxH,...", help="their pixels (448x448); each has one of several sizes"
    )
    requests.add_argument("--ignore-eos", action="store_true", help="ask for all of the output length (an extension)")
    requests.add_argument("--temperature", metavar="X", type=float, help="default: the server's")
    requests.add_argument("--extra-body", metavar="JSON", type=_json_object, default={}, help="more fields of the body")
    load = parser.add_argument_group("load")
    load.add_argument("--request-rate", metavar="R", type=float, default=math.inf, help="requests/s, or inf (default)")
    load.add_argument(
        "--burstiness", metavar="K", type=float, default=1.0, help="gamma shape of the gaps: 1 Poisson, < 1 burstier"
    )
    count_flag(load, "--max-concurrency", None, "requests open at once (default: no limit)")
    load.add_argument("--seed", metavar="N", type=int, default=0, help="of prompts and arrivals (0)")
    result = parser.add_argument_group("results")
    result.add_argument(
        "--goodput", metavar="METRIC:MS", nargs="+", default=[], help="objectives of a good request: ttft:500 tpot:50"
    )
    result.add_argument(
        "--percentile-metrics", metavar="LIST", default=",".join(METRICS), help=f"of {','.join(METRICS)}"
    )
    result.add_argument("--metric-percentiles", metavar="LIST", default="50,90,99", help="default: 50,90,99")
    json_flag(result)


def _serve(namespace: argparse.Namespace) -> int:
    import asyncio

    from quire.bench import openai_client
    from quire.bench.serving import arrival_offsets, run_load
    from quire.cli import report

    report.check_writable(namespace.json)
    if not namespace.timeout > 0:
        raise UserError(f"--timeout must be positive, not {namespace.timeout:g}", param="timeout")
    metrics = _metrics(namespace.percentile_metrics)
    percentiles = _percentiles(namespace.metric_percentiles)
    goodput = parse_goodput(namespace.goodput)
    prompts = _serve_prompts(namespace)
    offsets = arrival_offsets(
        len(prompts), namespace.request_rate, namespace.burstiness, random.Random(namespace.seed + 1)
    )
    base_url = namespace.base_url.rstrip("/").removesuffix("/v1")
    api_key = namespace.api_key or envs.api_key()

    model = namespace.model or asyncio.run(openai_client.first_model(base_url, api_key))
    records: list[RequestRecord] = []

    async def run() -> None:
        settings = openai_client.ClientSettings(
            base_url=base_url,
            endpoint=namespace.endpoint,
            model=model,
            api_key=api_key,
            ignore_eos=namespace.ignore_eos,
            temperature=namespace.temperature,
            extra_body=namespace.extra_body,
        )
        with report.progress_bar("requests", len(prompts)) as tick:

            def on_done(record: RequestRecord) -> None:
                records.append(record)
                tick()

            await run_load(
                settings,
                prompts,
                offsets,
                max_concurrency=namespace.max_concurrency,
                timeout=namespace.timeout,
                on_done=on_done,
            )

    is_interrupted = False
    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        if not records:
            raise
        is_interrupted = True
        print(f"quire: interrupted: {len(records)} of {len(prompts)} requests had ended", file=sys.stderr)
    result = summarize(records, goodput=goodput, percentiles=percentiles)
    report.print_serving_report(result, metrics, title=f"{model} at {base_url}")
    report.write_json(
        namespace.json,
        {"benchmark": "serve", "options": options_json(namespace) | {"model": model, "base_url": base_url}}
        | {"is_interrupted": is_interrupted}
        | report.serving_json(result, metrics),
    )
    if is_interrupted:
        return EXIT_INTERRUPTED
    return 0 if result.num_completed else 1


def _serve_prompts(namespace: argparse.Namespace) -> list[PromptSpec]:
    convert: Callable[[PromptSpec], PromptSpec]
    images = _random_images(namespace)
    if namespace.endpoint == "chat":
        if namespace.prompt_format == "ids":
            raise UserError("the chat endpoint takes no token ids: --prompt-format text", param="prompt_format")
        drawing = random.Random(namespace.seed + 2)
        convert = partial(_with_images, images, drawing) if images is not None else as_messages
    elif namespace.prompt_format == "text":
        convert = as_text
    else:
        convert = _as_is
    prompts = [convert(prompt) for prompt in _prompts(namespace, random.Random(namespace.seed), DEFAULT_TOKEN_IDS)]
    if namespace.endpoint == "completions" and any(prompt.messages for prompt in prompts):
        raise UserError("the data set holds chat messages: use --endpoint chat", param="endpoint")
    return prompts


def _random_images(namespace: argparse.Namespace) -> RandomImages | None:
    if namespace.images is None:
        if namespace.image_size is not None:
            raise UserError("--image-size needs --images", param="image_size")
        return None
    if namespace.endpoint != "chat":
        raise UserError("--images needs --endpoint chat", param="images")
    if namespace.dataset is not None:
        raise UserError("--images adds to random prompts: not with --dataset", param="images")
    return RandomImages.parse(namespace.images, namespace.image_size or "448x448")


def _with_images(images: RandomImages, rng: random.Random, prompt: PromptSpec) -> PromptSpec:
    return as_messages(prompt, images.draw(rng))


def _as_is(prompt: PromptSpec) -> PromptSpec:
    return prompt


def _prompt_flags(group: argparse._ArgumentGroup, *, num_prompts: int, ids_help: str) -> None:
    count_flag(group, "--num-prompts", None, f"requests (default: {num_prompts}, or the whole data set)")
    group.set_defaults(default_num_prompts=num_prompts)
    group.add_argument("--input-len", metavar="N|LO:HI", help="random prompt tokens, without the prefix (128)")
    group.add_argument("--output-len", metavar="N|LO:HI", default="128", help="generated tokens at most (128)")
    count_flag(group, "--prefix-len", None, "tokens that all random prompts share in front (0)", minimum=0)
    group.add_argument("--token-ids", metavar="LO:HI", help=ids_help)
    group.add_argument("--dataset", metavar="FILE", type=Path, help="prompts of a .jsonl or .json file instead")
    group.add_argument("--workload", metavar="NAME", help="which workload of a .json file of workloads")


def _prompts(namespace: argparse.Namespace, rng: random.Random, default_ids: str) -> list[PromptSpec]:
    output_len = LengthRange.parse(namespace.output_len, "--output-len")
    if namespace.dataset is not None:
        for name in ("input_len", "prefix_len", "token_ids"):
            if getattr(namespace, name) is not None:
                raise UserError(f"--{name.replace('_', '-')} shapes random prompts: not with --dataset", param=name)
        if output_len.low != output_len.high:
            raise UserError("with --dataset, --output-len is one number", param="output_len")
        prompts = read_dataset(namespace.dataset, workload=namespace.workload, default_max_tokens=output_len.high)
        return prompts[: namespace.num_prompts]
    if namespace.workload is not None:
        raise UserError("--workload needs --dataset", param="workload")
    return RandomPrompts(
        num_prompts=namespace.num_prompts or namespace.default_num_prompts,
        input_len=LengthRange.parse(namespace.input_len or "128", "--input-len"),
        output_len=output_len,
        token_ids=LengthRange.parse(namespace.token_ids or default_ids, "--token-ids", minimum=0),
        prefix_len=namespace.prefix_len or 0,
    ).draw(rng)


@contextmanager
def _generator(options: EngineOptions, *, show_progress: bool) -> Iterator[Generator]:
    """`LLM.generate` of a new engine, which ends with the context. Prints the share of accepted drafts, if any."""
    from quire.cli import report
    from quire.llm import LLM

    import_executor()
    with LLM.from_options(options) as llm:

        def generate(prompts: list[dict[str, Any]], params: list[SamplingParams]) -> list[RequestOutput]:
            outputs = llm.generate(cast("list[Prompt]", prompts), params, use_tqdm=show_progress)
            for output in outputs:
                raise_if_nonfinite(output)  # a broken model's time is no result
            return outputs

        yield generate
        stats = llm.stats()
        if num_drafts := cast("int", stats["draft_tokens_total"]):
            accepted = cast("int", stats["accepted_draft_tokens_total"])
            share = f"{accepted:,} of {num_drafts:,} ({accepted / num_drafts:.0%}), warm-ups included"
            report.print_rows("speculation", [("drafts accepted", share)])


def _json_object(text: str) -> dict[str, Any]:
    import json

    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def _metrics(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in METRICS:
            raise UserError(
                f"--percentile-metrics: unknown metric {name!r}{nearest_name(name, METRICS)} "
                f"(known: {', '.join(METRICS)})",
                param="percentile_metrics",
            )
    return names


def _percentiles(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(0 <= value <= 100 for value in values):
        raise UserError(f"--metric-percentiles: expected numbers from 0 to 100, not {text!r}")
    return values


MODES: Mapping[str, Mode] = {
    "latency": Mode(
        summary="one batch of a fixed shape, repeated",
        arguments="[MODEL] [options]",
        description="Time one batch of a fixed shape, from generate() to the last token, several times.",
        add_flags=_latency_flags,
        run=_latency,
    ),
    "throughput": Mode(
        summary="all prompts at once, offline",
        arguments="[MODEL] [options]",
        description="Give the engine all prompts at once; time from generate() to the last token.",
        add_flags=_throughput_flags,
        run=_throughput,
    ),
    "serve": Mode(
        summary="any OpenAI-compatible server, at a request rate",
        arguments="[--base-url URL] [options]",
        description="Send streaming requests to any OpenAI-compatible server and time every chunk.",
        add_flags=_serve_flags,
        run=_serve,
    ),
}
