"""Parts that every front end of an engine shares: configuration, tokenizer, input and output processors."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from quire.config.engine import EngineConfig
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.config.structured_outputs import OTHER_BACKENDS
from quire.engine.adapters import KnownAdapters
from quire.engine.client import EngineClient
from quire.engine.input_processor import InputProcessor
from quire.engine.output_processor import OutputProcessor
from quire.engine.pooling_processor import PoolingProcessor
from quire.errors import UserError
from quire.logging import get_logger
from quire.logits_processors import load_processors
from quire.multimodal.inputs import image_inputs
from quire.multimodal.named import NamedPictures
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.helpers import LONG_TEXT_CHARACTERS, UNKNOWN_PATTERN_CHARACTERS, Helpers
from quire.tokenization.jobs import TokenizerSource, packed
from quire.tokenization.tokenizer import SAMPLE, Tokenizer, open_tokenizer

logger = get_logger(__name__)

MODES = ("abort", "wait", "keep")
"""Treatments of running requests by a pause."""


class FrontEnd:
    """One engine as AsyncLLM and `LLM` see it: client, processors of inputs and outputs, helpers. tokenizer: None if
    the model has none or it is switched off."""

    def __init__(
        self, config: EngineConfig, client: EngineClient, tokenizer: Tokenizer | None, options: EngineOptions
    ) -> None:
        self.config, self.options = config, options
        self.client = client
        self.tokenizer = tokenizer
        self.adapters = KnownAdapters(config.adapters)
        self.output_processor = OutputProcessor(tokenizer)
        self._input_processor: InputProcessor | None = None
        self._pooling_processor: PoolingProcessor | None = None
        self._making = threading.Lock()
        self.named_pictures = NamedPictures(config.media.cache_bytes)
        self._chat_template: ChatTemplate | None = None
        self._processors = load_processors(config.logits_processors)
        if tokenizer is not None:
            source = TokenizerSource(msgspec.json.encode(options), config.model.vocab_size, _sample_of(tokenizer))
            self._chat_template = ChatTemplate.of(tokenizer, source)
            if tokenizer.has_own_patterns:  # a pattern can run for any time, and only ending its process stops it
                tokenizer.encode_elsewhere = self._chat_template.helpers.encode
                tokenizer.inline_characters = UNKNOWN_PATTERN_CHARACTERS

    @property
    def helpers(self) -> Helpers | None:
        """Processes that render conversations and tokenise; None without a tokenizer."""
        return None if self._chat_template is None else self._chat_template.helpers

    def encode_long_texts_elsewhere(self) -> None:
        """Tokenise long texts in a helper process, so they do not block an event loop."""
        if self.tokenizer is not None and self.tokenizer.encode_elsewhere is None and self.helpers is not None:
            self.tokenizer.encode_elsewhere = self.helpers.encode
            self.tokenizer.inline_characters = LONG_TEXT_CHARACTERS

    @property
    def is_ready(self) -> bool:
        """True if `input_processor` returns without waiting. Else callers use a thread."""
        return self._input_processor is not None

    @property
    def input_processor(self) -> InputProcessor:
        with self._making:
            if self._input_processor is None:
                self._input_processor = InputProcessor(
                    self.tokenizer,
                    vocab_size=self.config.model.vocab_size,
                    max_model_len=self.client.ready.max_model_len,
                    eos_token_ids=self.config.model.eos_token_ids,
                    seed=self.config.seed,
                    max_logprobs=self.config.max_logprobs,
                    takes_priorities=self.config.scheduler.scheduling_policy == "priority",
                    pools=self.config.model.pooling is not None,
                )
                if self.config.speculation.oracle is not None:  # it knows places by the whole text
                    self._input_processor.prediction_tail = self._input_processor.max_model_len
                self._input_processor.chat_template = self._chat_template
                self._input_processor.images = image_inputs(self.config, self.tokenizer)
                self._input_processor.named_pictures = self.named_pictures
                self._input_processor.grammars.config = self.config.structured_outputs
                self._input_processor.processors = self._processors
                self._input_processor.reports_logits = self.config.logprobs_mode.endswith("logits")
            return self._input_processor

    @property
    def pooling_processor(self) -> PoolingProcessor:
        """Processor of pooling requests. Waits for the core, as `input_processor` does."""
        inputs, model = self.input_processor, self.config.model
        if self._pooling_processor is None:
            self._pooling_processor = PoolingProcessor(inputs, model.pooling, model.name, model.vector_size)
        return self._pooling_processor

    def shutdown(self, timeout: float = 5.0) -> None:
        """Stop the core and the helpers. Idempotent."""
        if self.helpers is not None:
            self.helpers.close()
        self.client.shutdown(timeout)


def _sample_of(tokenizer: Tokenizer) -> bytes | None:
    try:
        return packed(tokenizer.encode(SAMPLE))
    except UserError:
        return None


def open_front_end(options: EngineOptions, start: Callable[[EngineOptions, EngineConfig], EngineClient]) -> FrontEnd:
    """Check the options, `start` the core, and load the tokenizer meanwhile. start: called with the options and the
    resolved configuration. Raises ConfigError or ModelLoadError, and what `start` raises; nothing is left running then.
    """
    config = resolve(options)
    backend = config.structured_outputs.backend
    if backend in OTHER_BACKENDS:
        logger.info("llguidance compiles every grammar: structured_outputs_config.backend %s has no effect", backend)
    client = start(options, config)
    try:
        return FrontEnd(config, client, open_tokenizer(options, config.model.vocab_size), options)
    except BaseException:
        client.shutdown()
        raise


def check_reset(reset_connector: bool) -> None:
    """Raise UserError if `reset_connector` asks to drop files."""
    if reset_connector:
        message = "reset_connector must be False: files in kv_offload_dir stay, and count again at the next start"
        raise UserError(message, param="reset_connector")


def check_mode(mode: str) -> None:
    if mode not in MODES:
        raise UserError(f"mode must be one of {', '.join(MODES)}, not {mode!r}", param="mode")
