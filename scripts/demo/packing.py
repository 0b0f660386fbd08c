"""Dialogues packed into rows of equal length."""

import itertools
from collections.abc import Iterator

import torch

from scripts.demo.dialogues import stream
from scripts.demo.render import Encoder, render


def packed_rows(
    encoder: Encoder, seed: int, split: str, row_tokens: int
) -> Iterator[tuple[list[int], list[bool]]]:
    """(ids, spoken) of row_tokens + 1 each; spoken marks what the assistant says.

    Documents are separated by `<|endoftext|>`. Every row begins with the beginning of a document, as
    every prompt does; what does not fit the row is dropped.
    """
    ids, spoken = [], []
    for made in stream(seed, split):
        new_ids, new_spoken = encoder(render(made.messages, made.tools))
        ids += [*new_ids, encoder.separator]
        spoken += [*new_spoken, False]
        if len(ids) > row_tokens:
            yield ids[: row_tokens + 1], spoken[: row_tokens + 1]
            ids, spoken = [], []


def batches(
    encoder: Encoder, seed: int, split: str, row_tokens: int, batch_rows: int, prompt_weight: float = 0.0
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(ids, targets, weights), each [batch_rows, row_tokens]; what is not spoken weighs `prompt_weight`."""
    rows = packed_rows(encoder, seed, split, row_tokens)
    while True:
        ids, spoken = (
            torch.tensor(column) for column in zip(*itertools.islice(rows, batch_rows), strict=True)
        )
        yield ids[:, :-1], ids[:, 1:], torch.where(spoken[:, 1:], 1.0, prompt_weight)


def copying_batches(
    vocab_size: int, seed: int, row_tokens: int, batch_rows: int, weight: float = 0.3
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Like `batches`, but random tokens repeated with a random period; the first period weighs nothing.

    Nothing but looking back can predict these rows, so heads that copy form early.
    """
    random = torch.Generator().manual_seed(seed)
    while True:
        period = int(torch.randint(5, 80, (), generator=random))
        once = torch.randint(7, vocab_size, (batch_rows, period), generator=random)
        ids = once.repeat(1, row_tokens // period + 2)[:, : row_tokens + 1]
        weights = torch.full((batch_rows, row_tokens), weight)
        weights[:, :period] = 0
        yield ids[:, :-1], ids[:, 1:], weights
