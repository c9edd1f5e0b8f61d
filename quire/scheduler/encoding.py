"""Scheduler's view of images: encoded ones, and the layers that each plan encodes.

One rank encodes an image, in slices of the tower's layers. A sequence stops before an unencoded image; a request that
would begin with one waits in the queue (ImageGate). The workers keep features until a plan drops them.
"""

from __future__ import annotations

from collections import OrderedDict

from quire.config.vision import EncoderCosts
from quire.decoding.sequence import Deferral, OrderKey, Request, RequestStatus
from quire.image_orders import EncodeSlice, ImageOrders
from quire.kv_cache.stats import EngineStats
from quire.prompt_image import PromptImage
from quire.scheduler.admission import Quote
from quire.scheduler.gates import GateStage

ENCODING = "encoding image"


class Wanted:
    """Image to encode, and the live requests that need it and have not computed its tokens yet; kept until encoded."""

    def __init__(self, image: PromptImage) -> None:
        self.key, self.grid, self.num_tokens = image.key, image.grid, image.num_tokens
        self.is_encoded = image.is_encoded
        self.image: PromptImage | None = image
        """Image; None: the workers have its pixels."""
        self.requests: dict[Request, None] = {}
        self.num_layers = 0

    @property
    def order_key(self) -> OrderKey | None:
        return min((request.order_key for request in self.requests), default=None)


class ImageEncodings:
    def __init__(self, costs: EncoderCosts | None) -> None:
        """costs: sizes of the image tower's work; None for models without images."""
        self._costs, self.are_any = costs, costs is not None
        self._kept: OrderedDict[bytes, Wanted] = OrderedDict()
        """Encoded images after all plans made so far, the least recently read first."""
        self._wanted: dict[bytes, Wanted] = {}
        """Images whose encoding has not begun."""
        self._current: list[Wanted | None] = [None] * (1 if costs is None else costs.num_ranks)
        """Image with some of its layers ordered, by rank."""
        self._reads: set[bytes] = set()
        """Keys of images that this pass's plan reads."""
        self.num_begun = 0
        """Number of images whose first layers were ordered so far."""

    def limit(self, request: Request, start: int, end: int) -> int:
        """End of the tokens from `start` that can be computed now, at most `end`. It lies before the first unencoded
        image, which is then requested, and never inside a whole one."""
        for image in request.images:
            if image.start >= end:
                break
            if image.end <= start:
                continue
            kept = self._kept.get(image.key)
            if kept is None:
                self._want(image, request)
                return max(start, image.start)
            if image.is_whole and end < image.end:
                return image.start
            kept.requests.pop(request, None)
            self._kept.move_to_end(image.key)
            self._reads.add(image.key)
        return end

    def awaits_budget(self, request: Request, start: int, num_tokens: int) -> bool:
        """True if a whole image (`is_whole`) of more than `num_tokens` tokens begins at `start`."""
        return any(
            image.is_whole and image.start == start and image.num_tokens > num_tokens for image in request.images
        )

    def await_first(self, request: Request, start: int) -> bytes | None:
        """Request the unencoded image at position `start`; returns its key, None if there is none."""
        for image in request.images:
            if image.start <= start < image.end and image.key not in self._kept:
                self._want(image, request)
                return image.key
        return None

    def is_awaited(self, key: bytes) -> bool:
        return key in self._wanted or any(each.key == key for each in self._begun())

    def orders(self, budget: int, *, is_idle: bool) -> ImageOrders | None:
        """This pass's image orders; None: no image waits. budget: tokens left in the step, on every rank; one layer is
        encoded in any case. is_idle: nothing else is computed, so unread images may be dropped for another."""
        reads, self._reads = self._reads, set()
        if not self._wanted and not self._begun():
            return None
        dropped: list[bytes] = []
        slices: list[EncodeSlice] = []
        budgets = dict.fromkeys(range(len(self._current)), budget)
        busy: set[int] = set()
        while budgets:
            assert self._costs is not None, "requests have images"
            # Begun images first, then the next one on the rank that has most left.
            rank = max(budgets, key=lambda each: (self._current[each] is not None, budgets[each]))
            wanted, count = self._next(rank, reads, dropped, is_idle=is_idle), 0
            if wanted is not None:
                cost, left = self._costs.layer_tokens(wanted.grid), self._costs.num_layers - wanted.num_layers
                count = min(left, max(budgets[rank] // cost, 0 if rank in busy else 1))
                if wanted.is_encoded:
                    cost, count = 0, left
            if wanted is None or not count:
                del budgets[rank]
                continue
            budgets[rank] -= count * cost
            busy.add(rank)
            slices.append(EncodeSlice(wanted.key, count, wanted.image, rank))
            self._advance(wanted, count, rank)
            reads.add(wanted.key)  # orders of one plan do not drop what they encode
        return ImageOrders(dropped, slices) if dropped or slices else None

    def forget(self, request: Request) -> None:
        for wanted in (*self._kept.values(), *self._wanted.values(), *self._begun()):
            wanted.requests.pop(request, None)
        self._wanted = {key: wanted for key, wanted in self._wanted.items() if wanted.requests}

    def forget_workers(self) -> None:
        self._kept.clear()
        self._wanted.clear()
        self._current = [None] * len(self._current)

    def report_stats(self, stats: EngineStats) -> None:
        """Fill in the numbers of images that workers keep and have encoded."""
        if self._costs is not None:
            stats.max_encoder_tokens = self._costs.cache_tokens
            stats.num_encoder_tokens = sum(kept.num_tokens for kept in self._kept.values())
            stats.encoded_images_total = self.num_begun

    def _want(self, image: PromptImage, request: Request) -> None:
        begun = next((each for each in self._begun() if each.key == image.key), None)
        wanted = begun or self._wanted.setdefault(image.key, Wanted(image))
        wanted.requests[request] = None

    def _begun(self) -> list[Wanted]:
        return [each for each in self._current if each is not None]

    def _next(self, rank: int, reads: set[bytes], dropped: list[bytes], *, is_idle: bool) -> Wanted | None:
        """Image whose layers a rank computes next; None: none, or no room for it. dropped: receives the images that
        make room."""
        current = self._current[rank]
        if current is not None:
            if current.requests:
                return current
            dropped.append(current.key)
            self._current[rank] = None
        asked = [(wanted.order_key, key) for key, wanted in self._wanted.items()]
        order_key, key = min(((order, key) for order, key in asked if order is not None), default=(None, b""))
        if order_key is None:
            return self._ahead()
        wanted = self._wanted[key]
        return wanted if self._make_room(wanted.num_tokens, order_key, reads, dropped, is_idle=is_idle) else None

    def _ahead(self) -> Wanted | None:
        """Next image of a request whose image another rank encodes, if there is room beside all others."""
        assert self._costs is not None, "requests have images"
        begun, taken = self._begun(), {*self._kept, *(each.key for each in self._begun())}
        found: dict[tuple[OrderKey, int], tuple[Request, PromptImage]] = {}
        for request in {request for each in begun for request in each.requests}:
            keys = [image.key for image in request.images]
            first = min(keys.index(each.key) for each in begun if request in each.requests)
            image = next((each for each in request.images[first:] if each.key not in taken), None)
            if image is not None:
                found[request.order_key, image.start] = request, image
        if not found:
            return None
        request, image = found[min(found)]
        if self._room() < image.num_tokens:
            return None
        wanted = Wanted(image)
        wanted.requests[request] = None
        return wanted

    def _room(self) -> int:
        assert self._costs is not None, "requests have images"
        return self._costs.cache_tokens - sum(each.num_tokens for each in (*self._kept.values(), *self._begun()))

    def _make_room(
        self, num_tokens: int, order_key: OrderKey, reads: set[bytes], dropped: list[bytes], *, is_idle: bool
    ) -> bool:
        """Make room beside begun images, those that the plan reads and unread ones of earlier requests. False: no
        room."""
        room, victims = self._room(), []
        for key, kept in self._kept.items():
            if room >= num_tokens:
                break
            first = kept.order_key
            if key in reads or (first is not None and first < order_key and not is_idle):
                continue
            victims.append(key)
            room += kept.num_tokens
        if room < num_tokens and (self._begun() or len(victims) < len(self._kept)):
            return False
        for key in victims:
            del self._kept[key]
        dropped += victims
        return True

    def _advance(self, wanted: Wanted, num_layers: int, rank: int) -> None:
        assert self._costs is not None, "requests have images"
        key = wanted.key
        if wanted.image is not None:
            self._wanted.pop(key, None)
            self._current[rank], wanted.image = wanted, None
            self.num_begun += 1
        wanted.num_layers += num_layers
        if wanted.num_layers == self._costs.num_layers:
            self._kept[key], self._current[rank] = wanted, None


class ImageGate:
    """Defers a request whose next token is in an image until encoded."""

    reason = ENCODING
    stage = GateStage.BEGIN

    def __init__(self, images: ImageEncodings) -> None:
        self._images = images

    def check(self, request: Request, quote: Quote, now: float) -> Deferral | None:
        if not request.images or quote.is_resumed:
            return None
        key = self._images.await_first(request, quote.num_cached_tokens)
        return None if key is None else Deferral(self.reason, quote.num_blocks, lambda: self._images.is_awaited(key))

    def forget(self, request: Request) -> None:
        if request.status is RequestStatus.FINISHED and request.images_end:
            self._images.forget(request)
