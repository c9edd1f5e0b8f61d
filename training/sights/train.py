"""Train the model that looks at pictures. It stops after some seconds of processor time, and writes a checkpoint now
and then, so that it may be ended at any time."""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from model import (
    END,
    END_OF_TEXT,
    IMAGE,
    MERGE,
    PATCH,
    START,
    SYSTEM,
    VISION_END,
    VISION_START,
    new_model,
    new_tokenizer,
    write_files,
)
from scenes import SIZES, Scene, question, scene
from tokenizers import Tokenizer
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))
from muon import Muon

KINDS = ("one", "two", "many", "digit", "nothing")
FIRST_WEIGHTS = (60, 5, 10, 22, 3)
WEIGHTS = (30, 38, 14, 16, 2)
"""Shares of kinds of scenes, in the first tenth of the training and later."""
BATCH = 48
TURNS = 4
IGNORED = -100


class Examples:
    """Conversations about pictures, as batches of one size of pictures each."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)
        self._known: dict[str, list[int]] = {}

    def batch(self, progress: float) -> dict[str, Tensor]:
        rng = self._rng
        size = SIZES[0] if rng.random() < 0.8 else rng.choice(SIZES[1:])
        weights = FIRST_WEIGHTS if progress < 0.1 else WEIGHTS
        scenes = [scene(rng, kind, size) for kind in rng.choices(KINDS, weights, k=BATCH)]
        columns, rows = (side // PATCH for side in size)
        texts = [self._conversation(each, rows // MERGE, columns // MERGE) for each in scenes]
        length = max(len(ids) for ids, _, _ in texts)
        ids = torch.full((BATCH, length), END_OF_TEXT)
        targets = torch.full((BATCH, length), IGNORED)
        positions = torch.zeros((3, BATCH, length), dtype=torch.int64)
        for index, (own, wanted, places) in enumerate(texts):
            ids[index, : len(own)] = torch.tensor(own)
            targets[index, : len(own)] = torch.tensor(wanted)
            positions[:, index, : len(own)] = torch.from_numpy(places)
        return {
            "input_ids": ids,
            "targets": targets,
            "position_ids": positions,
            "pixel_values": torch.cat([patches(np.asarray(each.picture)) for each in scenes]),
            "image_grid_thw": torch.tensor([[1, rows, columns]] * BATCH),
        }

    def _encode(self, text: str) -> list[int]:
        found = self._known.get(text)
        if found is None:
            found = self._known[text] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def _conversation(self, shown: Scene, rows: int, columns: int) -> tuple[list[int], list[int], np.ndarray]:
        """Token ids, those that are learnt, and their three positions."""
        rng = self._rng
        questions = shown.questions()
        chosen = rng.sample(questions, min(TURNS, len(questions)))
        ids: list[int] = []
        targets: list[int] = []

        def add(token_ids: list[int], *, is_learnt: bool = False) -> None:
            ids.extend(token_ids)
            targets.extend(token_ids if is_learnt else [IGNORED] * len(token_ids))

        if rng.random() < 0.1:
            add([START, *self._encode("system\n" + SYSTEM), END, *self._encode("\n")])
        start = 0
        for turn, (kind, answer) in enumerate(chosen):
            add([START, *self._encode("user\n")])
            text = self._encode(question(kind, rng))
            if turn == 0:
                is_first = rng.random() < 0.5
                if not is_first:
                    add(text)
                add([VISION_START])
                start = len(ids)
                add([IMAGE] * (rows * columns))
                add([VISION_END])
                if is_first:
                    add(text)
            else:
                add(text)
            add([END, *self._encode("\n"), START, *self._encode("assistant\n")])
            add([*self._encode(answer), END], is_learnt=True)
            add(self._encode("\n"))
        places = np.arange(len(ids))
        past = start + rows * columns
        places[past:] += max(rows, columns) - rows * columns
        all_places = np.stack([places] * 3)
        all_places[:, start:past] = start
        row, column = np.divmod(np.arange(rows * columns), columns)
        all_places[1, start:past] += row
        all_places[2, start:past] += column
        return ids, targets, all_places


def patches(pixels: np.ndarray) -> Tensor:
    """[patches, 3 * 2 * PATCH * PATCH], in the order of the tokens, as the model's image processor makes them."""
    rows, columns = pixels.shape[0] // PATCH, pixels.shape[1] // PATCH
    values = torch.from_numpy(pixels.copy()).float() / 127.5 - 1
    blocks = values.view(rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH, 3)
    found = blocks.permute(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, 1, PATCH * PATCH)
    return found.expand(-1, -1, 2, -1).reshape(rows * columns, -1)


def loss_of(model: torch.nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The mean loss of the learnt tokens, and the share of them that are the most likely ones."""
    targets = batch.pop("targets")[:, 1:]
    hidden = model.model(**batch).last_hidden_state[:, :-1]
    learnt = targets != IGNORED
    logits = model.lm_head(hidden[learnt])
    return F.cross_entropy(logits, targets[learnt]), (logits.argmax(-1) == targets[learnt]).float().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, default=3600, help="processor time")
    parser.add_argument("--wall", type=float, default=math.inf, help="time, at most")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=Path, help="checkpoint to go on from")
    parser.add_argument("--rate", type=float, default=2e-3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    tokenizer = new_tokenizer()
    write_files(arguments.output, tokenizer)
    examples = Examples(tokenizer, arguments.seed)
    model = new_model()
    if arguments.start is not None:
        model.load_state_dict(type(model).from_pretrained(arguments.start, dtype=torch.float32).state_dict())
    model.train()
    print(f"{sum(each.numel() for each in model.parameters())} parameters", flush=True)
    matrices = [
        each
        for name, each in model.named_parameters()
        if each.ndim == 2 and not name.endswith(("embed_tokens.weight", "pos_embed.weight"))
    ]
    known = set(map(id, matrices))
    others = [each for each in model.parameters() if id(each) not in known]
    optimizers = [
        Muon(matrices, lr=arguments.rate, weight_decay=0.05),
        torch.optim.AdamW(others, lr=arguments.rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    began, step, losses, rights = time.monotonic(), 0, [], []
    while True:
        progress = max(time.process_time() / arguments.seconds, (time.monotonic() - began) / arguments.wall)
        if progress >= 1:
            break
        rate = arguments.rate * min(1.0, (step + 1) / 100) * min(1.0, (1 - progress) / 0.6)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        loss, right = loss_of(model, examples.batch(progress))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        rights.append(right.item())
        step += 1
        if step % 50 == 0:
            means = f"loss {np.mean(losses):.4f}, right {np.mean(rights):.4f}"
            print(f"{step} {progress:.3f} {time.process_time():.0f} s: {means}", flush=True)
            losses, rights = [], []
        if step % 500 == 0:
            save(model, arguments.output)
    save(model, arguments.output)


def save(model: torch.nn.Module, output: Path) -> None:
    """Write the weights in bfloat16, and config.json."""
    copy = new_model()
    copy.load_state_dict(model.state_dict())
    copy.bfloat16().save_pretrained(output)


if __name__ == "__main__":
    main()
