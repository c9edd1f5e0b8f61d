"""What structured outputs cost: python -m benchmarks.structured [--batch 32] [--tokens 48] [--rounds 5] [--threads 2]

A model in the shape of Qwen3-0.6B with random weights and a vocabulary of 151,936 tokens (the bundled tokenizer's, and
random joins of two of them) generates a batch of texts, in turns without constraints and under a JSON schema; with one
or two steps in flight. Prints the tokens per second of both, their ratio (the median over the rounds, each of which
runs both), and the time that the engine core spends on matchers, waiting included: one mask, one message, the answers
to one; the share of tokens that had a mask, since most forced ones are not sampled.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.config.hf_config import find_model
from quire.structured_output.remote_matcher import RemoteMatcher
from quire.structured_output.service import ConstraintService
from quire.tokenization.tokenizer import load_tokenizer

VOCAB_SIZE = 151936
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 0,
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "born": {"type": "string", "format": "date"},
        "kind": {"enum": ["person", "company", "other"]},
    },
    "required": ["name", "age", "born", "kind"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 1000}
"""Too long to end before the text does."""


class Spent(NamedTuple):
    """Seconds, and calls."""

    seconds: float
    calls: int

    @property
    def microseconds(self) -> float:
        return 1e6 * self.seconds / max(1, self.calls)


class Rate(NamedTuple):
    """Of one batch: tokens per second, and per second on the processor (of all threads)."""

    wall: float
    processor: float


class MaskClock:
    """Measures what the engine core spends on matchers while it is open, by the name of the method."""

    METHODS: tuple[tuple[type, str], ...] = (
        (RemoteMatcher, "mask"),
        (RemoteMatcher, "advance"),
        (ConstraintService, "flush"),
        (ConstraintService, "wait"),
    )

    def __init__(self) -> None:
        self.spent = {name: Spent(0.0, 0) for _, name in self.METHODS}

    def __enter__(self) -> MaskClock:
        self._plain = [(owner, name, getattr(owner, name)) for owner, name in self.METHODS]
        for owner, name, method in self._plain:
            setattr(owner, name, self._timed(name, method))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, method in self._plain:
            setattr(owner, name, method)

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            found = method(*arguments)
            before = self.spent[name]
            self.spent[name] = Spent(before.seconds + time.perf_counter() - started, before.calls + 1)
            return found

        return timed


def write_model(directory: Path, layers: int) -> None:
    """A configuration and a tokenizer; weights are random."""
    (directory / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": layers}))
    content = json.loads(
        (find_model("bundled", revision=None, config_only=True) / "tokenizer.json").read_text(encoding="utf-8")
    )
    vocabulary: dict[str, int] = content["model"]["vocab"]
    pieces, draw = list(vocabulary)[3:], random.Random(0)
    while len(vocabulary) < VOCAB_SIZE:
        vocabulary.setdefault(draw.choice(pieces) + draw.choice(pieces), len(vocabulary))
    (directory / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")


def run(llm: LLM, params: SamplingParams, batch: int) -> Rate:
    prompts = [[100 + number, 7, 8, 9] for number in range(batch)]
    started = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds, processor = time.perf_counter() - started[0], time.process_time() - started[1]
    counts = {len(output.outputs[0].token_ids) for output in outputs}
    assert counts == {params.max_tokens}, f"a text has ended early: {counts}"
    num_tokens = batch * (params.max_tokens or 0)
    return Rate(num_tokens / seconds, num_tokens / processor)


def measure(llm: LLM, arguments: argparse.Namespace) -> dict[str, Any]:
    free = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True, temperature=arguments.temperature, seed=1)
    bound = SamplingParams(
        max_tokens=arguments.tokens,
        temperature=arguments.temperature,
        seed=1,
        structured_outputs=StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    )
    started = time.perf_counter()
    run(llm, bound, 1)
    first = time.perf_counter() - started
    run(llm, free, arguments.batch)
    pairs = []
    with MaskClock() as clock:
        for _ in range(arguments.rounds):
            pairs.append((run(llm, free, arguments.batch), run(llm, bound, arguments.batch)))
    return {
        "first constrained request, s": first,
        "free, tokens/s": statistics.median(pair[0].wall for pair in pairs),
        "constrained, tokens/s": statistics.median(pair[1].wall for pair in pairs),
        "ratio": statistics.median(pair[1].wall / pair[0].wall for pair in pairs),
        "ratio by processor time": statistics.median(pair[1].processor / pair[0].processor for pair in pairs),
        "ratios": [round(pair[1].wall / pair[0].wall, 3) for pair in pairs],
        "mask, us": clock.spent["mask"].microseconds,
        "message, us": clock.spent["flush"].microseconds,
        "answers, us": clock.spent["wait"].microseconds,
        "tokens that had a mask": clock.spent["mask"].calls / max(1, clock.spent["advance"].calls),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48, help="of each text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--json", type=Path, help="write the results there too")
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), arguments.layers)
        assert load_tokenizer(directory).vocab_size == VOCAB_SIZE
        for depth in (1, 2):
            options: dict[str, Any] = {"load_format": "dummy", "queue_depth": depth, "max_num_seqs": arguments.batch}
            with LLM(
                directory, num_threads=arguments.threads, num_blocks_override=16 * arguments.batch, **options
            ) as llm:
                print(f"{depth} in flight, batch {arguments.batch}: {llm.ready.backend}")
                results[depth] = measure(llm, arguments)
            for name, value in results[depth].items():
                print(f"  {name}: {value if isinstance(value, list) else f'{value:.4g}'}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
