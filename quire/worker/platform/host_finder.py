"""Choice of the finder of drafts in texts on the host."""

from __future__ import annotations

from quire.config.engine import EngineConfig
from quire.worker.finders import CustomFinder, Finder, TextFinder
from quire.worker.plain_texts import PlainCorpus, PlainTexts


def make_finder(config: EngineConfig, max_tokens: int, *, is_native: bool) -> Finder:
    """Finder of the configured method. max_tokens: most tokens that it proposes."""
    num_rows, speculation = config.scheduler.max_num_seqs, config.speculation
    if speculation.custom_class:
        return CustomFinder(speculation.custom_class, max_tokens, config.model.vocab_size)
    if not is_native:
        return TextFinder(num_rows, speculation, PlainTexts, PlainCorpus)
    from quire.kernels.cpu import _native  # the native module may not be built

    return TextFinder(num_rows, speculation, _native.DraftTexts, _native.Corpus)
