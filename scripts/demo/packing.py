"""Dialogues packed into rows of equal length."""

import itertools
from collections.abc import Iterator

import torch

from scripts.demo.dialogues import stream
from scripts.demo.render import Encoder, render


def packed_rows(encoder: Encoder, seed: int, split: str, row_tokens: int) -> Iterator[tuple[list[int], list[int]]]:
    """(ids, targets) of row_tokens each; a target of -1 is not learnt.

    Documents are separated by `<|endoftext|>`. Every row begins with the beginning of a document, as every prompt
    does; what does not fit the row is dropped.
    """
    ids, spoken = [], []
    for made in stream(seed, split):
        new_ids, new_spoken = encoder(render(made.messages, made.tools))
        ids += [*new_ids, encoder.separator]
        spoken += [*new_spoken, False]
        if len(ids) > row_tokens:
            targets = [token if said else -1 for token, said in zip(ids[1:], spoken[1:])]
            yield ids[:row_tokens], targets[:row_tokens]
            ids, spoken = [], []


def batches(encoder: Encoder, seed: int, split: str, row_tokens: int,
            batch_rows: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(ids, targets) as tensors [batch_rows, row_tokens]."""
    rows = packed_rows(encoder, seed, split, row_tokens)
    while True:
        ids, targets = zip(*itertools.islice(rows, batch_rows))
        yield torch.tensor(ids), torch.tensor(targets)
