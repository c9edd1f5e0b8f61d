"""What the engines in a caller's own thread share: opening, control calls, the end."""

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
    """Part of LLM and LLMEngine. Several can live in one process; each is used by one thread at a time."""

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
        """Facts found at the start: context length, number of blocks, seconds of each phase."""
        return self._client.ready

    def get_tokenizer(self) -> UserTokenizer:
        """The tokenizer, with the methods that Transformers' have. Raises UserError when the model has none."""
        return user_tokenizer(self.tokenizer, self._input_processor)

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` and `chat` take when they are given none: the model's generation_config.json over
        SamplingParams()."""
        return SamplingParams(**self.model_config.sampling_defaults)

    def stats(self) -> dict[str, Any]:
        """The engine's counters and gauges (the fields of `EngineStats`), and the shares that follow (`shares`)."""
        with self._busy:
            stats = self._call("stats")
        assert isinstance(stats, EngineStats)
        return {**msgspec.structs.asdict(stats), **shares(stats)}

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> int:
        """Forget every cached prefix; returns how many blocks held one.

        reset_running_requests: without effect: what running requests have computed is forgotten in any case, and they
        go on with the same tokens. reset_connector: False: files in `kv_offload_dir` stay, and count again at the next
        start."""
        check_reset(reset_connector)
        with self._busy:
            value = self._call("reset_prefix_cache")
        assert isinstance(value, int)
        return value

    def unregister_prefix(self, prefix_id: str) -> int:
        """Unregister a prefix; returns how many blocks no longer belong to a registered prefix. What it
        computed stays cached until the memory is needed. Raises UserError for an id that is not registered."""
        with self._busy:
            value = self._call("unregister_prefix", prefix_id)
        assert isinstance(value, int)
        return value

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back until `wake_up`: the KV cache, and the weights to host memory where there is a device (level
        1) or altogether (level 2). What was cached is forgotten; requests are rejected meanwhile (docs/gpu.md).

        mode: one of MODES; between the calls of an LLM nothing runs, so that all are alike, and requests of an
        LLMEngine must have ended. Raises UserError while requests live or prefixes are registered."""
        check_mode(mode)
        with self._busy:
            self._call("sleep", str(level))

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Take requests again; nothing is cached. tags: ["weights"] brings back these alone, and ["kv_cache"] the rest
        behind them. Raises InternalError when the memory, or the checkpoint, is gone, UserError for other tags."""
        with self._busy:
            self._call("wake_up", part_of(tags))

    def is_sleeping(self) -> bool:
        """Whether requests are rejected because the engine sleeps."""
        with self._busy:
            return bool(self._call("is_sleeping"))

    def shutdown(self) -> None:
        """Give the model and the KV cache back. Idempotent; also at the end of a `with` block or of the object."""
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
        """Called with what came before, and with, the answer to a call."""
