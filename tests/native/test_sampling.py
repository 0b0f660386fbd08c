"""Native sampling of single rows against the definition in NumPy, on every instruction set."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from sampled import Case, admit, assert_same, expected, run

from quire.backends.native import _core
from quire.backends.native.sampling import row_results
from quire.sampling.kernels import boltzmann, draw
from quire.sampling.logprobs import position_logprobs
from quire.sampling.philox import uniform
from quire.sampling_params import SamplingParams

SIZES = [1, 2, 3, 15, 16, 17, 33, 100, 1000, 1023, 1024, 1025, 4097, 20_000]


class At(NamedTuple):
    """Where a random number comes from."""

    sequence: int
    position: int
    seed: int = 12345

    @property
    def u(self) -> float:
        return uniform(self.seed, self.sequence, self.position)


GREATEST_U = 1 - 2.0**-53
LEAST, GREATEST = At(1342171077, 3135185464763348057), At(3108484551, 777056715511946725)  # of all numbers


def test_the_ends_of_random_numbers() -> None:
    assert (LEAST.u, GREATEST.u) == (0, GREATEST_U)


@pytest.fixture(params=_core.isas())
def isa(request: pytest.FixtureRequest) -> str:
    return request.param


def float64_rows(size: int, seed: int) -> Iterator[np.ndarray]:
    """Rows of all characters."""
    rng = np.random.default_rng([seed, size])
    normal = rng.normal(size=size)
    yield normal * 3
    yield normal
    yield normal * 1e-3 + 5  # nearly flat
    yield np.round(normal * 2)  # ties everywhere
    yield np.zeros(size)
    yield np.where(rng.random(size) < 0.5, -0.0, 0.0)  # one number, two sets of bits
    yield np.minimum(normal * 2, 1.5)  # ties at the top
    yield normal * 1e37
    yield np.where(np.arange(size) == rng.integers(size), 60, normal)
    yield np.where(np.arange(size) == rng.integers(size), -3e38, -np.inf)
    half = np.where(rng.random(size) < 0.5, -np.inf, normal)
    half[rng.integers(size)] = 1
    yield half


def rows(size: int, seed: int = 0) -> list[np.ndarray]:
    return [row.astype(np.float32) for row in float64_rows(size, seed)]


def case(logits: np.ndarray, at: At, **values: Any) -> Case:
    params = SamplingParams(seed=at.seed, **values)
    return Case(params, (), (), logits[None], at.sequence, length=at.position)


def tokens(isa: str, logits: np.ndarray, cases: Sequence[Case]) -> list[int]:
    """What cases that share a row of logits give."""
    sampler = _core.Sampler(isa, len(logits), len(cases), 2)
    for slot, one in enumerate(cases):
        admit(sampler, one.admission(slot), ())
    asked = [(slot, 0, (), 0, (), None) for slot in range(len(cases))]
    return sampler.sample(logits[None], asked).token_ids


def wanted(cases: Sequence[Case]) -> list[int]:
    return [token_id for one in cases for token_id in expected(one).token_ids]


# Ranking and log-probabilities


def listing(logits: np.ndarray, following: list[int], k: int) -> Case:
    """A greedy row with the k most likely tokens, which also scores these tokens in the same logits."""
    params = SamplingParams(seed=0, temperature=0)
    object.__setattr__(params, "logprobs", k)
    object.__setattr__(params, "prompt_logprobs", k)
    return Case(params, [0], (), np.stack([logits] * (len(following) + 1)), following=following)


@cache
def listings(size: int) -> list[tuple[Case, Any]]:
    rng, cases = np.random.default_rng(size), []
    for logits in rows(size):
        some = sorted({0, size - 1, int(logits.argmax()), int(rng.integers(size))})
        cases += [listing(logits, some, k) for k in (1, 2, 20, 64)]
    return [(one, expected(one)) for one in cases]


@pytest.mark.parametrize("size", SIZES)
def test_ranking(isa: str, size: int) -> None:
    """The greatest, every rank, and the first of the ranking, with their log-probabilities."""
    results = run(_core.Sampler(isa, size, 44, 2), [one for one, _ in listings(size)])
    for got, (_, result) in zip(results, listings(size), strict=True):
        assert_same(got, result)


@pytest.mark.parametrize("size", SIZES)
def test_faults_are_found_as_in_the_definition(isa: str, size: int) -> None:
    cases, at = [], At(0, 1)
    for place in {0, size // 2, size - 1}:
        for bad, last in itertools.product((np.nan, -np.nan, np.inf), (np.nan, np.inf, 0)):
            logits = rows(size)[0]
            logits[-1] = last
            logits[place] = bad
            cases += [case(logits, at, top_k=2, top_p=0.9, min_p=0.1), listing(logits, [0], 5)]
            cases.append(case(logits, at, temperature=0, allowed_token_ids=[0]))
    nothing = np.full(size, -np.inf, np.float32)
    cases += [case(nothing, at), listing(nothing, [0], 5)]
    results = run(_core.Sampler(isa, size, len(cases), 2), cases)
    assert list(results) == [expected(one) for one in cases]
    assert all(result.error for result in results)


def log_sum(row: np.ndarray) -> float:
    """The logarithm of the sum of exp(x), summed exactly, of a row whose greatest logit is 40."""
    return 40 + math.log(math.fsum(math.exp(float(x) - 40) for x in row))


def probes(logits: np.ndarray) -> tuple[np.ndarray, list[int], list[float]]:
    """A row with two tokens more, whose log-probabilities lie by 2e-14 on either side of a float's border.

    They weigh too little to change the sum of the row. Another token brings the sum to where they can be
    close to 0, and so finely placed. Also their ids, and what they round to.
    """
    row = (logits - logits.max()).astype(np.float32) + np.float32(40)
    above = np.float32(-log_sum(row))
    below = np.nextafter(above, np.float32(-np.inf))
    border = (float(below) + float(above)) / 2
    missing = math.expm1(-border - log_sum(row)) * math.fsum(math.exp(float(x) - 40) for x in row)
    row = np.append(row, np.float32(40 + math.log(missing)))
    distance = border + log_sum(row)
    assert abs(distance) < 1e-10
    found = np.array([distance + 2e-14, distance - 2e-14], np.float32)
    ids = [len(row), len(row) + 1]
    return np.append(row, found), ids, [float(above), float(below)]


def test_sums_are_exact(isa: str) -> None:
    """Against exact summation, so that twins cannot be wrong together: to parts of 2e-14."""
    for size, seed in itertools.product((5, 1000, 5000), range(4)):
        for logits in [row for row in rows(size, seed) if abs(row[row > -np.inf]).max() < 100]:
            row, ids, rounded = probes(logits)
            (got,) = run(_core.Sampler(isa, len(row), 1, 1), [listing(row, ids, 0)])
            assert [entry.logprob for (entry,) in got.prompt_logprobs] == rounded
            assert [position_logprobs(row, i, 0)[0].logprob for i in ids] == rounded


# Drawing

FILTERS = [
    *itertools.product((0, 1, 5, 333, 20_000), (1e-9, 0.3, 0.95, 1 - 1e-12, 1.0), (0.0, 0.05, 1.0)),
    (-1, 1.0, 0.0),
    (2**31 - 1, 0.5, 1e-320),
]
TEMPERATURES = [0.8, 2.0, 1e-9, 1e-30, 5e-324]


@cache
def drawn(size: int) -> list[tuple[list[Case], list[int]]]:
    """For each row of logits, what is asked of it and what it gives."""
    rng, found = np.random.default_rng(size), []
    for logits in rows(size):
        cases = []
        for top_k, top_p, min_p in rng.permutation(FILTERS)[: len(FILTERS) if size < 1000 else 25].tolist():
            how = {"top_k": int(top_k), "top_p": top_p, "min_p": min_p}
            how["temperature"] = float(rng.choice(TEMPERATURES))
            middle = At(0, int(rng.integers(1, 2**31)))
            cases += [case(logits, at, **how) for at in (LEAST, middle, GREATEST)]
        found.append((cases, wanted(cases)))
    return found


@pytest.mark.parametrize("size", SIZES)
def test_a_draw_is_that_of_the_definition(isa: str, size: int) -> None:
    for cases, result in drawn(size):
        assert tokens(isa, cases[0].logits[0], cases) == result


@cache
def edges(top_k: int, top_p: float, min_p: float) -> list[tuple[list[Case], list[int]]]:
    """Pairs of temperatures a part of 1e-9 apart, between which the definition changes its token.

    A random number cannot be chosen; where it points to moves with the temperature as finely as is wanted.
    """
    logits, how = rows(1025)[0], {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    maximum, found = float(logits.max()), []
    for position in range(1, 60):
        at = At(0, position)

        def token(temperature: float, at: At = at) -> int:
            return draw(logits, maximum, temperature, top_k, top_p, min_p, at.u)

        low, high, first = 0.85, 0.95, token(0.85)
        if token(high) == first:
            continue
        while high - low > 1e-9:
            middle = (low + high) / 2
            low, high = (middle, high) if token(middle) == first else (low, middle)
        cases = [case(logits, at, temperature=temperature, **how) for temperature in (low, high)]
        found.append((cases, [token(low), token(high)]))
    return found


@pytest.mark.parametrize("how", [(0, 1.0, 0.0), (40, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.005)])
def test_edges_between_tokens(isa: str, how: tuple[int, float, float]) -> None:
    found = edges(*how)
    assert len({token_id for _, pair in found for token_id in pair}) > 10
    for cases, pair in found:
        assert pair[0] != pair[1]
        assert tokens(isa, cases[0].logits[0], cases) == pair


@cache
def nuclei() -> list[tuple[list[Case], list[int]]]:
    """Top-p by a part of 1e-13 below and above the weight of the first n tokens, summed exactly."""
    found = []
    for size, seed in itertools.product((100, 1025, 4097), range(3)):
        for logits in rows(size, seed)[:3]:
            ranked = np.argsort(-logits, kind="stable")
            exact = [math.exp((float(logits[i]) - float(logits.max())) / 0.8) for i in ranked]
            total, cases, last = math.fsum(exact), [], []
            for n in (1, 7, size // 3, size // 2):
                share = math.fsum(exact[:n]) / total
                for factor, count in ((1 - 1e-13, n), (1 + 1e-13, n + 1)):
                    cases.append(case(logits, GREATEST, temperature=0.8, top_p=share * factor))
                    last.append(int(ranked[:count].max()))
            found.append((cases, last))
    return found


def test_top_p_at_thin_borders(isa: str) -> None:
    """Which tokens are kept, to parts of 1e-13: the greatest random number finds the last of them."""
    for cases, last in nuclei():
        assert tokens(isa, cases[0].logits[0], cases) == last


def test_equal_logits_share_exactly(isa: str) -> None:
    """Of 1,000 equal tokens top-k and top-p keep the lowest ids, and `u` falls evenly among them."""
    logits = np.zeros(1000, np.float32)
    filters = {1000: {}, 8: {"top_k": 8}, 250: {"top_p": 0.25}, 20: {"top_k": 40, "top_p": 0.5}}
    ats = [LEAST, GREATEST, *(At(1, position) for position in range(1, 30))]
    for (count, how), at in itertools.product(filters.items(), ats):
        assert tokens(isa, logits, [case(logits, at, **how)]) == [int(at.u * count)]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_min_p_between_two_floats(isa: str, temperature: float) -> None:
    """The bound on the logit must not be rounded to the near side of a token."""
    logits = np.array([3.1, 2.7, 0.1], np.float32)
    weight = math.exp((float(logits[1]) - float(logits[0])) / temperature)
    ways = [weight * (1 - 1e-9), weight * (1 + 1e-9)]
    cases = [case(logits, GREATEST, temperature=temperature, min_p=min_p) for min_p in ways]
    assert tokens(isa, logits, cases) == wanted(cases) == [1, 0]


def test_impossible_tokens_have_no_weight(isa: str) -> None:
    logits = np.full(3000, -np.inf, np.float32)
    logits[[700, 2999]] = 0, -1
    assert boltzmann(logits, 0.0, 1.0)[699] == 0
    for top_p in (1.0, 1 - 2.0**-53):
        cases = [case(logits, at, top_p=top_p) for at in (LEAST, GREATEST)]
        assert tokens(isa, logits, cases) == [700, 2999]


def test_memory_of_a_row_does_not_matter(isa: str) -> None:
    """Alignment, neighbours and what the sampler computed before leave no trace."""
    logits, at = rows(4097)[0], At(0, 7)
    one = case(logits, at, temperature=1.3, top_p=0.97, logprobs=5)
    sampler = _core.Sampler(isa, 4097, 2, 1)
    admit(sampler, one.admission(0), ())
    alone = run(_core.Sampler(isa, 4097, 1, 1), [one])
    for offset in (1, 3, 8):
        block = np.full(3 * 4097 + offset, np.nan, np.float32)[offset:].reshape(3, 4097)
        block[1] = logits
        sampler.release(0)
        admit(sampler, one.admission(0), ())
        assert row_results(sampler.sample(block, [(0, 0, (), 1, (), None)])) == alone
