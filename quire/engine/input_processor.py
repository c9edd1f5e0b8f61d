"""Conversion of prompt and parameters into an EngineRequest, with the checks that everything downstream relies on."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator, Mapping, Sequence, Sized
from copy import copy
from typing import Any, NamedTuple, TypedDict

import msgspec

from quire.adapter_orders import AdapterRef
from quire.engine.bad_words import BadWordTokenizer
from quire.errors import PromptTooLongError, UserError, reject_unknown
from quire.logits_processors import LogitsProcessor, check_params
from quire.multimodal.inputs import IMAGES, TEXT_ALONE, ImageInputs, MediaOptions, NoImages, pictures_of
from quire.multimodal.named import NamedPictures, OwnNames, at_once, prepared
from quire.multimodal.sources import Picture
from quire.multimodal.video_marks import ReadyMedium
from quire.parsers.reasoning import ThinkFormat, Thought
from quire.parsers.registry import detect_reasoning_parser, reasoning_format
from quire.prompt_image import PromptImage
from quire.request import MAX_PRIORITY, EngineRequest
from quire.sampling_params import MAX_LOGPROBS, SamplingParams, ThinkingBudget
from quire.structured_output.writer import GrammarWriter
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.conversation import Conversation
from quire.tokenization.helpers import Conversion, Rendering
from quire.tokenization.jobs import Tokenising
from quire.tokenization.text_lengths import (
    MAX_CHARACTERS_PER_TOKEN,
    check_num_characters,
    check_num_tokens,
    longest,
)
from quire.tokenization.tokenizer import Tokenizer, check_unicode

MAX_STOP_CHARACTERS = 16_384
PROMPT_TAIL = 64
"""Tokens at the end of a prompt searched for an open reasoning mark."""
PIECE_TOKENS = 2**16
GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15
MASK_64 = 2**64 - 1
MASK_63 = 2**63 - 1


class PlacedImages(list[PromptImage]):
    """`multi_modal_data` of a rendered conversation, whose images `ImageInputs.place` has already placed among the
    tokens."""


class TextPrompt(TypedDict, total=False):
    prompt: str
    cache_salt: str
    multi_modal_data: Mapping[str, Any]
    """`image`: one image or a list, each a Pillow image, a uint8 array, or the bytes of a file; None if its uuid names
    it."""
    multi_modal_uuids: Mapping[str, Any]
    """`image`: the caller's names of the images (None: no name). A later prompt may have a name alone."""
    mm_processor_kwargs: Mapping[str, Any]
    """`min_pixels`, `max_pixels` or `size`, within the engine's."""


class TokensPrompt(TypedDict, total=False):
    prompt_token_ids: list[int]
    prompt: str
    """Text of the tokens, reported back."""
    cache_salt: str
    is_continued: bool
    """`prompt` ends inside an answer."""
    prediction: list[int]
    """Expected output tokens; drafts may come from them."""
    multi_modal_data: Mapping[str, Any] | PlacedImages
    """Images as in TextPrompt, or placed ones."""
    multi_modal_uuids: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, Any]


Prompt = str | list[int] | TextPrompt | TokensPrompt
IMAGE_KEY = "multi_modal_data"
IMAGE_KEYS = (IMAGE_KEY, "multi_modal_uuids")
MEDIA_KEYS = (*IMAGE_KEYS, "mm_processor_kwargs")
"""Keys of vLLM's multimodal prompts."""
PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "is_continued", "prediction")
PREDICTION_TAIL = 16
"""Prompt tokens kept before a prediction, so its beginning is found."""


class RenderedChat(NamedTuple):
    """Rendered conversation: text and token ids, including image placeholders."""

    text: str
    token_ids: list[int]
    images: Sequence[PromptImage] = ()
    is_continued: bool = False

    def prompt(self) -> TokensPrompt:
        """Prompt for `InputProcessor.process`."""
        found: TokensPrompt = {
            "prompt_token_ids": self.token_ids,
            "prompt": self.text,
            "is_continued": self.is_continued,
        }
        if self.images:
            found["multi_modal_data"] = PlacedImages(self.images)
        return found


class InputProcessor:
    """Checks, tokenises and resolves requests. Thread-safe. tokenizer: None: prompts are token ids. vocab_size: the
    model's, which may exceed the tokenizer's. max_model_len: tokens of prompt and output together. eos_token_ids: the
    model's, besides the tokenizer's own. seed: source of seeds that requests lack. max_logprobs: alternatives per
    token; -1: the vocabulary. takes_priorities: requests may set one. pools: a pooling model.

    Front ends set attributes: `clips_max_tokens`: clip a max_tokens that does not fit instead of refusing it (`LLM`).
    `max_new_tokens`: limit of every request or None. `reasoning`: format of the model's reasoning. `chat_template`,
    `images` and `processors`: the engine's.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        seed: int,
        max_logprobs: int = MAX_LOGPROBS,
        takes_priorities: bool = False,
        pools: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        # A checkpoint may name end tokens outside the model's vocabulary, which must not reach the sampler.
        ends = eos_token_ids if tokenizer is None else tokenizer.ends(eos_token_ids)
        self._eos_token_ids = [token_id for token_id in ends if 0 <= token_id < vocab_size]
        self.grammars = GrammarWriter(tokenizer, vocab_size)
        self._bad_words = BadWordTokenizer(tokenizer, vocab_size)
        self.seed = seed
        self._max_logprobs = max_logprobs
        self._takes_priorities = takes_priorities
        self._pools = pools
        self.clips_max_tokens = True
        self.prediction_tail = PREDICTION_TAIL
        self.reports_logits = False
        self.max_new_tokens: int | None = None
        self.images: ImageInputs | NoImages = NoImages()
        self.named_pictures = NamedPictures(0)
        self.processors: Sequence[type[LogitsProcessor]] = ()
        self._request_numbers = itertools.count()  # next() is atomic
        self.chat_template = None if tokenizer is None else ChatTemplate.of(tokenizer)
        self.reasoning = None if tokenizer is None else detected_reasoning(tokenizer)

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        cache_salt: str = "",
        priority: int = 0,
        add_special_tokens: bool = True,
        adapter: AdapterRef | None = None,
    ) -> EngineRequest:
        """Request for the engine core. priority: -MAX_PRIORITY to MAX_PRIORITY, lower is earlier.
        add_special_tokens: for texts. Raises UserError with `param` set, or PromptTooLongError."""
        if self._pools:
            raise UserError("this model gives vectors or scores of texts, and generates none (runner='pooling')")
        if not isinstance(params, SamplingParams):
            raise UserError(f"params must be SamplingParams, not {type(params).__name__}", param="params")
        self._check_params(params)
        params = self._with_alternatives(params)
        if self.reports_logits and params.ranks_samples:
            raise UserError("best_of compares log-probabilities, and this engine gives logits", param="best_of")
        self.check_priority(priority)
        content, cache_salt = split_prompt(prompt, cache_salt, takes_images=True)
        asked = prompt.get("mm_processor_kwargs") if isinstance(prompt, Mapping) else None
        media = MediaOptions.of(asked, owner=cache_salt)
        if params.skip_reading_prefix_cache:
            cache_salt += uuid.uuid4().hex  # a unique salt: no cached block matches
        check_unicode(request_id, param="request_id")
        images: list[PromptImage] = []
        if isinstance(prompt, Mapping) and has_images(prompt):
            whole = msgspec.structs.replace(params, truncate_prompt_tokens=None)
            token_ids = self._tokens(content, whole, add_special_tokens)
            token_ids, images = self._place_images(token_ids, prompt, params, media)
        else:
            token_ids = self._tokens(content, params, add_special_tokens)
        room = self.max_model_len - len(token_ids)
        if params.min_tokens > room:
            raise UserError(
                f"min_tokens ({params.min_tokens}) does not fit: after the prompt of {len(token_ids)} tokens "
                f"the model's context of {self.max_model_len} has room for {room}",
                param="min_tokens",
            )
        if params.max_tokens is not None and params.max_tokens > room and not self.clips_max_tokens:
            raise PromptTooLongError(
                f"{longest(self.max_model_len)}, but {len(token_ids)} prompt tokens + {params.max_tokens} (max_tokens) "
                f"= {len(token_ids) + params.max_tokens} tokens: ask for at most {room}, or for a shorter prompt",
                param="max_tokens",
                num_tokens=len(token_ids),
            )
        constraint, constraint_start = "", []
        if params.structured_outputs is not None:
            constraint = self.grammars.write(params.structured_outputs)
            constraint_start = list(params.structured_outputs.start_after_token_ids or ())
            params = msgspec.structs.replace(params, structured_outputs=None)  # workers do not need the schema
        else:
            params = copy(params)  # the caller may modify the original
        thinking_budget = None
        if params.has_thinking_budget:
            is_held = bool(constraint) and not constraint_start
            thinking_budget = self._thinking_budget(prompt, params, token_ids, is_held=is_held)
        return EngineRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            max_tokens=min(each for each in (room, params.max_tokens, self.max_new_tokens) if each is not None),
            seed=self._resolve_seed(params.seed),
            eos_token_ids=[] if params.ignore_eos else self._eos_token_ids,
            bad_token_sequences=self._bad_words.sequences(params.bad_words or []),
            cache_salt=cache_salt,
            priority=priority,
            constraint=constraint,
            constraint_start=constraint_start,
            thinking_budget=thinking_budget,
            images=images,
            is_processed=check_params(self.processors, params),
            prediction=self._prediction(prompt, token_ids),
            adapter=adapter,
        )

    def _prediction(self, prompt: Prompt, token_ids: list[int]) -> list[int]:
        predicted = prompt.get("prediction") if isinstance(prompt, Mapping) else None
        if not predicted:
            return []
        if not isinstance(predicted, list):
            raise UserError(f"prediction must be a list of token ids, not {predicted!r:.100}", param="prediction")
        self.check_token_ids(predicted, "prediction")
        return token_ids[-self.prediction_tail :] + predicted[: self.max_model_len]

    def _thinking_budget(
        self, prompt: Prompt, params: SamplingParams, token_ids: list[int], *, is_held: bool
    ) -> ThinkingBudget:
        form, tokenizer = self.reasoning, self.tokenizer
        if form is None or tokenizer is None:
            raise UserError(
                "thinking_token_budget needs a model whose chat template shows how it reasons, or --reasoning-parser",
                param="thinking_token_budget",
            )
        starts, ends = (
            [tokenizer.encode(mark, add_special_tokens=False) for mark in marks] for marks in (form.starts, form.ends)
        )
        if params.allowed_token_ids is not None and not set(ends[0]) <= set(params.allowed_token_ids):
            raise UserError(
                f"thinking_token_budget needs the tokens of {form.ends[0]!r} among allowed_token_ids",
                param="allowed_token_ids",
            )
        self.check_embedding(tokenizer, [token_id for mark in starts + ends for token_id in mark])
        continues = isinstance(prompt, Mapping) and bool(prompt.get("is_continued"))
        text = prompt_text(prompt) if continues else None  # whole: thoughts may be long
        text = text or tokenizer.decode(token_ids[-PROMPT_TAIL:], skip_special_tokens=False)
        is_open = form.thought_after(text, continues=continues, is_held=is_held) is Thought.OPEN
        return ThinkingBudget(params.thinking_token_budget or 0, starts, ends, is_open)

    def process_prefix(self, request_id: str, prefix: Prompt, *, cache_salt: str = "") -> EngineRequest:
        """Request that computes a prefix and registers it as `request_id`. Raises UserError as `process`."""
        content, cache_salt = split_prompt(prefix, cache_salt, takes_images=True)
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, seed=0, detokenize=False)
        token_ids, images = self._tokens(content, params, add_special_tokens=True), list[PromptImage]()
        if isinstance(prefix, Mapping) and has_images(prefix):
            media = MediaOptions.of(prefix.get("mm_processor_kwargs"), owner=cache_salt)
            token_ids, images = self._place_images(token_ids, prefix, params, media)
        return EngineRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            max_tokens=1,
            seed=0,
            cache_salt=cache_salt,
            register_prefix=True,
            images=images,
        )

    def render_chat(self, conversation: Conversation) -> RenderedChat:
        """Render a conversation with the chat template, tokenise it and prepare its images. Raises
        PromptTooLongError, and as `prepare_chat`, `write_text` and `with_images`."""
        pictures = conversation.messages.pictures
        inputs = self.image_inputs_of(pictures)
        text, token_ids = self.write_text(self.prepare_chat(conversation))
        if token_ids is None:
            token_ids = self.tokenise_chat(text, conversation.add_special_tokens)
        rendered = RenderedChat(text, token_ids, is_continued=conversation.continue_final_message)
        if inputs is None:
            return rendered
        return self.with_images(rendered, self._prepared(inputs, pictures, conversation.media))

    def image_inputs_of(self, pictures: Sequence[Picture]) -> ImageInputs | None:
        """Model's image inputs; None without pictures. Raises UserError if the model takes no images, or fewer than
        these."""
        if not pictures:
            return None
        if isinstance(self.images, NoImages):
            where = pictures[0].where
            raise UserError(f"{where}: images are not supported: {self.images.reason}", param=where)
        self.images.check_numbers(pictures)
        return self.images

    def with_images(self, rendered: RenderedChat, images: Sequence[ReadyMedium]) -> RenderedChat:
        """Add the images of a conversation. Raises UserError if the template has written another number of
        placeholders, and PromptTooLongError."""
        assert isinstance(self.images, ImageInputs)
        token_ids, placed = self.images.place(rendered.token_ids, images, "messages")
        self.check_room(token_ids)
        return rendered._replace(token_ids=token_ids, images=placed)

    def prepare_chat(self, conversation: Conversation) -> Conversion:
        """Prepare the rendering of a conversation, for a helper process. Raises UserError if the model has no template,
        and as ChatTemplate.prepare."""
        template, tokenizer = self.chat_template, self.tokenizer
        if template is None or tokenizer is None:
            raise UserError("chat needs a tokenizer, and this model has none", param="messages")
        tokenising = None
        if tokenizer.encode_elsewhere is not None and template.helpers.has_tokenizer:
            tokenising = Tokenising(tokenizer.inline_characters, conversation.add_special_tokens, self.max_model_len)
        return template.prepare(conversation, self.max_model_len * MAX_CHARACTERS_PER_TOKEN, tokenising)

    def write_text(self, work: Conversion) -> Rendering:
        """Render; waits for the helper, which also tokenises long texts. Raises as ChatTemplate.write."""
        assert self.chat_template is not None, "there is a job only where there is a template"
        return self.chat_template.write(work)

    def tokenise_chat(self, text: str, add_special_tokens: bool) -> list[int]:
        assert self.tokenizer is not None, "there is a text only where there is a template"
        self.check_num_tokens(text, "messages")
        return self.tokenizer.encode(text, add_special_tokens)

    def close(self) -> None:
        """Stop the helper processes. Idempotent."""
        if self.chat_template is not None:
            self.chat_template.helpers.close()

    def _tokens(self, content: str | Sequence[int], params: SamplingParams, add_special_tokens: bool) -> list[int]:
        """Prompt's tokens: checked, truncated to `truncate_prompt_tokens`, and short enough for one new token."""
        keep = params.truncate_prompt_tokens
        if isinstance(content, str):
            if self.tokenizer is None:
                raise UserError(
                    "a text prompt needs a tokenizer, and this model has none: pass prompt_token_ids",
                    param="prompt",
                )
            check_unicode(content, param="prompt")
            self.check_text_length(content, "prompt", is_cut=keep is not None)
            if keep is None:
                self.check_num_tokens(content, "prompt")
            token_ids = self.tokenizer.encode(content, add_special_tokens)
            self.check_embedding(self.tokenizer, token_ids)
        else:
            token_ids = []
            for some in _in_pieces(content if isinstance(content, list) else list(content)):
                token_ids += some
            self.check_token_ids(token_ids, "prompt_token_ids")
        # An empty text is an error even if the tokenizer adds a token before it.
        if not content or not token_ids:
            raise UserError("the prompt is empty: at least one token is needed", param="prompt")
        if keep is not None:
            keep = self._num_kept(params)
            token_ids = token_ids[:keep] if params.truncation_side == "right" else token_ids[-keep:]
        self.check_room(token_ids)
        return token_ids

    def _num_kept(self, params: SamplingParams) -> int:
        keep = params.truncate_prompt_tokens
        if keep is None:
            return self.max_model_len
        return max(1, self.max_model_len - (params.max_tokens or 1)) if keep == -1 else keep

    def _place_images(
        self, token_ids: list[int], prompt: Mapping[str, Any], params: SamplingParams, options: MediaOptions
    ) -> tuple[list[int], list[PromptImage]]:
        if isinstance(self.images, NoImages):
            raise UserError(f"{IMAGE_KEY} is not supported: {self.images.reason}", param=IMAGE_KEY)
        if isinstance(given := prompt.get(IMAGE_KEY), PlacedImages):
            placed = list(given)
        else:
            pictures = pictures_of(prompt)
            self.images.check_numbers(pictures)
            token_ids, placed = self.images.place(token_ids, self._prepared(self.images, pictures, options), IMAGES)
            self.check_room(token_ids)
        if len(token_ids) > (keep := self._num_kept(params)):
            raise UserError(
                f"truncate_prompt_tokens cuts no prompt with images: it has {len(token_ids)} tokens, more than {keep}",
                param="truncate_prompt_tokens",
            )
        return token_ids, placed

    def _prepared(self, inputs: ImageInputs, pictures: Sequence[Picture], options: MediaOptions) -> list[ReadyMedium]:
        async def prepare(picture: Picture) -> ReadyMedium:
            return inputs.prepare(picture, options)

        names = OwnNames(self.named_pictures)
        return [at_once(prepared(each, options.owner, names, prepare)) for each in pictures]

    def check_room(self, token_ids: list[int]) -> None:
        if len(token_ids) >= self.max_model_len:
            raise PromptTooLongError(
                f"{longest(self.max_model_len)}, prompt and at least one new token together, but the prompt has "
                f"{len(token_ids)} tokens",
                param="prompt",
                num_tokens=len(token_ids),
            )

    def check_embedding(self, tokenizer: Tokenizer, token_ids: list[int]) -> None:
        """Raise UserError for tokens of the tokenizer to which the model has no embedding."""
        largest = max(map(max, _in_pieces(token_ids)), default=0)
        if largest >= self.vocab_size:
            raise UserError(
                f"the prompt holds {tokenizer.token_text(largest)!r:.100}, which is token {largest} of the tokenizer; "
                f"the model has no such token (0 to {self.vocab_size - 1})",
                param="prompt",
            )

    def check_text_length(self, text: str, param: str, *, is_cut: bool = False) -> None:
        """Raise PromptTooLongError for a text that is too long to tokenise. is_cut: only its last tokens are wanted."""
        check_num_characters(len(text), self.max_model_len, param, is_cut=is_cut)

    def check_num_tokens(self, text: str, param: str) -> None:
        """Raise PromptTooLongError for a text with far too many tokens, before it is tokenised."""
        if self.tokenizer is not None:
            check_num_tokens(self.tokenizer, text, self.max_model_len, param)

    def check_priority(self, priority: object) -> None:
        if type(priority) is not int:
            raise UserError(f"priority must be an integer, not {priority!r:.100}", param="priority")
        if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise UserError(
                f"priority must be between {-MAX_PRIORITY} and {MAX_PRIORITY}, not {priority}", param="priority"
            )
        if priority and not self._takes_priorities:
            raise UserError(
                f"got priority {priority}, but priorities are off: they need scheduling_policy='priority'",
                param="priority",
            )

    def _check_params(self, params: SamplingParams) -> None:
        self.check_token_ids(params.stop_token_ids or (), "stop_token_ids")
        self.check_token_ids(params.allowed_token_ids or (), "allowed_token_ids")
        self.check_token_ids(params.logprob_token_ids or (), "logprob_token_ids")
        self.check_token_ids(params.logit_bias or (), "logit_bias")
        if params.structured_outputs is not None:
            self.check_token_ids(params.structured_outputs.start_after_token_ids or (), "structured_outputs")
        stops = params.stop_strings
        if stops and self.tokenizer is None:
            raise UserError("stop strings need a tokenizer, and this model has none", param="stop")
        if sum(map(len, stops)) > MAX_STOP_CHARACTERS:
            raise UserError(f"stop strings must not exceed {MAX_STOP_CHARACTERS} characters together", param="stop")
        for stop in stops:
            check_unicode(stop, param="stop")

    def _with_alternatives(self, params: SamplingParams) -> SamplingParams:
        """Resolve -1 (all) in `logprobs` and `prompt_logprobs`, and clip them to the vocabulary. Raises UserError above
        `max_logprobs`."""
        most = self.vocab_size if self._max_logprobs == -1 else self._max_logprobs
        changes = {}
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, name)
            if wanted is None or 0 <= wanted <= min(most, self.vocab_size):
                continue
            number = self.vocab_size if wanted == -1 else min(wanted, self.vocab_size)
            if number > most:
                raise UserError(
                    f"{name}={wanted} asks for {number} alternatives, and at most {most} are given (max_logprobs)",
                    param=name,
                )
            changes[name] = number
        if len(params.logprob_token_ids or ()) > most:
            raise UserError(
                f"logprob_token_ids has {len(params.logprob_token_ids or ())} tokens, and at most {most} are reported "
                "(max_logprobs)",
                param="logprob_token_ids",
            )
        return msgspec.structs.replace(params, **changes) if changes else params

    def check_token_ids(self, token_ids: Any, param: str) -> None:
        """Raise UserError for token ids of a wrong type or range; fast for long valid lists."""
        if all(
            set(map(type, some)) == {int} and min(some) >= 0 and max(some) < self.vocab_size
            for some in _in_pieces(token_ids if isinstance(token_ids, list) else list(token_ids))
        ):
            return
        for token_id in token_ids:
            if type(token_id) is not int:
                raise UserError(f"{param} must hold integers, not {token_id!r}", param=param)
            if not 0 <= token_id < self.vocab_size:
                raise UserError(
                    f"{param}: {token_id} is not a token id: out of vocabulary (0 to {self.vocab_size - 1})",
                    param=param,
                )

    def _resolve_seed(self, seed: int | None) -> int:
        """Seed in [0, 2**63): the given one modulo 2**63; None: from the engine's seed and the request's number."""
        number = next(self._request_numbers)
        return seed & MASK_63 if seed is not None else mix_seed(self.seed, number)


def detected_reasoning(tokenizer: Tokenizer) -> ThinkFormat | None:
    name = detect_reasoning_parser(tokenizer.chat_templates.values())
    return None if name is None else reasoning_format(name)


def _in_pieces(token_ids: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(token_ids), PIECE_TOKENS):
        yield token_ids[start : start + PIECE_TOKENS]


def num_units(prompt: Prompt, params: SamplingParams) -> int:
    """Size of `InputProcessor.process`'s work: characters and token ids of prompt, lists and constraint. Large ones run
    on a thread."""
    content: Any = prompt
    if isinstance(prompt, Mapping):
        content = prompt.get("prompt_token_ids", prompt.get("prompt"))
    lists = (content, params.allowed_token_ids, params.stop_token_ids, params.logit_bias)
    size = sum(len(entry) for entry in lists if isinstance(entry, Sized)) + sum(map(len, params.bad_words or ()))
    return size if params.structured_outputs is None else size + params.structured_outputs.size


def num_prompt_tokens(prompt: Prompt) -> int:
    """Number of token ids of a prompt; 0 for a text."""
    content: Any = prompt.get("prompt_token_ids", "") if isinstance(prompt, Mapping) else prompt
    return 0 if isinstance(content, str) else len(content)


def prompt_text(prompt: Prompt) -> str | None:
    """Text of a prompt for the output; None if only its tokens are known."""
    if isinstance(prompt, str):
        return prompt
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else None
    return text if isinstance(text, str) else None


def mix_seed(seed: int, number: int) -> int:
    """Seed, uniform in [0, 2**63), from an engine's or session's seed and a request's number (the finaliser of
    splitmix64)."""
    value = (seed + (number + 1) * GOLDEN_RATIO_64) & MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return (value ^ (value >> 31)) & MASK_63


def has_images(prompt: Mapping[str, Any]) -> bool:
    return any(prompt.get(key) for key in IMAGE_KEYS)


def split_prompt(prompt: Prompt, cache_salt: str, *, takes_images: bool = False) -> tuple[str | Sequence[int], str]:
    """Split a prompt of any form into (text or token ids, cache salt)."""
    content: Any = prompt
    if isinstance(prompt, Mapping):
        for name in MEDIA_KEYS:
            if prompt.get(name) and not takes_images:
                raise UserError(f"{name} is not supported: {TEXT_ALONE}", param=name)
        known = (name for name in map(str, prompt) if name not in MEDIA_KEYS)
        reject_unknown(known, PROMPT_KEYS, "key in the prompt")
        cache_salt = prompt.get("cache_salt", cache_salt)
        content = prompt.get("prompt_token_ids", prompt.get("prompt"))
        param = "prompt_token_ids" if "prompt_token_ids" in prompt else "prompt"
        if param == "prompt_token_ids" and not isinstance(content, list | tuple):
            raise UserError(f"prompt_token_ids must be a list of integers, not {content!r:.100}", param=param)
        if param == "prompt" and not isinstance(content, str):
            raise UserError("a prompt object needs a string `prompt` or a list `prompt_token_ids`", param=param)
    elif not isinstance(prompt, str | list | tuple):
        raise UserError(
            f"a prompt must be a string, a list of token ids or an object, not {type(prompt).__name__}",
            param="prompt",
        )
    if not isinstance(cache_salt, str):
        raise UserError(f"cache_salt must be a string, not {cache_salt!r:.100}", param="cache_salt")
    check_unicode(cache_salt, param="cache_salt")
    return content, cache_salt
