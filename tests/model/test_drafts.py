"""Rows that verify drafts: the same tokens and bits as without, however good the drafts are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from driver import DrivenSequence, Driver
from tiny import VOCAB, random_weights, tiny

from quire.backends.null import NullBackend
from quire.backends.reference import ReferenceBackend
from quire.program import Program
from quire.sampling_params import SamplingParams

PROMPT = [5, 9, 5, 1, 30, 2, 9]
LENGTH = 60
ANY = SamplingParams(seed=4, logprobs=-1, max_tokens=99)
PARAMS = {
    "greedy": replace(ANY, temperature=0),
    "drawn": replace(ANY, temperature=1.5, top_p=0.95),
    "penalized": replace(ANY, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    "constrained": replace(ANY, min_tokens=20, stop_token_ids=[3], bad_words_token_ids=[[4, 7], [9]]),
}


def drive(program: Program) -> Driver:
    groups = len(program.cache_groups)
    return Driver(
        program, ReferenceBackend(program, random_weights(program), num_blocks=[64] * groups, block_size=16)
    )


def alone(program: Program, params: SamplingParams) -> DrivenSequence:
    driver = drive(program)
    sequence = driver.admit(0, PROMPT, params)
    driver.step((sequence, len(PROMPT)))
    while len(sequence.tokens) < LENGTH + 8:
        driver.step((sequence, 1))
    return sequence


def drafts(tokens: list[int], kind: str) -> Iterator[tuple[int, ...]]:
    """For each length of a sequence what a drafter of some kind proposes."""
    rng = np.random.default_rng(0)
    for at in range(len(tokens)):
        right = tokens[at : at + int(rng.integers(0, 6))]
        wrong = [(token + 1) % VOCAB for token in right]
        mixed = [token if rng.random() < 0.7 else (token + 1) % VOCAB for token in right]
        yield tuple({"right": right, "wrong": wrong, "mixed": mixed}[kind])


@pytest.mark.parametrize("kind", ["right", "wrong", "mixed"])
@pytest.mark.parametrize("name", PARAMS)
def test_same_tokens_and_bits_with_drafts(name: str, kind: str) -> None:
    program = tiny("gemma3").program
    expected = alone(program, PARAMS[name])
    proposed = list(drafts(expected.tokens, kind))
    driver = drive(program)
    sequence = driver.admit(0, PROMPT, PARAMS[name])
    other = driver.admit(1, PROMPT[:3], PARAMS["drawn"])
    driver.step((sequence, len(PROMPT)), (other, 3))
    rows = 1
    while len(sequence.tokens) < LENGTH:
        driver.step((other, 1), (sequence, 1, proposed[len(sequence.tokens)]))
        rows += 1
    count = len(sequence.tokens)
    assert sequence.tokens == expected.tokens[:count]
    found = [entry for result in sequence.results for entry in result.logprobs]
    assert found == [entry for result in expected.results for entry in result.logprobs][: len(found)]
    assert {"right": rows < 30, "wrong": rows == LENGTH - len(PROMPT), "mixed": rows < 45}[kind]


def test_a_prompt_may_end_in_drafts() -> None:
    program = tiny("llama").program
    expected = alone(program, PARAMS["greedy"])
    driver = drive(program)
    sequence = driver.admit(0, PROMPT, PARAMS["greedy"])
    driver.step((sequence, 4))
    driver.step((sequence, len(PROMPT) - 4, tuple(expected.tokens[len(PROMPT) :][:3])))
    assert sequence.tokens == expected.tokens[: len(PROMPT) + 4]
    assert sequence.computed == len(PROMPT) + 3


def test_an_error_behind_an_accepted_draft_is_met_by_the_next_row() -> None:
    """What was accepted counts; the position that failed is computed again, and fails alone."""
    program = tiny("llama").program
    greedy = alone(program, PARAMS["greedy"]).tokens
    wanted = greedy[len(PROMPT) : len(PROMPT) + 2]
    assert wanted[0] != wanted[1]
    never = [[wanted[0], wanted[0]]]
    params = replace(PARAMS["greedy"], allowed_token_ids=[wanted[0]], bad_words_token_ids=never)
    driver = drive(program)
    sequence = driver.admit(0, PROMPT, params)
    driver.step((sequence, len(PROMPT), (wanted[0], wanted[0])))
    assert (sequence.results[-1].token_ids, sequence.results[-1].error) == ((wanted[0],), None)
    driver.step((sequence, 1))
    error = sequence.results[-1].error
    assert error is not None
    assert error.by_request


def test_the_null_backend_verifies_as_well() -> None:
    """Its greedy token is always 0."""
    program = tiny("llama").program
    driver = Driver(program, NullBackend(program, lambda spec: 4 * spec.size, 4, 16))
    sequence = driver.admit(0, PROMPT, PARAMS["greedy"])
    driver.step((sequence, len(PROMPT), (0, 0, 5, 0)))
    assert sequence.tokens == [*PROMPT, 0, 0, 0]
