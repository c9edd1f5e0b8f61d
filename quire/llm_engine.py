"""LLMEngine: the offline engine for programs that add requests while others run and drive it step by step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Unpack

import msgspec

from quire.config.engine_keywords import EngineKeywords
from quire.config.options import BUNDLED_MODEL, EngineOptions, HasOptions
from quire.engine.client import DEFAULT_EXECUTOR
from quire.engine.input_processor import Prompt, prompt_text
from quire.engine.messages import Abort, AddRequest, EngineOutputs
from quire.engine.public_names import spelled_out
from quire.errors import QuireError, UserError
from quire.lora_request import LoRARequest
from quire.offline_engine import OfflineEngine
from quire.outputs import RequestOutput
from quire.pooling_outputs import PoolingRequestOutput
from quire.pooling_params import PoolingParams
from quire.sampling_params import RequestOutputKind, SamplingParams


class LLMEngine(OfflineEngine):
    """Engine that does one step a call, in the caller's thread. Arguments and errors are those of `LLM`."""

    @spelled_out
    def __init__(self, model: str = BUNDLED_MODEL, **engine_options: Unpack[EngineKeywords]) -> None:
        self._open(EngineOptions.from_keywords({"model": model, **engine_options}))

    @classmethod
    def from_engine_args(cls, engine_args: HasOptions) -> LLMEngine:
        engine = cls.__new__(cls)
        engine._open(engine_args.to_options())
        return engine

    def _open(self, options: EngineOptions, executor: str = DEFAULT_EXECUTOR) -> None:
        super()._open(options, executor)
        self._pooled: dict[str, PoolingParams] = {}
        self._outputs: list[RequestOutput | PoolingRequestOutput] = []
        self._errors: list[QuireError] = []

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        lora_request: LoRARequest | None = None,
        *,
        priority: int = 0,
    ) -> str:
        """Queue a request: SamplingParams generate text, PoolingParams a vector. Returns its id. prompt, lora_request,
        priority: see `LLM.generate`. Raises UserError for a bad prompt, bad parameters and an id in use."""
        with self._busy:
            kind, adapter = RequestOutputKind.FINAL_ONLY, self._adapters.resolve(lora_request)
            if isinstance(params, PoolingParams):
                request = self._pooling_processor.request(request_id, prompt, params, priority=priority)
                request = msgspec.structs.replace(request, adapter=adapter)
            else:
                request = self._input_processor.process(request_id, prompt, params, priority=priority, adapter=adapter)
                kind = params.output_kind
            self._output_processor.add_request(
                request,
                prompt_text(prompt),
                delta=kind is RequestOutputKind.DELTA,
                final_only=kind is RequestOutputKind.FINAL_ONLY,
            )
            if isinstance(params, PoolingParams):
                self._pooled[request_id] = params
            self._client.send(AddRequest(request))
        return request_id

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End requests without further output. Unknown ids are ignored."""
        with self._busy:
            for each in [request_id] if isinstance(request_id, str) else list(request_id):
                self._pooled.pop(each, None)
                if self._output_processor.abort(each) is not None:
                    self._client.send(Abort(each))

    def step(self) -> list[RequestOutput | PoolingRequestOutput]:
        """Do one engine step and return its outputs, in the form of `SamplingParams.output_kind`: by default the whole
        state of each request that got tokens. Raises UserError for a request that can never run, InternalError for one
        whose output cannot be processed; the others go on. Raises EngineDeadError."""
        with self._busy:
            if not self._errors and not self._outputs and self._output_processor.num_unfinished:
                self._keep(self._client.receive() or EngineOutputs())
            if self._errors:
                raise self._errors.pop(0)
            outputs, self._outputs = self._outputs, []
            return outputs

    def get_num_unfinished_requests(self) -> int:
        """Requests whose last output `step` has not returned."""
        return self._output_processor.num_unfinished + sum(output.finished for output in self._outputs)

    def has_unfinished_requests(self) -> bool:
        """True while `step` has something to do or to report."""
        return bool(self._errors or self._outputs or self._output_processor.num_unfinished)

    def _keep(self, outputs: EngineOutputs) -> None:
        for rejected in outputs.rejections:
            if self._output_processor.abort(rejected.request_id) is not None:
                self._errors.append(_named(rejected.request_id, rejected.error()))
            self._pooled.pop(rejected.request_id, None)
        processed = self._output_processor.process(outputs.updates)
        for abort in processed.aborts:
            self._client.send(abort)
        for failed in processed.failures:
            self._pooled.pop(failed.request_id, None)
            self._errors.append(failed.error)
        for output in processed.outputs:
            params = self._pooled.pop(output.request_id, None)
            try:
                self._outputs.append(output if params is None else self._pooling_processor.pooled(output, params))
            except QuireError as error:
                self._errors.append(_named(output.request_id, error))


def _named(request_id: str, error: QuireError) -> QuireError:
    if isinstance(error, UserError):
        return type(error)(f"request {request_id!r}: {error.message}", param=error.param)
    return error
