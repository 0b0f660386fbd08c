"""Gradients from several single-threaded processes that draw shares of a batch from one pot.

On a machine that others use too, threads that split every matrix product wait for the slowest core many
times a step. Here a core that gets less time does fewer shares, and all wait once, at the end of a step.
"""

import random

import torch
import torch.multiprocessing as mp
from tokenizers import Tokenizer

from scripts.demo.model import LlamaForCausalLM
from scripts.demo.packing import batches, copying_batches
from scripts.demo.render import Encoder

SHARE_TOKENS = 1024
PROMPT_WEIGHT = 0.05  # tool lists and schemas repeat names, which teaches copying


def work(
    rank: int,
    pool: "Pool",
    model: LlamaForCausalLM,
    tokenizer_path: str,
    seed: int,
    teacher: LlamaForCausalLM | None,
) -> None:
    """The life of one worker: shares while there are any, then hand over their summed gradient."""
    torch.set_num_threads(1)
    encoder = Encoder(Tokenizer.from_file(tokenizer_path))
    dialogues, copying = (
        {},
        copying_batches(model.shape.vocab_size, seed * 10 + rank, 512, SHARE_TOKENS // 512),
    )
    dice = random.Random(f"{seed}:{rank}")
    while True:
        pool.barrier.wait()
        row_tokens = pool.row_tokens.value
        if row_tokens == 0:
            return
        if row_tokens not in dialogues:
            dialogues[row_tokens] = batches(
                encoder,
                seed * 1000 + rank * 100 + row_tokens,
                "train",
                row_tokens,
                SHARE_TOKENS // row_tokens,
                PROMPT_WEIGHT,
            )
        model.zero_grad(set_to_none=False)
        pool.totals[rank].zero_()
        while pool.take():
            source = copying if dice.random() < pool.copy_share.value else dialogues[row_tokens]
            with torch.autocast("cpu", torch.bfloat16):
                ids, targets, weights = next(source)
                if teacher is None:
                    loss, weight = model.summed_loss(ids, targets, weights)
                else:
                    loss, weight = model.summed_divergence(ids, weights, teacher)
            loss.backward()
            pool.totals[rank] += torch.tensor([loss.item(), weight])
        for shared, parameter in zip(pool.gradients[rank], model.parameters(), strict=True):
            shared.copy_(parameter.grad) if parameter.grad is not None else shared.zero_()
        pool.barrier.wait()


class Pool:
    """The workers of a model whose parameters lie in shared memory."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        tokenizer_path: str,
        seed: int,
        workers: int,
        batch_tokens: int,
        teacher: LlamaForCausalLM | None = None,
    ):
        self.model, self.batch_tokens = model.share_memory(), batch_tokens
        context = mp.get_context("spawn")
        self.left, self.row_tokens = context.Value("i", 0), context.Value("i", 0)
        self.copy_share = context.Value("d", 0.0)  # share of the batch that is random tokens to copy
        self.barrier = context.Barrier(workers + 1)
        self.totals = torch.zeros(workers, 2, dtype=torch.float64).share_memory_()
        self.gradients = [
            [torch.zeros_like(p).share_memory_() for p in model.parameters()] for _ in range(workers)
        ]
        processes = [
            context.Process(target=work, args=(rank, self, model, tokenizer_path, seed, teacher), daemon=True)
            for rank in range(workers)
        ]
        for process in processes:
            process.start()
        self.processes = processes

    def take(self) -> bool:
        """One of the shares of this step, if any is left."""
        with self.left.get_lock():
            self.left.value -= 1
            return self.left.value >= 0

    def accumulate(self, row_tokens: int, copy_share: float) -> float:
        """Set the gradients of one batch of rows on the model; returns the mean loss."""
        self.left.value, self.row_tokens.value = self.batch_tokens // SHARE_TOKENS, row_tokens
        self.copy_share.value = copy_share
        self.barrier.wait()
        self.barrier.wait()
        loss, weight = self.totals.sum(0).tolist()
        for i, parameter in enumerate(self.model.parameters()):
            parameter.grad = sum(gradients[i] for gradients in self.gradients) / weight
        return loss / weight

    def close(self) -> None:
        self.row_tokens.value = 0
        self.barrier.wait()
        for process in self.processes:
            process.join()
