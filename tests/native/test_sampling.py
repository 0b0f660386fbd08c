"""Native sampling against its reference twin in NumPy, on every instruction set of this machine."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from quire.backends.native import _core
from quire.sampling.arithmetic import NUMPY, boltzmann
from quire.sampling.faults import LogitsError
from quire.sampling.logprobs import position_logprobs
from quire.sampling.pipeline import SamplerState, sample
from quire.sampling_params import SamplingParams
from quire.types import Admission

SIZES = [1, 2, 3, 15, 16, 17, 33, 100, 1000, 1023, 1024, 1025, 4097, 20_000]
GREATEST_U = 1 - 2.0**-53


@pytest.fixture(params=_core.isas())
def native(request):
    return _core.Sampling(request.param)


def rows(size, seed=0):
    """Rows of all characters, as float64."""
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


def float32_rows(size, seed=0):
    return [row.astype(np.float32) for row in rows(size, seed)]


@pytest.mark.parametrize("size", SIZES)
def test_greatest_and_ranking(native, size):
    rng = np.random.default_rng(size)
    for logits in float32_rows(size):
        assert native.greatest(logits) == NUMPY.greatest(logits)
        for token_id in {0, size - 1, int(logits.argmax()), int(rng.integers(size))}:
            assert native.rank(logits, token_id) == NUMPY.rank(logits, token_id)
        for k in (1, 2, 20, 64):
            assert native.top_ids(logits, k) == NUMPY.top_ids(logits, k)


@pytest.mark.parametrize("size", SIZES)
def test_faults_are_found_as_in_the_reference(native, size):
    nothing = np.full(size, -np.inf, np.float32)
    assert native.greatest(nothing) == (0, -math.inf)
    for place in {0, size // 2, size - 1}:
        for bad in (np.nan, -np.nan, np.inf):
            logits = float32_rows(size)[0]
            logits[place] = bad
            logits[-1] = bad
            token_id, maximum = native.greatest(logits)
            assert token_id == place
            assert math.isnan(maximum) if math.isnan(bad) else maximum == math.inf
            np.testing.assert_equal((token_id, maximum), NUMPY.greatest(logits))


@pytest.mark.parametrize("size", SIZES)
def test_exp_sum(native, size):
    for logits in float32_rows(size):
        maximum = float(logits.max())
        expected = NUMPY.exp_sum(logits, maximum)
        assert native.exp_sum(logits, maximum) == pytest.approx(expected, rel=2e-14, abs=0)


def test_weights_are_exact_sums(native):
    """Against exact summation, so that twins cannot be wrong together."""
    for logits in float32_rows(5000):
        maximum = float(logits.max())
        exact = math.fsum(math.exp(float(x) - maximum) for x in logits)
        assert native.exp_sum(logits, maximum) == pytest.approx(exact, rel=2e-14, abs=0)


FILTERS = [
    *itertools.product((0, 1, 5, 333, 20_000), (1e-9, 0.3, 0.95, 1 - 1e-12, 1.0), (0.0, 0.05, 1.0)),
    (-1, 1.0, 0.0),
    (2**31 - 1, 0.5, 1e-320),
]
TEMPERATURES = [0.8, 2.0, 1e-9, 1e-30, 5e-324]


@pytest.mark.parametrize("size", SIZES)
def test_draw_is_that_of_the_reference(native, size):
    rng = np.random.default_rng(size)
    count = len(FILTERS) if size < 1000 else 25
    for logits in float32_rows(size):
        maximum = float(logits.max())
        for top_k, top_p, min_p in rng.permutation(FILTERS)[:count].tolist():
            temperature = float(rng.choice(TEMPERATURES))
            for u in (0.0, float(rng.random()), GREATEST_U):
                how = maximum, temperature, int(top_k), top_p, min_p, u
                assert native.draw(logits, *how) == NUMPY.draw(logits, *how), how


def test_a_whole_vocabulary(native):
    """The one size that matters, wide and narrow nuclei, with the tokens drawn spread over the row."""
    for seed, temperature, top_p in [(1, 0.8, 0.95), (2, 2.0, 1.0), (3, 0.3, 0.999), (4, 1.0, 0.5)]:
        logits = float32_rows(128_256, seed)[seed % 2]
        maximum = float(logits.max())
        for u in np.linspace(0, GREATEST_U, 7).tolist():
            how = maximum, temperature, 0, top_p, 0.0, u
            assert native.draw(logits, *how) == NUMPY.draw(logits, *how)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (40, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.2)]
)
def test_the_distribution_to_a_part_in_a_million(native, top_k, top_p, min_p):
    """Where the token changes along `u` is where the reference's cumulative distribution has its edges."""
    logits = float32_rows(1025)[0]
    maximum = float(logits.max())
    how = maximum, 0.9, top_k, top_p, min_p
    kept = sorted({NUMPY.draw(logits, *how, u) for u in np.linspace(0, GREATEST_U, 2000)})
    for lower in kept[::5]:
        low, high = 0.0, GREATEST_U  # the greatest u that gives `lower` or a token before it
        while high - low > 1e-9:
            middle = (low + high) / 2
            low, high = (middle, high) if native.draw(logits, *how, middle) <= lower else (low, middle)
        assert NUMPY.draw(logits, *how, max(low - 1e-8, 0.0)) <= lower
        assert NUMPY.draw(logits, *how, min(high + 1e-8, GREATEST_U)) >= lower


def test_equal_logits_share_exactly(native):
    """Of 1,000 equal tokens top-k and top-p keep the lowest ids, and `u` falls evenly among them."""
    logits = np.zeros(1000, np.float32)
    for u in (0.0, 0.125, 0.5, 0.999, GREATEST_U):
        assert native.draw(logits, 0.0, 1.0, 0, 1.0, 0.0, u) == int(u * 1000)
        assert native.draw(logits, 0.0, 1.0, 8, 1.0, 0.0, u) == int(u * 8)
        assert native.draw(logits, 0.0, 1.0, 0, 0.25, 0.0, u) == int(u * 250)
        assert native.draw(logits, 0.0, 1.0, 16, 0.5, 0.0, u) == int(u * 8)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_min_p_between_two_floats(native, temperature):
    """The bound on the logit must not be rounded to the near side of a token."""
    logits = np.array([3.1, 2.7, 0.1], np.float32)
    weight = math.exp((float(logits[1]) - float(logits[0])) / temperature)
    for min_p, last in ((weight * (1 - 1e-9), 1), (weight * (1 + 1e-9), 0)):
        how = float(logits[0]), temperature, 0, 1.0, min_p, GREATEST_U
        assert native.draw(logits, *how) == NUMPY.draw(logits, *how) == last


def test_impossible_tokens_have_no_weight(native):
    logits = np.full(3000, -np.inf, np.float32)
    logits[[700, 2999]] = 0, -1
    assert boltzmann(logits, 0.0, 1.0)[699] == 0
    for u in (0.0, 0.5, GREATEST_U):
        for top_p in (1.0, 1 - 2.0**-53):
            assert native.draw(logits, 0.0, 1.0, 0, top_p, 0.0, u) == (700 if u <= 0.5 else 2999)


def test_memory_of_a_row_does_not_matter(native):
    """Alignment, neighbours and what the object computed before leave no trace."""
    logits = float32_rows(4097)[0]
    how = float(logits.max()), 1.3, 0, 0.97, 0.0
    us = np.random.default_rng(5).random(50).tolist()
    alone = [native.draw(logits, *how, u) for u in us]
    for offset in (1, 3, 8):
        block = np.full(4097 + 32, np.nan, np.float32)
        block[offset : offset + 4097] = logits
        view = block[offset : offset + 4097]
        assert native.exp_sum(view, how[0]) == native.exp_sum(logits, how[0])
        assert [native.draw(view, *how, u) for u in us] == [native.draw(logits, *how, u) for u in us] == alone
        native.top_ids(np.zeros(50_000, np.float32), 64)


def test_faulty_rows_are_survived(native):
    """`draw` is not called with them; were it, it would answer some token and not harm the process."""
    for logits in (np.full(2000, np.nan), np.full(2000, -np.inf), np.full(2000, np.inf), np.array([np.nan])):
        logits = logits.astype(np.float32)
        for maximum, top_k, top_p in itertools.product((math.nan, -math.inf, 0.0, 1e30), (0, 5), (0.9, 1.0)):
            token_id = native.draw(logits, maximum, 1.0, top_k, top_p, 0.1, 0.5)
            assert 0 <= token_id < len(logits)
        assert len(native.top_ids(logits, 5)) <= 5


def test_bindings_refuse_what_would_read_beyond(native):
    logits = np.zeros(10, np.float32)
    with pytest.raises(ValueError, match="empty"):
        native.greatest(logits[:0])
    for token_id in (-1, 10):
        with pytest.raises(IndexError, match="token"):
            native.rank(logits, token_id)
    for k in (0, 65):
        with pytest.raises(ValueError, match="64"):
            native.top_ids(logits, k)
    for wrong in (logits.astype(np.float64), np.zeros((2, 5), np.float32), np.zeros(20, np.float32)[::2]):
        with pytest.raises(TypeError):
            native.greatest(wrong)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.9, "logprobs": 20},
        {"top_k": 7, "logprobs": -1, "allowed_token_ids": list(range(50, 900))},
        {"min_p": 0.1, "presence_penalty": 1.0, "min_tokens": 2, "logprobs": 0},
    ],
    ids=str,
)
def test_the_pipeline_gives_the_same_results(native, values):
    params = SamplingParams(seed=3, **values)
    for seed in range(5):
        logits = float32_rows(1100, seed)[0]
        state = SamplerState(Admission(0, "r", 0, params, (60,), 2), (5, 6, 70, 71), 1100)
        got, expected = sample(logits, state, native), sample(logits, state)
        assert got.token_ids == expected.token_ids
        for mine, theirs in zip(got.logprobs, expected.logprobs, strict=True):
            assert [(e.token_id, e.rank) for e in mine] == [(e.token_id, e.rank) for e in theirs]
            assert [e.logprob for e in mine] == pytest.approx([e.logprob for e in theirs], rel=2e-7)
    broken = np.full(1100, np.nan, np.float32)
    assert sample(broken, state, native) == sample(broken, state)
    with pytest.raises(LogitsError, match="NaN"):
        position_logprobs(broken, 0, 1, native)
