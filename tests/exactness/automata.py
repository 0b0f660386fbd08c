"""Grammars of tokens for tiny models: random automata, some of whose states leave no choice."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import numpy as np

from quire.program.caches import MAX_DRAFTED
from quire.types import Draft

NUM_STATES = 12


@cache
def automaton(name: str, vocab_size: int) -> tuple[tuple[tuple[int, ...], bool], ...]:
    """Return the states: for each the tokens that may follow, and True if the output may end there.

    Half of the states leave no choice, and the first ones cannot end. A token leads to state
    (7 * state + token) % NUM_STATES.
    """
    dice, states = random.Random(name), []
    for number in range(NUM_STATES):
        count = 1 if dice.random() < 0.5 else dice.randint(2, vocab_size // 2)
        states.append((tuple(dice.sample(range(3, vocab_size), count)), number > 1 and dice.random() < 0.2))
    return tuple(states)


class Walk:
    """The position of a sequence in an automaton."""

    def __init__(self, name: str, vocab_size: int) -> None:
        self._states, self._vocab = automaton(name, vocab_size), vocab_size
        self._state = 0

    def advance(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            assert token_id in self._states[self._state][0], "a token that was not allowed"
            self._state = (7 * self._state + token_id) % NUM_STATES

    def allowed(self) -> tuple[np.ndarray, bool]:
        token_ids, may_end = self._states[self._state]
        bits = np.zeros(-(-self._vocab // 32), np.uint32)
        for token_id in token_ids:
            bits[token_id // 32] |= np.uint32(1 << token_id % 32)
        return bits, may_end

    def draft(self) -> Draft:
        ahead, found = self.copy(), list[int]()
        while len(found) < MAX_DRAFTED and len((choice := ahead._states[ahead._state])[0]) == 1:
            if choice[1]:
                break
            found += choice[0]
            ahead.advance(choice[0])
        return Draft(tuple(found), "grammar")

    def copy(self) -> Walk:
        other = Walk.__new__(Walk)
        other._states, other._vocab, other._state = self._states, self._vocab, self._state
        return other


class Automata:
    """All of them; a grammar is a name."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab = vocab_size

    def start(self, grammar: str) -> Walk:
        return Walk(grammar, self._vocab)
