"""The purpose of a model that gives vectors in place of text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.errors import RequestError
from quire.types import DenseModule

Method = Literal["mean", "cls", "last"]


@dataclass(frozen=True, slots=True)
class Pooling:
    """The vectors that a model gives in place of text: embeddings, or scores of pairs of texts.

    `method` makes one vector of a text's hidden states, the layers `dense` change it, `normalized` scales it
    to length 1. The score of a decoder is that of the second of the tokens `answers` against the first, at
    the last position; `sigmoid` is applied to it. With a `head`, the answers are rows of this matrix, which
    has no others, in place of tokens.
    `separator` is the token after which the second segment of a pair begins, -1 if segments do not matter.
    """

    task: Literal["embed", "score"]
    method: Method = "last"
    normalized: bool = False
    dense: tuple[DenseModule, ...] = ()
    answers: tuple[int, int] | None = None
    head: str | None = None
    separator: int = -1
    sigmoid: bool = True


def check_task(own: Pooling | None, pooling: str) -> None:
    """Raise RequestError if a request asks for something else than a model gives: vectors, or text (None)."""
    if pooling and own is None:
        raise no_vectors()
    if own is not None and not pooling:
        what, where = "embeddings", "/v1/embeddings or LLM.embed"
        if own.task == "score":
            what, where = "scores", "/rerank, /score or LLM.score"
        raise RequestError(f"this model gives {what} of texts: it generates none", f"use {where}", "model")


def no_vectors() -> RequestError:
    """Return the error for a request that asks a model for vectors, which generates text."""
    hint = "start the model with task = 'embed' if vectors of its last hidden states are wanted"
    return RequestError("this model generates text: it gives no embeddings and no scores", hint, "model")
