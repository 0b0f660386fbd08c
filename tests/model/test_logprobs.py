"""Log-probabilities and the ranking of tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.sampling.faults import LogitsError
from quire.sampling.kernels import rank, ranking
from quire.sampling.logprobs import position_logprobs, prompt_logprobs
from quire.sampling.pipeline import SamplerState, sample
from quire.sampling_params import SamplingParams
from quire.types import Admission


def noise(seed, shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 4


def log_softmax(logits):
    """The log-probabilities of all tokens, by id."""
    top = position_logprobs(logits, 0, -1)[1:]
    return np.array([entry.logprob for entry in sorted(top)], np.float32)


tied = st.lists(st.sampled_from([-np.inf, -2.5, -1.0, -0.0, 0.0, 1.0, 7.25]), min_size=1, max_size=12)


@given(tied, st.integers(1, 14))
def test_ranking_is_a_total_order(values, k):
    logits = np.array(values, np.float32)
    ranked = sorted(range(len(values)), key=lambda i: (-values[i], i))
    assert ranking(logits, k).tolist() == ranked[:k]
    assert [rank(logits, i) for i in ranked] == list(range(1, len(values) + 1))


def test_ranking_of_a_large_row():
    logits = np.round(noise(0, 30_000), 1)
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    for k in (1, 2, 20, 255, 29_999, 30_000, 40_000):
        assert ranking(logits, k).tolist() == ranked[:k]


@pytest.mark.parametrize("vocab_size", [1, 2, 127, 2048, 50_257])
def test_against_exact_summation(vocab_size):
    logits = noise(vocab_size, vocab_size)
    maximum = float(logits.max())
    normalizer = maximum + math.log(math.fsum(math.exp(float(x) - maximum) for x in logits))
    exact = logits.astype(np.float64) - normalizer
    ulp = np.spacing(np.abs(exact).astype(np.float32))
    assert np.all(np.abs(log_softmax(logits) - exact) <= 0.51 * ulp + 1e-13)
    assert [e.token_id for e in sorted(position_logprobs(logits, 0, -1)[1:])] == list(range(vocab_size))


def test_extreme_logits():
    got = log_softmax(np.array([3e38, -3e38, -np.inf, 3e38], np.float32))
    assert got[0] == got[3] == np.float32(math.log(0.5))
    assert got[2] == -np.inf
    entries = position_logprobs(np.array([0, -np.inf], np.float32), 1, 2)
    assert entries[0] == (1, -math.inf, 2)
    assert [e.token_id for e in entries] == [1, 0, 1]


@given(tied.filter(lambda v: max(v) > -np.inf), st.integers(-1, 14), st.data())
def test_entries(values, k, data):
    logits = np.array(values, np.float32)
    token_id = data.draw(st.integers(0, len(values) - 1))
    chosen, *top = position_logprobs(logits, token_id, k)
    assert chosen.token_id == token_id
    assert chosen.rank == rank(logits, token_id)
    assert len(top) == (len(values) if k == -1 else min(k, len(values)))
    assert [e.rank for e in top] == list(range(1, len(top) + 1))
    assert sum(e == chosen for e in top) == (chosen.rank <= len(top))
    for entry in top:
        assert type(entry.token_id) is int
        assert type(entry.logprob) is float
        assert entry.logprob == float(np.float32(entry.logprob))
        assert entry.logprob == float(log_softmax(logits)[entry.token_id])


def test_logprobs_are_the_models_own():
    """No parameter changes the distribution that is reported; only which token is chosen."""
    logits = noise(5, 100)
    reported = set()
    for values in [
        {"temperature": 0},
        {"temperature": 0.1},
        {"repetition_penalty": 2.0, "temperature": 0},
        {"logit_bias": {int(logits.argmax()): -5}, "temperature": 0},
        {"top_k": 1},
    ]:
        admission = Admission(0, "r", 0, SamplingParams(seed=1, logprobs=3, **values), (), 2)
        result = sample(logits, SamplerState(admission, (0, int(logits.argmax())), 100))
        ((chosen, *top),) = result.logprobs
        assert chosen.token_id == result.token_ids[0]
        assert chosen.logprob == log_softmax(logits)[chosen.token_id]
        reported.add(tuple(top))
    assert len(reported) == 1


def test_greedy_token_is_first_of_the_top_tokens():
    logits = np.array([1, 5, 2, 5], np.float32)
    admission = Admission(0, "r", 0, SamplingParams(seed=1, logprobs=1, temperature=0), (), 1)
    ((chosen, first),) = sample(logits, SamplerState(admission, (0,), 4)).logprobs
    assert chosen == first
    assert first.rank == 1


@pytest.mark.parametrize("k", [0, 1, 5, -1])
def test_prompt_logprobs_have_the_bits_of_sampled_ones(k):
    block = noise(3, (6, 321))
    ids = [5, 0, 320, 7, 7, 100]
    whole = prompt_logprobs(block, ids, k)
    assert whole == tuple(position_logprobs(r.copy(), i, k) for r, i in zip(block, ids, strict=True))
    assert whole == prompt_logprobs(block[:2], ids[:2], k) + prompt_logprobs(block[2:], ids[2:], k)


def test_prompt_logprobs_refuse_nan():
    block = noise(3, (3, 50))
    block[1, 20] = np.nan
    with pytest.raises(LogitsError, match="NaN"):
        prompt_logprobs(block, [1, 2, 3], 2)
