"""Tokenizer for programs written for Transformers' tokenizers: `LLM.get_tokenizer()`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.errors import UserError
from quire.tokenization.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]


class UserTokenizer:
    """Subset of Transformers' `PreTrainedTokenizerBase`, with its names and meanings.

    tokenizer: tokenizer to wrap. render: writes a conversation with the model's chat template, see
        InputProcessor.render_chat, and returns the text.
    """

    def __init__(self, tokenizer: Tokenizer, render: Callable[..., str]) -> None:
        self._tokenizer = tokenizer
        self._render = render
        special = tokenizer.special_tokens
        self.name_or_path = tokenizer.name
        self.is_fast = True
        self.vocab_size: int = tokenizer.backend.get_vocab_size(with_added_tokens=False)
        self.chat_template = tokenizer.chat_template
        self.bos_token, self.eos_token = special.get("bos_token"), special.get("eos_token")
        self.unk_token, self.pad_token = special.get("unk_token"), special.get("pad_token")
        self.bos_token_id, self.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.unk_token_id, self.pad_token_id = self._id(self.unk_token), self._id(self.pad_token)
        self.special_tokens_map = dict(special)
        self.extra_special_tokens = list(tokenizer.extra_special_tokens)
        self.all_special_tokens = list(dict.fromkeys((*special.values(), *self.extra_special_tokens)))
        self.all_special_ids = self.convert_tokens_to_ids(self.all_special_tokens)

    def __len__(self) -> int:
        """Number of entries, with added ones."""
        return self._tokenizer.vocab_size

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> dict[str, Any]:
        """`input_ids` and `attention_mask` of a text, or lists of both for several texts. Raises UserError."""
        if isinstance(text, str):
            token_ids = self.encode(text, add_special_tokens)
            return {"input_ids": token_ids, "attention_mask": [1] * len(token_ids)}
        batch = self._tokenizer.encode_batch(list(text), add_special_tokens)
        return {"input_ids": batch, "attention_mask": [[1] * len(each) for each in batch]}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Raises UserError for invalid Unicode."""
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of tokens, with special ones unless skipped."""
        listed = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode(listed, skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(each, skip_special_tokens) for each in sequences]

    def tokenize(self, text: str) -> list[str]:
        """Vocabulary entries of a text."""
        return [self._entry(each) for each in self._tokenizer.encode(text, add_special_tokens=False)]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        return self._id(tokens) if isinstance(tokens, str) else [self._id(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str]:
        return self._entry(ids) if isinstance(ids, int) else [self._entry(each) for each in ids]

    def get_vocab(self) -> dict[str, int]:
        """Entries -> ids, with added ones."""
        return dict(self._tokenizer.backend.get_vocab(with_added_tokens=True))

    def apply_chat_template(
        self,
        conversation: Messages | Sequence[Messages],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **options: Any,
    ) -> Any:
        """Render conversations with the model's template: token ids, or text without `tokenize`; a list for several.
        options: further template variables, and `chat_template`, the source of another template. Raises UserError as
        `LLM.chat` does."""
        if conversation and not isinstance(conversation[0], Mapping):
            each = [tools, add_generation_prompt, continue_final_message, tokenize]
            return [self.apply_chat_template(one, *each, **options) for one in conversation]  # type: ignore[arg-type]
        text = self._render(
            conversation,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            source=options.pop("chat_template", None),
            chat_template_kwargs=options,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)

    def _entry(self, token_id: int) -> str:
        token: str | None = self._tokenizer.backend.id_to_token(token_id)
        if token is None:
            raise UserError(f"the tokenizer has no token {token_id}", param="ids")
        return token
