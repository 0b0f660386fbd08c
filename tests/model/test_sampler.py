"""The sampling pipeline against independent references, written plainly in Python floats."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from every_parameter import EVERYTHING
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.sampling.kernels import inverse_cumulative
from quire.sampling.philox import uniform
from quire.sampling.pipeline import SamplerState, edit_logits, sample
from quire.sampling_params import SamplingParams
from quire.types import Admission

EOS = 3


def make_state(params, prompt=(0, 1), emitted=(), vocab_size=12, sequence=0):
    admission = Admission(0, "r", sequence, params, (EOS,), len(prompt))
    return SamplerState(admission, (*prompt, *emitted), vocab_size)


def row(*values):
    return np.array(values, np.float32)


def noise(index, vocab_size):
    return np.random.default_rng(index).normal(size=vocab_size).astype(np.float32) * 3


# The distribution ---------------------------------------------------------------------------------------

# Unordered, without near ties, and two equal values at ids 4 and 9.
LOGITS = row(0.3, -1.2, 1.9, 0.9, 1.4, -0.4, 2.2, -0.1, 0.6, 1.4, -2.0, 1.1)


def analytic(logits, params):
    """{token id: probability}, by the definitions in vLLM's order: temperature, min-p, top-k, top-p."""
    scaled = [float(x) / params.temperature for x in logits]
    total = math.fsum(math.exp(s) for s in scaled)
    probability = {i: math.exp(s) / total for i, s in enumerate(scaled)}
    ranked = sorted(probability, key=lambda i: (-logits[i], i))
    ranked = [i for i in ranked if probability[i] >= params.min_p * probability[ranked[0]]]
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    kept_mass = math.fsum(probability[i] for i in ranked)
    nucleus, mass = [], 0.0
    for i in ranked:
        if mass < params.top_p or params.top_p == 1:
            nucleus.append(i)
        mass += probability[i] / kept_mass
    nucleus_mass = math.fsum(probability[i] for i in nucleus)
    return {i: probability[i] / nucleus_mass for i in nucleus}


def chi_square_p(statistic, freedom):
    """P(chi-square with `freedom` degrees > statistic), in closed form (Abramowitz and Stegun 26.4.4-5)."""
    half = statistic / 2
    if freedom % 2 == 0:
        return math.exp(-half) * math.fsum(half**i / math.factorial(i) for i in range(freedom // 2))
    tail = math.fsum(half ** (i - 0.5) / math.gamma(i + 0.5) for i in range(1, (freedom + 1) // 2))
    return math.erfc(math.sqrt(half)) + math.exp(-half) * tail


def test_chi_square_tail():
    # Critical values of the 0.05 level from any printed table.
    for freedom, critical in [(1, 3.841), (2, 5.991), (5, 11.070), (10, 18.307), (11, 19.675)]:
        assert chi_square_p(critical, freedom) == pytest.approx(0.05, abs=2e-5)


def draws(logits, params, count):
    state = make_state(params)
    tokens = Counter()
    for position in range(2, 2 + count):
        state.num_tokens = position
        tokens[sample(logits, state).token_ids[0]] += 1
    return tokens


FILTERS = [
    dict(zip(("top_k", "top_p", "min_p"), values, strict=True))
    for values in itertools.product((0, 7), (1.0, 0.8), (0.0, 0.12))
]
TEMPERATURES = [0.6, 1.0, 1.7]
CASES = [
    {"temperature": temperature, **filters}
    for i, filters in enumerate(FILTERS)
    for j, temperature in enumerate(TEMPERATURES)
    if i == 0 or (i + j) % 3 == 0
]


@pytest.mark.parametrize("values", CASES, ids=str)
def test_distribution(values):
    params = SamplingParams(seed=1234, **values)
    expected = analytic(LOGITS, params)
    count = 20_000
    tokens = draws(LOGITS, params, count)
    assert set(tokens) <= set(expected)
    assert min(expected.values()) * count > 5  # the chi-square approximation holds
    statistic = sum((tokens[i] - count * p) ** 2 / (count * p) for i, p in expected.items())
    assert chi_square_p(statistic, len(expected) - 1) > 1e-3


def test_the_filters_differ_from_each_other():
    """So that a filter left out, or taken out of order, fails test_distribution."""
    supports = {str(f): tuple(analytic(LOGITS, SamplingParams(**f))) for f in FILTERS if f["top_p"] == 1}
    assert len(set(supports.values())) == len(supports) - 1  # of top-k and min-p the stronger one wins
    together = SamplingParams(temperature=1.7, top_k=7, top_p=0.8, min_p=0.12)
    apart = SamplingParams(temperature=1.7, top_p=0.8)
    assert set(analytic(LOGITS, together)) < set(analytic(LOGITS, apart))


@settings(max_examples=300)
@given(
    st.lists(st.integers(-6, 6), min_size=1, max_size=9),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.integers(0, 10),
    st.sampled_from([1e-9, 0.1, 0.35, 0.75, 0.99, 1.0]),
    st.sampled_from([0.0, 0.011, 0.3, 0.97]),
    st.integers(3, 10**6),
)
def test_support_and_inverse_cumulative(values, temperature, top_k, top_p, min_p, position):
    """Logits with many ties: the token drawn is the one at u in the analytic distribution, in id order."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=5)
    logits = row(*values)
    state = make_state(params, prompt=(0, 0, 0), vocab_size=len(values))
    state.num_tokens = position
    token = sample(logits, state).token_ids[0]
    expected = analytic(logits, params)
    assert token in expected
    below = math.fsum(p for i, p in expected.items() if i < token)
    assert below - 1e-9 <= uniform(5, 0, position) <= below + expected[token] + 1e-9


def test_wide_nucleus():
    """A large vocabulary, with many equal logits."""
    logits = np.round(noise(1, 5000) / 4, 1)
    for top_p, top_k in itertools.product((0.5, 0.9, 0.999), (0, 700)):
        params = SamplingParams(temperature=1.5, top_p=top_p, top_k=top_k, seed=9)
        expected = analytic(logits, params)
        assert len(expected) > 256
        tokens = draws(logits, params, 300)
        assert set(tokens) <= set(expected)
        assert max(tokens) > 4000 > 1000 > min(tokens)


# Greedy, ties, extremes ---------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_id_of_the_greatest():
    assert sample(row(1, 5, 5, 0), make_state(SamplingParams(temperature=0, seed=0))).token_ids == (1,)
    logits = noise(0, 70_001)
    logits[[33_333, 70_000]] = 100
    state = make_state(SamplingParams(temperature=0, seed=0), vocab_size=len(logits))
    assert sample(logits, state).token_ids == (33_333,)


@pytest.mark.parametrize("values", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_narrowest_filters_are_greedy(values):
    params = SamplingParams(seed=1, temperature=2.0, **values)
    tokens = draws(LOGITS, params, 200)
    assert set(tokens) == {6}
    if "min_p" not in values:  # min_p = 1 keeps every one of equal maxima
        assert set(draws(row(1, 5, 5, 0), params, 200)) == {1}


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-9])
def test_tiny_temperature_is_greedy_without_overflow(temperature):
    logits = row(-3e38, -np.inf, 1.5, 3e38, 1.0)
    state = make_state(SamplingParams(temperature=temperature, seed=1, top_p=0.9, min_p=0.1))
    assert sample(logits, state).token_ids == (3,)


def test_impossible_tokens_are_never_drawn():
    logits = row(-np.inf, 0, -np.inf, 0.5, -np.inf)
    for values in FILTERS:
        assert set(draws(logits, SamplingParams(seed=3, **values), 300)) <= {1, 3}


@given(st.lists(st.floats(0, 1), max_size=20), st.integers(0, 20), st.integers(1, 8))
def test_ends_of_the_draw(weights, index, steps):
    """The greatest and least u find the last and first token with weight, however the sum rounds."""
    weights.insert(min(index, len(weights)), 1.0)
    weights.append(0.0)
    array = np.array([w if w > 1e-9 else 0 for w in weights])
    with_weight = np.flatnonzero(array).tolist()
    assert inverse_cumulative(array, 1 - steps * 2.0**-53) == with_weight[-1]
    assert inverse_cumulative(array, 0.0) == with_weight[0]


# Editing of logits --------------------------------------------------------------------------------------


def edited(logits, prompt=(0, 1), emitted=(), **values):
    state = make_state(SamplingParams(seed=0, **values), prompt, emitted, len(logits))
    before = logits.copy()
    result = edit_logits(logits, state)
    np.testing.assert_array_equal(logits, before)
    return result


def test_allowed_bias_min_tokens():
    logits = row(1, 2, 3, 4, 5)
    inf = -np.inf
    assert edited(logits, allowed_token_ids=[4, 1]).tolist() == [inf, 2, inf, inf, 5]
    assert edited(logits, logit_bias={0: 2.5, 4: -100}).tolist() == [3.5, 2, 3, 4, -95]
    assert edited(logits, allowed_token_ids=[4, 1], logit_bias={0: 100}).tolist() == [inf, 2, inf, inf, 5]
    early = edited(logits, min_tokens=2, stop_token_ids=[0], emitted=[1])
    assert early.tolist() == [inf, 2, 3, inf, 5]
    assert edited(logits, min_tokens=2, ignore_eos=True).tolist() == [1, 2, 3, inf, 5]
    assert edited(logits, min_tokens=2, stop_token_ids=[0], emitted=[1, 1]).tolist() == [1, 2, 3, 4, 5]


def test_min_tokens_counts_only_emitted_tokens():
    params = SamplingParams(seed=0, temperature=0, min_tokens=2)
    logits = row(0, 1, 2, 9, 3)
    state = make_state(params, prompt=(0,) * 10, vocab_size=5)
    tokens = []
    for _ in range(3):
        tokens += sample(logits, state).token_ids
        state.extend(tokens[-1:])
    assert tokens == [4, 4, EOS]


def test_end_token_outside_the_vocabulary():
    admission = Admission(0, "r", 0, SamplingParams(seed=0, min_tokens=1), (99,), 1)
    assert sample(row(0, 1), SamplerState(admission, (0,), 2)).error is None


def test_bad_words():
    logits = row(1, 2, 3, 4, 5)
    words = [[4], [1, 2], [1, 1, 0]]
    gone = {
        (): {4},
        (1,): {4, 2},
        (0, 1, 1): {4, 2, 0},
        (1, 1, 0): {4},
    }
    for emitted, ids in gone.items():
        result = edited(logits, prompt=(1, 1), emitted=emitted, bad_words_token_ids=words)
        assert set(np.flatnonzero(np.isneginf(result))) == ids, emitted


@given(
    st.lists(st.integers(0, 7), max_size=6),
    st.lists(st.integers(0, 7), max_size=12),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.floats(0.05, 2),
)
def test_penalties(prompt, emitted, presence, frequency, repetition):
    logits = noise(len(prompt), 8)
    logits[7] = -np.inf
    got = edited(
        logits,
        prompt,
        emitted,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
    )
    for i, logit in enumerate(logits.tolist()):
        if i in prompt or i in emitted:
            logit = logit / repetition if logit > 0 else logit * repetition
        logit -= frequency * emitted.count(i)
        logit -= presence * (i in emitted)
        assert got[i] == pytest.approx(logit, rel=1e-5, abs=1e-5)


def mask_of(*token_ids, vocab_size=5):
    each = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    each[list(token_ids)] = 1
    return np.packbits(each, bitorder="little").view(np.uint32)


def test_masks():
    logits, inf = row(1, 2, 3, 4, 5), -np.inf
    state = make_state(SamplingParams(seed=0, logit_bias={1: 10}), vocab_size=5)
    assert edit_logits(logits, state, mask_of(0, 4)).tolist() == [1, inf, inf, inf, 5]
    wide = np.arange(70, dtype=np.float32)
    state = make_state(SamplingParams(seed=0), vocab_size=70)
    edited = edit_logits(wide, state, mask_of(0, 31, 32, 69, vocab_size=70))
    assert np.flatnonzero(np.isfinite(edited)).tolist() == [0, 31, 32, 69]


def test_masks_let_the_output_end_where_nothing_else_may_follow():
    """`min_tokens` gives way to the grammar; `bad_words` and `allowed_token_ids` do not."""
    logits, early = row(1, 2, 3, 4, 5), {"temperature": 0, "min_tokens": 2}
    state = make_state(SamplingParams(seed=0, **early), vocab_size=5)
    assert sample(logits, state, mask=mask_of(EOS)).token_ids == (EOS,)
    assert sample(logits, state, mask=mask_of(0, EOS)).token_ids == (0,)
    state = make_state(SamplingParams(seed=0, bad_words_token_ids=[[0]], **early), vocab_size=5)
    error = sample(logits, state, mask=mask_of(0, EOS)).error
    assert error.by_request
    state = make_state(SamplingParams(seed=0, allowed_token_ids=[0], **early), vocab_size=5)
    assert sample(logits, state, mask=mask_of(EOS)).error == error


def test_everything_excluded_is_an_error_of_this_row():
    state = make_state(SamplingParams(seed=0, allowed_token_ids=[EOS], min_tokens=1))
    result = sample(LOGITS, state)
    assert result.token_ids == ()
    assert "allowed_token_ids" in result.error.message
    assert result.error.by_request


def test_repetition_penalty_beyond_float32():
    state = make_state(SamplingParams(seed=0, repetition_penalty=1e-300), prompt=(6,))
    error = sample(LOGITS, state).error
    assert "repetition_penalty" in error.message
    assert error.by_request
    negative = sample(-np.abs(LOGITS), state)
    assert negative.error is None


@pytest.mark.parametrize(("bad", "word"), [(np.nan, "NaN"), (np.inf, "infinity")])
@pytest.mark.parametrize(
    "values", [{"temperature": 0}, {}, {"allowed_token_ids": [1]}, {"logprobs": 2, "top_k": 3}], ids=str
)
def test_logits_that_are_not_numbers(bad, word, values):
    logits = LOGITS.copy()
    logits[7] = bad
    result = sample(logits, make_state(SamplingParams(seed=0, **values)))
    assert word in result.error.message
    assert not result.error.by_request
    assert result.token_ids == result.logprobs == ()
    nothing = sample(np.full(12, -np.inf, np.float32), make_state(SamplingParams(seed=0, **values)))
    assert "-inf" in nothing.error.message
    assert not nothing.error.by_request


# State --------------------------------------------------------------------------------------------------

PROMPT = (1, 2, 2, 8)


def run(params, count, vocab_size=12, emitted=(), sequence=0):
    """Emit up to `count` tokens; the logits are a function of the tokens so far."""
    emitted = list(emitted)
    state = make_state(params, PROMPT, emitted, vocab_size, sequence)
    results = []
    while len(emitted) < count:
        result = sample(noise(hash((PROMPT, *emitted)) % 2**32, vocab_size), state)
        results.append(result)
        emitted += result.token_ids
        state.extend(result.token_ids)
    return emitted, results


@given(st.integers(0, 30), st.integers(-(2**63), 2**63 - 1), st.integers(0, 127))
@settings(max_examples=40)
def test_preemption_changes_nothing(cut, seed, sequence):
    params = SamplingParams(seed=seed, **EVERYTHING)
    emitted, results = run(params, 30, sequence=sequence)
    again, resumed = run(params, 30, emitted=emitted[:cut], sequence=sequence)
    assert again == emitted
    assert resumed == results[cut:]


def test_state_extended_equals_state_rebuilt():
    params = SamplingParams(seed=0, **EVERYTHING)
    tokens = np.random.default_rng(0).integers(0, 12, 50).tolist()
    extended = make_state(params, PROMPT)
    extended.extend(tokens[:1])
    extended.extend(tokens[1:4])
    extended.extend(())
    extended.extend(tokens[4:])
    rebuilt = make_state(params, PROMPT, tokens)
    assert rebuilt.num_tokens == len(PROMPT) + 50  # the position of the next draw
    for name in SamplerState.__slots__:
        np.testing.assert_equal(getattr(extended, name), getattr(rebuilt, name), name)


def test_seed_and_sequence_decide():
    params = SamplingParams(seed=1, temperature=1.5)
    outputs = [
        run(params, 20)[0],
        run(SamplingParams(seed=2, temperature=1.5), 20)[0],
        run(params, 20, sequence=1)[0],
    ]
    assert len(set(map(tuple, outputs))) == 3
    assert run(params, 20)[0] == outputs[0]


def test_rows_do_not_depend_on_their_neighbours():
    """Also where a row lies in memory, and its alignment, must not matter."""
    params = SamplingParams(seed=77, logprobs=5, temperature=0.9, top_p=0.97, presence_penalty=1.0)
    vocab_size = 1003
    states = [make_state(params, (i, 7), (9, i), vocab_size) for i in range(8)]
    batch = np.stack([noise(i, vocab_size) for i in range(8)])
    alone = [sample(batch[i].copy(), states[i]) for i in range(8)]
    batch[3] = np.nan
    offset = np.empty(8 * vocab_size + 1, np.float32)[1:].reshape(8, vocab_size)
    offset[:] = batch
    for i in (0, 1, 2, 4, 5, 6, 7):
        assert sample(batch[i], states[i]) == sample(offset[i], states[i]) == alone[i]
    assert sample(batch[3], states[3]).error is not None


def test_nothing_of_vocabulary_size_is_kept_without_need():
    state = make_state(SamplingParams(seed=0, top_p=0.9, logprobs=2, stop_token_ids=[1]), vocab_size=10**9)
    assert state.seen is None
    assert state.output_counts is None
    assert not state.edits_logits


def test_a_seed_is_needed():
    with pytest.raises(ValueError, match="seed"):
        make_state(SamplingParams())
