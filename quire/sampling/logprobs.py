"""Log-probabilities of the model's own distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.sampling.faults import INFINITE, NAN, ONLY_MINUS_INF, LogitsError
from quire.sampling.kernels import Logits, exp_sum, rank, ranking
from quire.types import PositionLogprobs, TokenLogprob


def greatest(logits: Logits) -> tuple[int, float]:
    """Return the first token id of the ranking and its logit. Raises LogitsError if there is none."""
    token_id = int(logits.argmax())  # that of a NaN if there is one, else of +inf if there is one
    maximum = float(logits[token_id])
    if not math.isfinite(maximum):
        raise LogitsError(
            ONLY_MINUS_INF if maximum == -math.inf else NAN if math.isnan(maximum) else INFINITE
        )
    return token_id, maximum


def _logprobs(logits: Logits, maximum: float, log_sum: float) -> NDArray[np.float32]:
    """Return natural logarithms of probabilities, rounded once to float32."""
    with np.errstate(over="ignore"):  # logits further apart than the range of float32: -inf
        return (logits.astype(np.float64) - maximum - log_sum).astype(np.float32)


def position_logprobs(logits: Logits, token_id: int, k: int) -> PositionLogprobs:
    """Return the chosen token, then the k most likely ones (all if k is -1), of raw logits.  # [V]

    If the chosen token is among the k, it appears there with the identical float and rank.
    Raises LogitsError.
    """
    _, maximum = greatest(logits)
    log_sum = math.log(exp_sum(logits, maximum))
    ids: list[int] = ranking(logits, len(logits) if k == -1 else k).tolist() if k else []
    logprobs = _logprobs(logits[[token_id, *ids]], maximum, log_sum).tolist()
    ranks = [rank(logits, token_id), *range(1, len(ids) + 1)]
    return tuple(map(TokenLogprob, [token_id, *ids], logprobs, ranks))


def prompt_logprobs(logits: Logits, next_token_ids: Sequence[int], k: int) -> tuple[PositionLogprobs, ...]:
    """Return `position_logprobs` of the next token, for each row of a chunk of the prompt.  # [P, V], [P]

    Each row uses the code for sampled tokens, so a position has the same bits either way.
    Raises LogitsError.
    """
    rows = zip(logits, next_token_ids, strict=True)
    return tuple(position_logprobs(row, token_id, k) for row, token_id in rows)
