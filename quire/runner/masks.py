"""Masks: which tokens a request's grammar lets follow, computed in threads while the model computes."""

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
from quire.types import Admission, Failure

MAX_THREADS = 8  # and at most half of the cores: the model needs them too
T = TypeVar("T")
_STACK_BYTES = 16 << 20  # four times that with which grammars were tried out


class TokenMatcher(Protocol):
    """How far one sequence has come in a grammar; see quire.grammar.grammars, which loads llguidance."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take tokens that were allowed, and none that ended the output."""

    def allowed(self) -> tuple[NDArray[np.uint32], bool]:
        """A bit for each token that may follow, [ceil(V / 32)], and whether the output may end.

        Raises RequestError.
        """


class GrammarSource(Protocol):
    """The grammars of a model. Any number of threads may share it."""

    def start(self, grammar: str) -> TokenMatcher:
        """A grammar at its beginning."""


class GrammarState:
    """The place of a sequence in its grammar, and the tokens that may follow.

    A function of the admission and the emitted tokens alone: built again after a preemption, it is what it
    was.
    """

    __slots__ = ("allowed", "error", "grammar", "matcher", "num_taken")

    def __init__(self, admission: Admission) -> None:
        self.grammar = admission.grammar
        self.num_taken = admission.num_prompt_tokens  # tokens of the sequence that the matcher has seen
        self.matcher: TokenMatcher | None = None
        self.allowed: NDArray[np.uint32] | None = None  # a bit for each token, in the step under way
        self.error: Failure | None = None  # why the sequence cannot go on

    def compute(
        self, grammars: GrammarSource, token_ids: Sequence[int], end_token_ids: Sequence[int]
    ) -> None:
        """Go on to the end of the known tokens; set `allowed` for the one that follows."""
        if self.matcher is None:
            self.matcher = grammars.start(self.grammar)
        self.matcher.advance(token_ids[self.num_taken :])
        self.num_taken = len(token_ids)
        self.allowed, may_end = self.matcher.allowed()
        for token_id in end_token_ids if may_end else ():
            if token_id < 32 * len(self.allowed):  # a tokenizer may know one that the model cannot give
                self.allowed[token_id // 32] |= np.uint32(1 << token_id % 32)


ConstrainedRows = Sequence[
    tuple[GrammarState, Sequence[int], Sequence[int]]
]  # states, all tokens, end tokens


class Masks:
    """Computes the masks of a step in threads of its own.

    `load` is called with the first grammar, unless `prepare` was before.
    """

    def __init__(self, load: Callable[[], GrammarSource], num_threads: int | None = None) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._grammars: GrammarSource | None = None
        self._num_threads = num_threads or max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2))
        self._threads = ThreadPoolExecutor(self._num_threads, "masks")  # none starts before it has work

    def begin(self, constrained: ConstrainedRows) -> list[Future[None]]:
        """Compute the masks of these rows; all is to be waited for before sampling."""
        count = min(self._num_threads, len(constrained))
        return self._submit([partial(self._compute, constrained[i::count]) for i in range(count)])

    def prepare(self) -> None:
        """Load in the background what the first grammar would have to wait for."""
        self._submit([self._loaded])

    def _submit(self, calls: Sequence[Callable[[], T]]) -> list[Future[T]]:
        before = threading.stack_size(_STACK_BYTES)  # of threads that start now
        try:
            return [self._threads.submit(call) for call in calls]
        finally:
            threading.stack_size(before)

    def _compute(self, constrained: ConstrainedRows) -> None:
        for state, token_ids, end_token_ids in constrained:
            state.allowed = None
            try:
                state.compute(self._loaded(), token_ids, end_token_ids)
            except BaseException as error:  # a panic of the library is no Exception; it is this row's alone
                problem = str(error)[:500] or type(error).__name__
                by_request = isinstance(error, RequestError)
                state.error = Failure(f"the grammar cannot go on: {problem}", by_request)

    def _loaded(self) -> GrammarSource:
        with self._lock:
            if self._grammars is None:
                self._grammars = self._load()
            return self._grammars
