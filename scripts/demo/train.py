"""Train a demo model for a given number of minutes.

    python -m scripts.demo.train --shape demo --tokenizer TOKENIZER.json --minutes 85 --out RUN_DIR

The schedule follows the clock, not the step count: a short warm-up, a plateau, and a linear decay over the
last part. So a run ends when it is told to on any machine, and can be resumed with fewer minutes.

With `--teacher`, an exported model of the same widths, the model learns what that one would say, and begins
with its embedding and first layers: this is how the draft model is made.
"""

import argparse
import itertools
import os
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer

from scripts.demo.generate import Chat
from scripts.demo.model import SHAPES, LlamaForCausalLM
from scripts.demo.packing import batches
from scripts.demo.render import Encoder
from scripts.demo.workers import Pool

ROW_TOKENS, LONG_ROW_TOKENS, BATCH_TOKENS = 512, 1024, 4096
LONG_ROWS_FROM = 0.85  # the last part of a run sees rows of the full context length
COPY_SHARE, COPY_UNTIL = 0.15, 0.4
DECAY_FROM = 0.6
WARM_UP_STEPS = 60
MATRIX_RATE, EMBEDDING_RATE, NORM_RATE = 3e-3, 1e-2, 2e-3
CHECKPOINT_EVERY_S = 180.0


def build_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers (it needs fewer tokens), AdamW for embedding and norms."""
    inner = [weight for name, weight in model.named_parameters() if weight.dim() == 2 and "embed" not in name]
    norms = [weight for weight in model.parameters() if weight.dim() == 1]
    muon = torch.optim.Muon(
        inner, lr=MATRIX_RATE, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(
        [
            {"params": [model.model.embed_tokens.weight], "lr": EMBEDDING_RATE},
            {"params": norms, "lr": NORM_RATE},
        ],
        betas=(0.9, 0.97),
        weight_decay=0.0,
        fused=True,
    )
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return [muon, adam]


def rate_factor(step: int, progress: float) -> float:
    """Share of the peak learning rate: warm-up by steps, decay by the clock."""
    decay = min(1.0, max(0.02, (1.0 - progress) / (1.0 - DECAY_FROM)))
    return min((step + 1) / WARM_UP_STEPS, decay)


class Run:
    """The state of a training run, which a checkpoint holds."""

    def __init__(
        self, shape_name: str, tokenizer_path: str, out: Path, seed: int, teacher: Path | None = None
    ):
        torch.manual_seed(seed)
        self.shape_name, self.tokenizer_path, self.out, self.seed = shape_name, tokenizer_path, out, seed
        self.model = LlamaForCausalLM(SHAPES[shape_name])
        self.teacher = Chat(teacher).model if teacher is not None else None
        if self.teacher is not None:
            self.model.begin_as(self.teacher)
        self.optimizers = build_optimizers(self.model)
        self.step = self.tokens = 0
        self.elapsed_s = 0.0

    def save(self) -> None:
        state = {
            "shape": self.shape_name,
            "model": self.model.state_dict(),
            "step": self.step,
            "tokens": self.tokens,
            "elapsed_s": self.elapsed_s,
            "optimizers": [o.state_dict() for o in self.optimizers],
        }
        torch.save(state, self.out / "checkpoint.new")
        os.replace(self.out / "checkpoint.new", self.out / "checkpoint.pt")

    def resume(self) -> None:
        state = torch.load(self.out / "checkpoint.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.tokens, self.elapsed_s = state["step"], state["tokens"], state["elapsed_s"]

    def update(self, pool: Pool, progress: float) -> float:
        """One optimizer step; returns the loss."""
        loss = pool.accumulate(
            ROW_TOKENS if progress < LONG_ROWS_FROM else LONG_ROW_TOKENS,
            COPY_SHARE if progress < COPY_UNTIL and self.teacher is None else 0.0,
        )
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate_factor(self.step, progress)
            optimizer.step()
        self.step += 1
        self.tokens += BATCH_TOKENS
        return loss

    @torch.no_grad()
    def held_out_loss(self, batch_count: int = 8) -> float:
        """Mean loss of a token the assistant says, on dialogues of the held-out split."""
        encoder = Encoder(Tokenizer.from_file(self.tokenizer_path))
        source = batches(encoder, 1, "held_out", ROW_TOKENS, BATCH_TOKENS // ROW_TOKENS)
        losses = [self.model.summed_loss(*batch) for batch in itertools.islice(source, batch_count)]
        return sum(loss.item() for loss, _ in losses) / sum(weight for _, weight in losses)

    def train(self, minutes: float, workers: int) -> None:
        """Train until the clock has run out; report, and save now and then."""
        seed = self.seed + self.step
        pool = Pool(self.model, self.tokenizer_path, seed, workers, BATCH_TOKENS, self.teacher)
        start, saved_at, smooth = time.monotonic() - self.elapsed_s, time.monotonic(), 0.0
        while (progress := self.elapsed_s / (60 * minutes)) < 1:
            loss = self.update(pool, progress)
            smooth = 0.95 * smooth + 0.05 * loss if smooth else loss
            self.elapsed_s = time.monotonic() - start
            if self.step % 25 == 0:
                print(
                    f"step {self.step} tokens {self.tokens} minutes {self.elapsed_s / 60:.1f} "
                    f"tok/s {self.tokens / self.elapsed_s:.0f} loss {smooth:.4f}",
                    flush=True,
                )
            if time.monotonic() - saved_at > CHECKPOINT_EVERY_S:
                self.save()
                saved_at = time.monotonic()
        pool.close()
        self.save()
        print(f"final held-out loss {self.held_out_loss():.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=tuple(SHAPES), default="demo")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--teacher", type=Path, help="exported model to learn from")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)  # what is left to this process is small, and threads would wait for each other
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args.shape, args.tokenizer, args.out, args.seed, args.teacher)
    if args.resume:
        run.resume()
    run.train(args.minutes, args.workers)


if __name__ == "__main__":
    main()
