"""A server whose model says what the conversation tells it to, so that every answer of a case is known.

    python -m benchmarks.clients.scripted

A text in the prompt between two `~~` is the script; its parts, between `||`, are the model's turns: an agent that
answers a tool call is told the next part. The last script of a conversation counts; without one the model says "ok".
Everything else is `quire serve`: its routes, templates, parsers, grammars, and an engine in a process of its own.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.clients.servers import API_KEY
from quire.config.engine import EngineConfig
from quire.config.options import EngineOptions
from quire.server.run import serve
from quire.server.settings import ServerSettings
from quire.step import SequenceSampling
from tests.fakes.masks import MaskingExecutor
from tests.server.executor import END_TOKEN
from tests.server.model_directory import VOCAB_SIZE, write_model

MODEL = "scripted"
MAX_MODEL_LEN = 16384
TEMPLATE = (
    "{# <tool_call> <think> #}"
    "{% if tools %}<|start|>tools: {{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}<|start|>{{ message.role }}: {{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
)


class Script:
    """What the model says. Texts are those of token ids, a character each, so that they can be searched."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encode = lambda text: as_text(tokenizer.encode(text, add_special_tokens=False).ids)
        self._mark, self._next, self._turn, self._default = map(
            self._encode, ("~~", "||", "<|start|>assistant: ", "ok")
        )

    def choose(self, sampling: SequenceSampling, index: int, token_ids: list[int]) -> int:
        """The token behind `token_ids`, of which the last `index` are the model's own."""
        said = self._said(as_text(token_ids[: len(token_ids) - index]))
        return ord(said[index]) if index < len(said) else END_TOKEN

    def _said(self, prompt: str) -> str:
        *_, script, rest = ["", *prompt.split(self._mark)[-2:]]
        if prompt.count(self._mark) < 2:
            return self._default
        parts = script.split(self._next)
        turns_before = max(0, rest.count(self._turn) - 1)
        return parts[min(turns_before, len(parts) - 1)]


def as_text(token_ids: list[int]) -> str:
    return "".join(map(chr, token_ids))


def executor(config: EngineConfig) -> MaskingExecutor:
    tokenizer = Tokenizer.from_file(str(Path(config.model.path) / "tokenizer.json"))
    return MaskingExecutor(vocab_size=VOCAB_SIZE, choose=Script(tokenizer).choose)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="quire-clients-") as directory:
        path = write_model(Path(directory), TEMPLATE, MAX_MODEL_LEN)
        options = EngineOptions(model=str(path), num_blocks_override=8192, max_num_seqs=16)
        settings = ServerSettings(port=0, served_model_name=[MODEL], api_key=[API_KEY], reasoning_parser="auto")
        return serve(options, settings, executor="benchmarks.clients.scripted:executor")


if __name__ == "__main__":
    sys.exit(main())
