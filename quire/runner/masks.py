"""Masks of the tokens a grammar allows next, computed in threads while the model computes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.errors import RequestError
from quire.types import Admission, Draft, Failure

MAX_THREADS = 8  # and at most half of the cores: the model needs them too
T = TypeVar("T")
_STACK_BYTES = 16 << 20  # four times the stack of the process that tests grammars first


class TokenMatcher(Protocol):
    """The state of one sequence in a grammar; quire.grammar.grammars implements it with llguidance."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """Advance by tokens that were allowed and did not end the output."""

    def allowed(self) -> tuple[NDArray[np.uint32], bool]:
        """Return a bit for each allowed token, [ceil(V / 32)], and True if the output may end.

        Raises RequestError.
        """

    def draft(self) -> Draft:
        """Return the next tokens as far as the grammar forces them, with source "grammar"; maybe none."""

    def copy(self) -> TokenMatcher:
        """Return a matcher in the same state."""


class GrammarSource(Protocol):
    """The grammars of a model. Thread-safe."""

    def start(self, grammar: str) -> TokenMatcher:
        """Return a matcher at the beginning of a grammar."""


class GrammarState:
    """The state of a sequence in its grammar, and the tokens allowed at the sampled positions of its row.

    A pure function of the admission and the known tokens: it is rebuilt identically after a preemption.
    Drafted tokens are followed in a copy.
    """

    __slots__ = ("admission", "error", "masks", "matcher", "num_taken")

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.num_taken = admission.num_prompt_tokens  # tokens of the sequence already passed to the matcher
        self.matcher: TokenMatcher | None = None
        self.masks: list[NDArray[np.uint32]] = []  # with a bit for each token, in the current step
        self.error: Failure | None = None  # why there are no masks

    def compute(self, grammars: GrammarSource, token_ids: Sequence[int], drafted: Sequence[int]) -> None:
        """Advance to the end of the known tokens; make `masks` for the next token and after drafted ones.

        There are none behind a drafted token that may not follow or that ends the output. If this raises an
        error when it has made some, the error recurs for the first token after those.
        """
        self.masks = []
        if self.matcher is None:
            self.matcher = grammars.start(self.admission.grammar)
        self._advance(self.matcher, token_ids)
        matcher = self.matcher
        for token_id in (*drafted, None):
            allowed, may_end = matcher.allowed()
            self.masks.append(self._with_ends(allowed) if may_end else allowed)
            if token_id is None or not allowed[token_id // 32] >> token_id % 32 & 1:
                return
            if matcher is self.matcher:
                matcher = matcher.copy()
            matcher.advance([token_id])

    def draft(self, token_ids: Sequence[int]) -> Draft | None:
        """Advance to the end of the known tokens; return the draft of those that the grammar forces, if any.

        An error recurs in `compute`.
        """
        if self.matcher is None or token_ids[-1] in self.admission.eos_token_ids:
            return None
        try:
            self._advance(self.matcher, token_ids)
            draft = self.matcher.draft()
        except Exception:
            return None
        return draft if draft.token_ids else None

    def _advance(self, matcher: TokenMatcher, token_ids: Sequence[int]) -> None:
        matcher.advance(token_ids[self.num_taken :])
        self.num_taken = len(token_ids)

    def _with_ends(self, allowed: NDArray[np.uint32]) -> NDArray[np.uint32]:
        mask = allowed.copy()
        for token_id in self.admission.eos_token_ids:
            if token_id < 32 * len(mask):  # the tokenizer may have one that the model cannot produce
                mask[token_id // 32] |= np.uint32(1 << token_id % 32)
        return mask


# Of each row its state, all known tokens of its sequence, and drafted ones.
ConstrainedRows = Sequence[tuple[GrammarState, Sequence[int], Sequence[int]]]


class Masks:
    """Computes the masks of a step in its own threads.

    `load` is called for the first grammar, or by `prepare`.
    """

    def __init__(self, load: Callable[[], GrammarSource], num_threads: int | None = None) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._grammars: GrammarSource | None = None
        self._num_threads = num_threads or max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2))
        self._threads = ThreadPoolExecutor(self._num_threads, "masks")  # starts no thread before it has work

    def begin(self, constrained: ConstrainedRows) -> list[Future[None]]:
        """Start computing the masks of these rows; all futures must be awaited before sampling."""
        count = min(self._num_threads, len(constrained))
        return self._submit([partial(self._compute, constrained[i::count]) for i in range(count)])

    def prepare(self) -> None:
        """Load the grammars in the background, so that the first grammar need not wait."""
        self._submit([self._loaded])

    def _submit(self, calls: Sequence[Callable[[], T]]) -> list[Future[T]]:
        before = threading.stack_size(_STACK_BYTES)  # for threads started now
        try:
            return [self._threads.submit(call) for call in calls]
        finally:
            threading.stack_size(before)

    def _compute(self, constrained: ConstrainedRows) -> None:
        for state, token_ids, drafted in constrained:
            try:
                state.compute(self._loaded(), token_ids, drafted)
            except BaseException as error:  # a panic of the library is not an Exception; only this row fails
                problem = str(error)[:500] or type(error).__name__
                by_request = isinstance(error, RequestError)
                state.error = Failure(f"the grammar failed: {problem}", by_request)

    def _loaded(self) -> GrammarSource:
        with self._lock:
            if self._grammars is None:
                self._grammars = self._load()
            return self._grammars
