"""Grammars of one model in the engine: compiled once, copied for each sequence, consulted for each token."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from quire.errors import RequestError
from quire.grammar.forced_runs import forced_run
from quire.grammar.matcher import fault, make_matcher, make_vocabulary
from quire.types import Draft

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer  # which is above: tools are described by grammars

MAX_GRAMMARS, MAX_CHARACTERS = 256, 2 << 20  # compiled and kept


class Matcher:
    """The position of one sequence in a grammar."""

    def __init__(
        self, inner: LLMatcher, vocabulary: LLTokenizer, vocab_size: int, output: Sequence[int] = ()
    ) -> None:
        self._inner = inner
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._output = list(output)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Advance by tokens that were allowed, other than one that ends the output."""
        self._inner.consume_tokens(list(token_ids))
        self._output += token_ids

    def allowed(self) -> tuple[NDArray[np.uint32], bool]:
        """Return a bit mask of the tokens that may follow, [ceil(V / 32)], and True if the output may end.

        The lowest bit of a word is the first of its 32 tokens; bits beyond the vocabulary are 0. Raises
        RequestError if the grammar itself is the reason that none may follow.
        """
        bits = np.zeros(self._vocab_size // 32 + 1, np.uint32)
        self._inner.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if (error := fault(self._inner)) is not None:
            raise RequestError(error, None, "structured_outputs")
        word, bit = divmod(self._vocab_size, 32)  # the end of the output is the token after the last
        may_end = bool(bits[word] >> bit & 1)
        bits[word] &= (1 << bit) - 1
        return bits[: -(-self._vocab_size // 32)], may_end

    def draft(self) -> Draft:
        """Return the tokens that are forced, as far as that can be told; see `forced_runs`."""
        return forced_run(self._inner, self._vocabulary, self._output)

    def copy(self) -> Matcher:
        """Return a matcher in the same state, in about a microsecond and 20 ns for each token taken."""
        return Matcher(self._inner.deep_copy(), self._vocabulary, self._vocab_size, self._output)


class Grammars:
    """Compiled grammars of a model with `vocab_size` rows; those without a token are never allowed.

    Building it takes about a second for 100,000 tokens. Any number of threads may share it.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._vocabulary = _vocabulary(tokenizer, vocab_size)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._num_characters = 0

    def start(self, grammar: str) -> Matcher:
        """Return a matcher at the beginning of a grammar; if that does not compile, `allowed` raises."""
        with self._lock:
            return Matcher(self._look_up(grammar).deep_copy(), self._vocabulary, self._vocab_size)

    def _look_up(self, grammar: str) -> LLMatcher:
        if grammar in self._compiled:
            self._compiled.move_to_end(grammar)
            return self._compiled[grammar]
        matcher = self._compiled[grammar] = make_matcher(self._vocabulary, grammar)
        matcher.compute_bitmask()  # here, so that its copies share the states of its lexer
        self._num_characters += len(grammar)
        while len(self._compiled) > MAX_GRAMMARS or self._num_characters > MAX_CHARACTERS:
            self._num_characters -= len(self._compiled.popitem(last=False)[0])
        return matcher


def _vocabulary(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
    special = {i: name for i, name in tokenizer.control_tokens.items() if i < vocab_size}
    anchor = tokenizer.encode("\n", add_special_tokens=False)

    def encode(text: str) -> list[int]:
        # After a line break, as some tokenizers put a space at the beginning of a text.
        ids = tokenizer.encode("\n" + text, add_special_tokens=False)
        known = ids[: len(anchor)] == anchor and max(ids) < vocab_size
        ids = ids[len(anchor) :] if known else []
        exact = b"".join(tokens[token_id] for token_id in ids) == text.encode()
        return ids if exact else vocabulary.greedy_tokenize(text)

    vocabulary = make_vocabulary(tokens, special, encode)
    return vocabulary
