from __future__ import annotations

import logging

import msgspec

from quire.engine.output_stream import StatsListener
from quire.logging import get_logger
from quire.metrics.progress import RequestProgress
from quire.outputs import RequestOutput
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams

logger = get_logger(__name__)

_DEFAULTS = msgspec.to_builtins(SamplingParams())


class RequestLog(StatsListener):
    """Log of `--enable-log-requests`: listener of AsyncLLM for new and rejected requests; `EngineMetrics` reports the
    ends. Prompts are logged only at level DEBUG, outputs never."""

    def __init__(self, max_characters: int | None = None) -> None:
        """max_characters: limit of characters and of tokens shown of a prompt; None: all."""
        self._max_characters = max_characters
        if logger.getEffectiveLevel() > logging.INFO:
            logger.setLevel(logging.INFO)  # the user asked for these records

    def record_request(self, request_id: str, request: EngineRequest, text: str | None) -> None:
        if request.register_prefix:
            return
        chosen = _chosen(request.params)
        fields = {
            "request_id": request_id,
            "event": "received",
            "prompt_tokens": len(request.prompt_token_ids),
            "max_tokens": request.max_tokens,
            "params": chosen,
        }
        shown = " ".join(f"{name}={value!r}" for name, value in chosen.items() if name != "max_tokens")
        message = "request %s received: %d prompt tokens, max_tokens=%d %s"
        arguments = (request_id, len(request.prompt_token_ids), request.max_tokens, shown)
        logger.info(message, *arguments, extra={"fields": fields})
        if logger.isEnabledFor(logging.DEBUG):
            prompt, token_ids = (text or "")[: self._max_characters], request.prompt_token_ids[: self._max_characters]
            details = {"request_id": request_id, "event": "prompt", "prompt": prompt, "prompt_token_ids": token_ids}
            logger.debug("request %s: prompt %r, tokens %s", request_id, prompt, token_ids, extra={"fields": details})

    def record_rejected(self, request_id: str) -> None:
        fields = {"request_id": request_id, "event": "rejected"}
        logger.info("request %s rejected by the engine", request_id, extra={"fields": fields})

    def note_finished(self, output: RequestOutput, progress: RequestProgress, now: float) -> None:
        """Log a request's end, for `EngineMetrics.on_finished`."""
        reasons = sorted({each.finish_reason for each in output.outputs if each.finish_reason is not None})
        fields: dict[str, object] = {
            "request_id": output.request_id,
            "event": "finished",
            "finish_reasons": reasons,
            "prompt_tokens": len(output.prompt_token_ids),
            "cached_tokens": output.num_cached_tokens,
            "generation_tokens": progress.num_generated,
            "preemptions": output.metrics.num_preemptions,
        }
        times = progress.phases(output, now)
        if times is not None:
            seconds = {"queue": times.queue, "prefill": times.prefill, "decode": times.decode}
            fields |= {f"{name}_seconds": round(value, 6) for name, value in seconds.items()}
        message = "request %s finished (%s): %d prompt tokens, %d cached, %d generated"
        arguments = (
            output.request_id,
            ", ".join(reasons),
            len(output.prompt_token_ids),
            output.num_cached_tokens,
            progress.num_generated,
        )
        logger.info(message, *arguments, extra={"fields": fields})


def _chosen(params: SamplingParams) -> dict[str, object]:
    values = msgspec.to_builtins(params)
    return {name: value for name, value in values.items() if value != _DEFAULTS.get(name)}
