"""Tokenised files, packed and shuffled into training sequences whose order can be resumed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from corpus import SourceFile
from tokenizers import Tokenizer
from torch import Tensor
from train_tokenizer import END_OF_TEXT


def encode_files(tokenizer: Tokenizer, files: Sequence[SourceFile]) -> list[np.ndarray]:
    """The tokens of each file, every one led by the end-of-text token that separates documents."""
    separator = tokenizer.token_to_id(END_OF_TEXT)
    encodings = tokenizer.encode_batch([file.text for file in files], add_special_tokens=False)
    return [np.array([separator, *encoding.ids], dtype=np.int32) for encoding in encodings]


class TokenStream:
    """An endless stream of training sequences, shuffled anew in every epoch.

    The files are joined in a random order, cut into sequences, and the sequences shuffled. Neighbours in the
    text share one token, so that each token is a target once. ``position`` counts the tokens read since the
    start, and is all there is to save and restore.
    """

    def __init__(self, documents: Sequence[np.ndarray], longest: int, seed: int) -> None:
        self._documents = documents
        self._seed = seed
        self.tokens_per_epoch = (sum(len(document) for document in documents) - 1) // longest * longest
        self.position = 0
        self._epoch = -1
        self._order_of: tuple[int, int] | None = None
        self._tokens = np.empty(0, dtype=np.int32)
        self._order = np.empty(0, dtype=np.int64)

    @property
    def epochs(self) -> float:
        """How often the text has been read so far."""
        return self.position / self.tokens_per_epoch

    def _shuffle(self, epoch: int, context: int) -> None:
        if epoch != self._epoch:
            order = np.random.default_rng((self._seed, epoch)).permutation(len(self._documents))
            self._tokens = np.concatenate([self._documents[index] for index in order])
            self._epoch = epoch
        rng = np.random.default_rng((self._seed, epoch, context))
        self._order = rng.permutation(self.tokens_per_epoch // context)
        self._order_of = (epoch, context)

    def _next_sequence(self, context: int) -> np.ndarray:
        epoch, offset = divmod(self.position, self.tokens_per_epoch)
        if self._order_of != (epoch, context):
            self._shuffle(epoch, context)
        self.position += context
        start = int(self._order[offset // context]) * context
        return self._tokens[start : start + context + 1]

    def take(self, count: int, context: int) -> Tensor:
        """``count`` sequences of ``context + 1`` tokens each."""
        sequences = [self._next_sequence(context) for _ in range(count)]
        return torch.from_numpy(np.stack(sequences).astype(np.int64))
