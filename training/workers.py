"""Data-parallel training on the cores of one machine, with one single-threaded process a core.

The processes take pieces of the batch from one queue, so a core that other programs keep busy does less of
the work instead of holding up the rest, as it would if every matrix product were split over all cores.
Weights and gradients lie in shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing import parent_process
from queue import Empty

import torch
import torch.multiprocessing as multiprocessing
from model import LanguageModel
from torch import Tensor


def _work(
    model: LanguageModel,
    gradients: list[Tensor],
    tasks: multiprocessing.Queue,
    results: multiprocessing.Queue,
    use_bfloat16: bool,
    compiles: bool,
) -> None:
    torch.set_num_threads(1)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    if compiles:
        model.compile_parts()
    while parent_process().is_alive():
        try:
            tokens, weight = tasks.get(timeout=10)
        except Empty:
            continue
        with torch.autocast("cpu", torch.bfloat16, enabled=use_bfloat16):
            loss = model.loss(torch.from_numpy(tokens)) * weight
        loss.backward()
        results.put(loss.item())


class WorkerPool:
    """Processes that together compute the gradient of a batch for a model in shared memory."""

    def __init__(self, model: LanguageModel, count: int, use_bfloat16: bool, compiles: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._model = model.share_memory()
        self._tasks = context.Queue()
        self._results = context.Queue()
        self._gradients = []
        for _ in range(count):
            gradients = [torch.zeros_like(parameter).share_memory_() for parameter in model.parameters()]
            self._gradients.append(gradients)
            arguments = (model, gradients, self._tasks, self._results, use_bfloat16, compiles)
            context.Process(target=_work, args=arguments, daemon=True).start()

    def gradient(self, pieces: Sequence[Tensor]) -> float:
        """Set every parameter's gradient for the batch made of ``pieces``; return the batch's loss."""
        rows = sum(len(piece) for piece in pieces)
        for piece in pieces:
            self._tasks.put((piece.numpy(), len(piece) / rows))
        loss = sum(self._results.get() for _ in pieces)
        for parameter, *parts in zip(self._model.parameters(), *self._gradients, strict=True):
            parameter.grad = torch.stack(parts).sum(0)
            for part in parts:
                part.zero_()
        return loss
