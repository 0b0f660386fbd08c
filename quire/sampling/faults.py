"""The reasons no token can be sampled from a row of logits."""

from __future__ import annotations

from quire.errors import QuireError
from quire.types import Failure

ONLY_MINUS_INF = Failure("the model gave only -inf for the next token")
NAN = Failure("the model gave NaN for the next token")
INFINITE = Failure("the model gave infinity for the next token")
EXCLUDED = Failure(
    "no token may follow: structured_outputs, allowed_token_ids, min_tokens and bad_words exclude every one",
    by_request=True,
)
TOO_LARGE = Failure(
    "no token may follow: repetition_penalty makes a logit too large for a number", by_request=True
)
FAULTS = (None, ONLY_MINUS_INF, NAN, INFINITE, EXCLUDED, TOO_LARGE)  # numbered as in csrc/kernels/sampling.h


class LogitsError(QuireError):
    """Logits of one row from which no token can be sampled; only that request fails."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure
