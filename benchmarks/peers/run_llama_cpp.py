"""llama.cpp, through its C interface: all prompts first, then one token of every unfinished sequence a step.

That order gives it its widest steps. The token with the best score is found by numpy, which takes less time than its
own samplers. Options: fields of llama_context_params, such as n_ubatch or kv_unified, or of llama_model_params, such as
use_extra_bufts (whether weights are repacked for the processor).
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import numpy
from driver import Prepare, Request, Run, serve

os.environ["LLAMA_CPP_LIB_PATH"] = str(Path(sys.prefix) / "build" / "bin")
sys.path += map(str, Path(sys.prefix).glob("source/*"))
import llama_cpp.llama_cpp as api
from llama_cpp import __version__

CONTEXT_MULTIPLE = 256
"""Sequences are given rooms of a multiple of this many tokens."""


class Batch:
    """Input of one `llama_decode`: numpy arrays and the structure that points at them."""

    def __init__(self, capacity: int) -> None:
        self.tokens = numpy.zeros(capacity, numpy.int32)
        self.positions = numpy.zeros(capacity, numpy.int32)
        self.sequences = numpy.zeros(capacity, numpy.int32)
        self.wanted = numpy.zeros(capacity, numpy.int8)
        """1 where the scores that follow a token are wanted."""
        self._counts = numpy.ones(capacity, numpy.int32)
        step = self.sequences.itemsize
        self._pointers = self.sequences.ctypes.data + step * numpy.arange(capacity, dtype=numpy.uintp)
        self.structure = api.llama_batch()
        fields = {
            "token": self.tokens,
            "pos": self.positions,
            "n_seq_id": self._counts,
            "seq_id": self._pointers,
            "logits": self.wanted,
        }
        for name, array in fields.items():
            kind = dict(api.llama_batch._fields_)[name]
            setattr(self.structure, name, ctypes.cast(array.ctypes.data, kind))


class Engine:
    """One model, and a context with room for the latest set of requests."""

    def __init__(self, model: str, threads: int, options: dict[str, Any]) -> None:
        api.llama_backend_init()
        of_model = api.llama_model_default_params()
        for name in options.keys() & {name for name, _ in of_model._fields_}:
            setattr(of_model, name, options[name])
        self._model = api.llama_model_load_from_file(model.encode(), of_model)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        self._vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._params = api.llama_context_default_params()
        self._params.n_batch = 2048
        self._params.n_threads = self._params.n_threads_batch = threads
        for name in options.keys() - {name for name, _ in of_model._fields_}:
            getattr(self._params, name)  # raises AttributeError for what is no option
            setattr(self._params, name, options[name])
        self._batch = Batch(self._params.n_batch)
        self._context = None

    def prepare(self, requests: list[Request]) -> Run:
        longest = max(len(each["prompt_token_ids"]) + each["max_tokens"] for each in requests)
        room = -(-longest // CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE
        if (self._params.n_seq_max, self._params.n_ctx) != (len(requests), room * len(requests)):
            if self._context:
                api.llama_free(self._context)
            self._params.n_seq_max, self._params.n_ctx = len(requests), room * len(requests)
            self._context = api.llama_init_from_model(self._model, self._params)
        api.llama_memory_clear(api.llama_get_memory(self._context), False)
        return lambda: self._run(requests)

    def _run(self, requests: list[Request]) -> list[int]:
        prompts = [numpy.array(each["prompt_token_ids"], numpy.int32) for each in requests]
        wanted = numpy.array([each["max_tokens"] for each in requests])
        positions = numpy.array([len(prompt) for prompt in prompts], numpy.int32)
        following = self._prefill(prompts)
        made = numpy.ones(len(requests), int)
        while (alive := numpy.flatnonzero(made < wanted)).size:
            ones = numpy.ones(alive.size, numpy.int8)
            following[alive] = self._decode(following[alive], positions[alive], alive, ones)
            positions[alive] += 1
            made[alive] += 1
        return made.tolist()

    def _prefill(self, prompts: list[numpy.ndarray]) -> numpy.ndarray:
        """The first token of every sequence."""
        last = [numpy.arange(len(prompt)) == len(prompt) - 1 for prompt in prompts]
        rows = (
            numpy.concatenate(prompts),
            numpy.concatenate([numpy.arange(len(prompt)) for prompt in prompts]),
            numpy.repeat(numpy.arange(len(prompts)), [len(prompt) for prompt in prompts]),
            numpy.concatenate(last),
        )
        size = self._params.n_batch
        chunks = (tuple(column[start : start + size] for column in rows) for start in range(0, len(rows[0]), size))
        return numpy.concatenate([self._decode(*chunk) for chunk in chunks])

    def _decode(
        self, tokens: numpy.ndarray, positions: numpy.ndarray, sequences: numpy.ndarray, wanted: numpy.ndarray
    ) -> numpy.ndarray:
        """One step over at most n_batch tokens; returns the best token after each wanted one."""
        batch, count = self._batch, len(tokens)
        batch.structure.n_tokens = count
        batch.tokens[:count], batch.positions[:count] = tokens, positions
        batch.sequences[:count], batch.wanted[:count] = sequences, wanted
        if status := api.llama_decode(self._context, batch.structure):
            raise RuntimeError(f"llama_decode returned {status}")
        num_wanted = int(numpy.count_nonzero(wanted))
        if not num_wanted:
            return numpy.zeros(0, numpy.int32)
        scores = numpy.ctypeslib.as_array(api.llama_get_logits(self._context), (num_wanted, self._vocabulary))
        return scores.argmax(axis=1).astype(numpy.int32)


def load(model: str, threads: int, options: dict[str, Any]) -> tuple[Prepare, str]:
    return Engine(model, threads, options).prepare, f"llama-cpp-python {__version__}"


if __name__ == "__main__":
    serve(load)
