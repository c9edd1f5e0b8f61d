"""`quire run`: completes one prompt."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from quire.cli.engine_flags import add_engine_flags, engine_options
from quire.cli.parser import Parser
from quire.cli.sampling_flags import add_sampling_flags, sampling_params
from quire.cli.screen import visible
from quire.cli.session import RunSession, Timing, session
from quire.errors import UserError
from quire.outputs import Logprob, RequestOutput
from quire.sampling_params import SamplingParams
from quire.structured_outputs_params import StructuredOutputsParams
from quire.utils.text_files import read_text_file

DEFAULTS = {"max_tokens": 128}
JSON_ONLY = ("logprobs", "prompt_logprobs")


def build_parser() -> Parser:
    parser = Parser(
        prog="quire run",
        usage="quire run PROMPT [--model MODEL] [options]",
        description="Complete one prompt and stream the text to the terminal.",
    )
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads it from standard input")
    group = parser.add_argument_group("run options")
    group.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="picture that is shown before PROMPT, as with --chat; may be given several times",
    )
    group.add_argument("--chat", action="store_true", help="send PROMPT as a user's message, with the chat template")
    group.add_argument("--json", action="store_true", help="print one JSON object at the end instead of streaming")
    group.add_argument("--stats", action="store_true", help="print tokens and speed to standard error")
    group.add_argument(
        "--preload-prefix",
        action="append",
        default=[],
        metavar="FILE",
        help="text file that is computed and kept as a prefix before the prompt; may be given several times",
    )
    group.add_argument("--json-schema", metavar="FILE", help="JSON schema that the text follows, without blanks")
    add_sampling_flags(parser, DEFAULTS)
    add_engine_flags(parser, positional=False, skip=("seed",))
    return parser


def main(arguments: Sequence[str]) -> int:
    namespace = build_parser().parse(arguments)
    params = sampling_params(namespace, DEFAULTS)
    if namespace.json_schema is not None:
        schema = read_text_file(namespace.json_schema, param="json_schema")
        constraint = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
        params = msgspec.structs.replace(params, structured_outputs=constraint)
    if not namespace.json:
        _check_text_output(params)
    text = _read_stdin() if namespace.prompt == "-" else namespace.prompt
    pictures = [_picture(path) for path in namespace.image]
    prefixes = [read_text_file(path, param="preload_prefix") for path in namespace.preload_prefix]
    with session(engine_options(namespace)) as run:
        for prefix in prefixes:
            run.preload(prefix)
        prompt: Any = text
        if namespace.chat or pictures:
            content = [*pictures, {"type": "text", "text": text}] if pictures else text
            prompt = run.engine.render_chat([{"role": "user", "content": content}]).prompt()
        timing = _answer(run, prompt, params, namespace)
    if namespace.stats:
        print(timing.line(), file=sys.stderr)
    return 0


def _check_text_output(params: SamplingParams) -> None:
    for name in JSON_ONLY:
        if getattr(params, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} shows only in --json output", param=name)
    if not params.detokenize:
        raise UserError("--no-detokenize leaves no text to show: use --json", param="detokenize")


def _picture(path: str) -> dict[str, Any]:
    try:
        return {"type": "image", "image": Path(path).read_bytes()}
    except OSError as error:
        raise UserError(f"--image {path}: {error.strerror}", param="image") from None


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not valid UTF-8: {error.reason} at byte {error.start}") from None


def _answer(run: RunSession, prompt: Any, params: SamplingParams, namespace: argparse.Namespace) -> Timing:
    show = visible if sys.stdout.isatty() else str
    if params.n == 1 and not namespace.json:
        timing = run.stream(prompt, params, lambda completion: print(show(completion.text), end="", flush=True))
        print()
        return timing
    output, timing = run.complete(prompt, params)
    if namespace.json:
        print(json.dumps(as_dict(output, timing), ensure_ascii=False))
    else:
        for completion in output.outputs:
            print(f"--- {completion.index + 1} of {params.n} ({completion.finish_reason}) ---")
            print(show(completion.text))
    return timing


def as_dict(output: RequestOutput, timing: Timing) -> dict[str, Any]:
    """Result as JSON, with times in seconds."""
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "prompt_logprobs": _logprobs(output.prompt_logprobs),
        "outputs": [
            {
                "index": completion.index,
                "text": completion.text,
                "token_ids": completion.token_ids,
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
                "cumulative_logprob": completion.cumulative_logprob,
                "score": completion.score,
                "logprobs": _logprobs(completion.logprobs),
            }
            for completion in output.outputs
        ],
        "num_cached_tokens": output.num_cached_tokens,
        "time_to_first_token": timing.ttft,
        "tokens_per_second": timing.tokens_per_second,
    }


def _logprobs(positions: Sequence[dict[int, Logprob] | None] | None) -> list[Any] | None:
    if positions is None:
        return None
    return [
        None
        if alternatives is None
        else [
            {"token_id": token_id, "token": entry.decoded_token, "logprob": entry.logprob, "rank": entry.rank}
            for token_id, entry in alternatives.items()
        ]
        for alternatives in positions
    ]
