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
from quire.grammar.matcher import fault, make_matcher, make_vocabulary

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer  # which is above: tools are described by grammars

MAX_GRAMMARS, MAX_CHARACTERS = 256, 2 << 20  # compiled and kept


class Matcher:
    """How far one sequence has come in a grammar."""

    def __init__(self, inner: LLMatcher, vocab_size: int) -> None:
        self._inner = inner
        self._vocab_size = vocab_size

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take tokens that were allowed, and none that ended the output."""
        self._inner.consume_tokens(list(token_ids))

    def allowed(self) -> tuple[NDArray[np.uint32], bool]:
        """A bit for each token that may follow, [ceil(V / 32)], and whether the output may end.

        The lowest bit of a word stands for the first of its 32 tokens; bits beyond the vocabulary are 0.
        Raises RequestError where the grammar itself is why none may follow.
        """
        bits = np.zeros(self._vocab_size // 32 + 1, np.uint32)
        self._inner.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if (error := fault(self._inner)) is not None:
            raise RequestError(error, None, "structured_outputs")
        word, bit = divmod(self._vocab_size, 32)  # the end of the output is the token behind the last
        may_end = bool(bits[word] >> bit & 1)
        bits[word] &= (1 << bit) - 1
        return bits[: -(-self._vocab_size // 32)], may_end


class Grammars:
    """Compiles grammars for a model with `vocab_size` rows; those that the tokenizer lacks never follow.

    Making it takes a second or so for 100,000 tokens. Any number of threads may share it.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._vocabulary = _vocabulary(tokenizer, vocab_size)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._num_characters = 0

    def start(self, grammar: str) -> Matcher:
        """A grammar at its beginning. One that does not compile fails when it is asked what is allowed."""
        with self._lock:
            return Matcher(self._look_up(grammar).deep_copy(), self._vocab_size)

    def _look_up(self, grammar: str) -> LLMatcher:
        if grammar in self._compiled:
            self._compiled.move_to_end(grammar)
            return self._compiled[grammar]
        matcher = self._compiled[grammar] = make_matcher(self._vocabulary, grammar)
        matcher.compute_bitmask()  # here, as its copies then know already what it has learnt
        self._num_characters += len(grammar)
        while len(self._compiled) > MAX_GRAMMARS or self._num_characters > MAX_CHARACTERS:
            self._num_characters -= len(self._compiled.popitem(last=False)[0])
        return matcher


def _vocabulary(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
    special = {i: name for i, name in tokenizer.control_tokens.items() if i < vocab_size}
    anchor = tokenizer.encode("\n", add_special_tokens=False)

    def encode(text: str) -> list[int]:
        # Behind a line break, for some tokenizers put a space before what begins a text.
        ids = tokenizer.encode("\n" + text, add_special_tokens=False)
        known = ids[: len(anchor)] == anchor and max(ids) < vocab_size
        ids = ids[len(anchor) :] if known else []
        exact = b"".join(tokens[token_id] for token_id in ids) == text.encode()
        return ids if exact else vocabulary.greedy_tokenize(text)

    vocabulary = make_vocabulary(tokens, special, encode)
    return vocabulary
