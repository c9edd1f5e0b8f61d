"""Common part of LLM and LLMEngine: start, control calls, shutdown."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import msgspec

from quire.config.engine import EngineConfig
from quire.config.model import ModelConfig
from quire.config.options import EngineOptions
from quire.engine.client import DEFAULT_EXECUTOR
from quire.engine.front_end import check_mode, check_reset, open_front_end
from quire.engine.inprocess_client import InProcessClient
from quire.engine.messages import Call, EngineOutputs, EngineReady
from quire.engine.public_names import described, missing, user_tokenizer
from quire.engine.sleep import part_of
from quire.kv_cache.stats import EngineStats, shares
from quire.sampling_params import SamplingParams
from quire.tokenization.tokenizer import Tokenizer
from quire.tokenization.user_tokenizer import UserTokenizer

Conversation = Sequence[Mapping[str, Any]]


class OfflineEngine:
    def _open(self, options: EngineOptions, executor: str = DEFAULT_EXECUTOR) -> None:
        def start(options: EngineOptions, config: EngineConfig) -> InProcessClient:
            self._client = InProcessClient(options, executor=executor, config=config)
            return self._client

        front_end = open_front_end(options, start)
        self._options = front_end.options
        self._input_processor = front_end.input_processor
        self._pooling_processor = front_end.pooling_processor
        self._output_processor = front_end.output_processor
        self._adapters = front_end.adapters
        self.model_config: ModelConfig = front_end.config.model
        self.tokenizer: Tokenizer | None = front_end.tokenizer
        self._busy = threading.Lock()
        self._finalizer = weakref.finalize(self, front_end.shutdown)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({described(self._options)})"

    if not TYPE_CHECKING:  # with it, a type checker would take any name

        def __getattr__(self, name: str) -> NoReturn:
            raise missing(self, name)

    @property
    def ready(self) -> EngineReady:
        """Facts found at the start: context length, blocks, seconds of each phase."""
        return self._client.ready

    def get_tokenizer(self) -> UserTokenizer:
        """Tokenizer, with Transformers' methods. Raises UserError when the model has none."""
        return user_tokenizer(self.tokenizer, self._input_processor)

    def get_default_sampling_params(self) -> SamplingParams:
        """Model's generation_config.json over SamplingParams()."""
        return SamplingParams(**self.model_config.sampling_defaults)

    def stats(self) -> dict[str, Any]:
        """Engine's counters and gauges (`EngineStats`) and the shares computed from them (`shares`)."""
        with self._busy:
            stats = self._call("stats")
        assert isinstance(stats, EngineStats)
        return {**msgspec.structs.asdict(stats), **shares(stats)}

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> int:
        """Clear the prefix cache; returns how many blocks held a prefix. reset_running_requests: no effect.
        reset_connector: must be False; files in `kv_offload_dir` stay."""
        check_reset(reset_connector)
        with self._busy:
            value = self._call("reset_prefix_cache")
        assert isinstance(value, int)
        return value

    def unregister_prefix(self, prefix_id: str) -> int:
        """Unregister a prefix; returns how many blocks no longer belong to a registered prefix. They stay cached until
        their memory is needed. Raises UserError for an id not registered."""
        with self._busy:
            value = self._call("unregister_prefix", prefix_id)
        assert isinstance(value, int)
        return value

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Release memory until `wake_up`: the KV cache, and the weights, which go to host memory where there is a
        device (level 1) or are dropped (level 2) (docs/gpu.md). Requests are rejected meanwhile. mode: one of MODES,
        all alike here. Raises UserError while requests live or prefixes are registered."""
        check_mode(mode)
        with self._busy:
            self._call("sleep", str(level))

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Accept requests again, with an empty cache. tags: ["weights"] restores the weights alone, ["kv_cache"] later
        the rest. Raises InternalError when the memory or the checkpoint is gone, UserError for other tags."""
        with self._busy:
            self._call("wake_up", part_of(tags))

    def is_sleeping(self) -> bool:
        with self._busy:
            return bool(self._call("is_sleeping"))

    def shutdown(self) -> None:
        """Release the model and the KV cache. Idempotent. A `with` block's end and the object's deletion call it."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: type[BaseException] | None, _e: BaseException | None, _tb: TracebackType | None) -> None:
        self.shutdown()

    def _call(self, method: str, argument: str = "") -> EngineStats | int | None:
        self._client.send(Call(call_id=0, method=method, argument=argument))
        while True:
            outputs = self._client.receive() or EngineOutputs()
            self._keep(outputs)
            for result in outputs.results:
                result.raise_error()
                return result.value

    def _keep(self, outputs: EngineOutputs) -> None:
        """Process outputs that came before, or with, the answer to a call."""
