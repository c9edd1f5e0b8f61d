"""Train a LLaMA-architecture model on the training files, within a budget of minutes or of tokens.

The learning rate warms up, stays, and falls linearly to zero as the budget runs out. The run can be
stopped at any time and continued with ``--resume``: weights, optimiser state, time spent and the position
in the text all come from the checkpoint.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from checkpoint import read_checkpoint, save_checkpoint
from corpus import split_corpus
from data import TokenStream, encode_files
from model import LanguageModel, ModelConfig
from muon import Muon
from tokenizers import Tokenizer
from torch import Tensor
from torch.optim import AdamW, Optimizer
from workers import WorkerPool


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="directory holding tokenizer.json")
    parser.add_argument("--checkpoint", type=Path, required=True, help="file to write, and to resume from")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint if it exists")
    parser.add_argument("--root", type=Path, help="library to read (default: the running interpreter's)")

    size = parser.add_argument_group("model")
    size.add_argument("--hidden", type=int, default=256)
    size.add_argument("--layers", type=int, default=6)
    size.add_argument("--heads", type=int, default=8)
    size.add_argument("--kv-heads", type=int, default=4)
    size.add_argument("--intermediate", type=int, default=704)
    size.add_argument("--context", type=int, default=2048, help="longest context, the model's limit")

    run = parser.add_argument_group("run")
    run.add_argument("--minutes", type=float, help="budget of wall-clock time")
    run.add_argument("--tokens", type=float, help="budget of tokens (either budget ends the run)")
    run.add_argument("--batch", type=int, default=8192, help="tokens a step")
    run.add_argument("--micro-batch", type=int, default=1024, help="tokens a forward pass")
    run.add_argument(
        "--context-schedule",
        default="0:512,0.8:2048",
        help="context length from each fraction of the budget on; each divides the longest",
    )
    run.add_argument("--lr", type=float, default=1.5e-3, help="AdamW's rate, for embeddings and norms")
    run.add_argument("--muon-lr", type=float, default=3e-3, help="Muon's rate, for the layers' matrices")
    run.add_argument("--weight-decay", type=float, default=0.1)
    run.add_argument("--warmup", type=float, default=0.02, help="fraction of the budget")
    run.add_argument("--decay", type=float, default=0.7, help="fraction of the budget")
    run.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    run.add_argument("--seed", type=int, default=1)
    run.add_argument("--device", default="cpu")
    run.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the arithmetic")
    run.add_argument("--threads", type=int, help="CPU threads")
    run.add_argument("--workers", type=int, default=0, help="processes of one thread each, on a CPU")
    run.add_argument("--no-compile", action="store_true", help="do without torch.compile")
    run.add_argument("--checkpoint-every", type=float, default=3, help="minutes")
    run.add_argument("--validate-every", type=int, default=100, help="steps")
    run.add_argument("--log-every", type=int, default=10, help="steps")
    arguments = parser.parse_args()
    if arguments.minutes is None and arguments.tokens is None:
        parser.error("give a budget: --minutes, --tokens or both")
    return arguments


def schedule_factor(progress: float, warmup: float, decay: float) -> float:
    """The learning rate's factor once ``progress`` of the budget, from 0 to 1, is spent."""
    return min(1.0, (progress + 1e-4) / max(warmup, 1e-4), max(0.0, (1 - progress) / max(decay, 1e-4)))


def scheduled_context(schedule: str, progress: float) -> int:
    """The context length to train at once ``progress`` of the budget is spent."""
    steps = (part.split(":") for part in schedule.split(","))
    return [int(context) for start, context in steps if float(start) <= progress][-1]


def build_optimizers(model: LanguageModel, arguments: argparse.Namespace) -> list[Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [parameter for parameter in model.layers.parameters() if parameter.ndim == 2]
    taken = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in taken]
    optimizers: list[Optimizer] = [
        Muon(matrices, lr=arguments.muon_lr, weight_decay=arguments.weight_decay),
        AdamW(others, lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


class Trainer:
    """A run: the model, its optimisers, its data and how much of the budget is spent."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        tokenizer = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
        training, held_out = split_corpus(arguments.root)
        self.stream = TokenStream(encode_files(tokenizer, training), arguments.context, arguments.seed)
        context = min(arguments.context, 1024)
        self.validation = TokenStream(encode_files(tokenizer, held_out), context, seed=0).take(32, context)
        self.bits_per_byte = self._bits_per_byte_factor(tokenizer)
        config = ModelConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=arguments.hidden,
            num_layers=arguments.layers,
            num_heads=arguments.heads,
            num_kv_heads=arguments.kv_heads,
            intermediate_size=arguments.intermediate,
            max_positions=arguments.context,
        )
        self.model = LanguageModel(config).to(self.device)
        self.optimizers = build_optimizers(self.model, arguments)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        if arguments.resume and arguments.checkpoint.exists():
            self._restore()
        self.pool: WorkerPool | None = None
        if arguments.workers:
            use_bfloat16 = arguments.dtype == "bfloat16"
            self.pool = WorkerPool(self.model, arguments.workers, use_bfloat16, not arguments.no_compile)
        elif not arguments.no_compile:
            self.model.compile_parts()

    def _bits_per_byte_factor(self, tokenizer: Tokenizer) -> float:
        """What turns nats a token into bits a byte on the validation sequences."""
        targets = self.validation[:, 1:]
        texts = tokenizer.decode_batch(targets.tolist(), skip_special_tokens=False)
        size = sum(len(text.encode("utf-8")) for text in texts)
        return targets.numel() / size / math.log(2)

    def _restore(self) -> None:
        content = read_checkpoint(self.arguments.checkpoint, self.arguments.device)
        self.model.load_state_dict(content["model"])
        for optimizer, state in zip(self.optimizers, content["optimizers"], strict=True):
            peaks = [group["peak_lr"] for group in optimizer.param_groups]  # the command line's
            optimizer.load_state_dict(state)
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["peak_lr"] = peak
        progress = content["progress"]
        self.step, self.tokens = progress["step"], progress["tokens"]
        self.seconds, self.stream.position = progress["seconds"], progress["position"]

    def save(self) -> None:
        """Write the checkpoint."""
        progress = {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "position": self.stream.position,
        }
        save_checkpoint(self.arguments.checkpoint, self.model, self.optimizers, progress)

    @property
    def progress(self) -> float:
        """The part of the budget spent, from 0 to 1."""
        spent = [0.0]
        if self.arguments.minutes is not None:
            spent.append(self.seconds / 60 / self.arguments.minutes)
        if self.arguments.tokens is not None:
            spent.append(self.tokens / self.arguments.tokens)
        return min(1.0, max(spent))

    def _autocast(self) -> torch.autocast:
        enabled = self.arguments.dtype == "bfloat16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)

    def _gradient(self, pieces: Sequence[Tensor]) -> float:
        """Set every parameter's gradient for the batch made of ``pieces``; return the batch's loss."""
        rows = sum(len(piece) for piece in pieces)
        total = 0.0
        for piece in pieces:
            with self._autocast():
                loss = self.model.loss(piece.to(self.device)) * (len(piece) / rows)
            loss.backward()
            total += loss.item()
        return total

    def train_step(self) -> float:
        """Take one optimiser step and return its loss in nats a token."""
        arguments = self.arguments
        scheduled = scheduled_context(arguments.context_schedule, self.progress)
        context = min(scheduled, arguments.context)
        factor = schedule_factor(self.progress, arguments.warmup, arguments.decay)
        batch = self.stream.take(max(1, arguments.batch // context), context)
        pieces = batch.split(max(1, arguments.micro_batch // context))
        total = self.pool.gradient(pieces) if self.pool else self._gradient(pieces)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), arguments.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += batch.shape[0] * context
        return total

    @torch.no_grad()
    def validate(self) -> float:
        """Bits a byte on a sample of the held-out files (``evaluate.py`` reads them whole)."""
        losses = []
        for piece in self.validation.split(4):
            with self._autocast():
                losses.append(self.model.loss(piece.to(self.device)).item())
        return sum(losses) / len(losses) * self.bits_per_byte

    def run(self) -> None:
        """Train until the budget is spent."""
        arguments = self.arguments
        print(
            f"{self.model.parameter_count()} parameters, {self.stream.tokens_per_epoch} tokens an epoch",
            flush=True,
        )
        saved = self.seconds
        logged = (self.tokens, self.seconds)
        while self.progress < 1:
            start = time.monotonic()
            loss = self.train_step()
            if self.step % arguments.validate_every == 0:
                print(f"step {self.step} held-out sample {self.validate():.4f} bits/byte", flush=True)
            if self.seconds - saved > arguments.checkpoint_every * 60:
                self.save()
                saved = self.seconds
            self.seconds += time.monotonic() - start
            if self.step % arguments.log_every == 0:
                rate = (self.tokens - logged[0]) / (self.seconds - logged[1])
                logged = (self.tokens, self.seconds)
                print(
                    f"step {self.step} tokens {self.tokens} epochs {self.stream.epochs:.3f}"
                    f" progress {self.progress:.4f} loss {loss:.4f} tokens/s {rate:.0f}",
                    flush=True,
                )
        self.save()
        print(f"done: held-out sample {self.validate():.4f} bits/byte", flush=True)


def main() -> None:
    """Train."""
    arguments = parse_arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    Trainer(arguments).run()


if __name__ == "__main__":
    main()
