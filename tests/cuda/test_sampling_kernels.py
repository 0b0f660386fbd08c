"""Kernels of sampling in Triton's interpreter, against quire.sampling: the same tokens, faults and
numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire import SamplingParams
from quire.backends.cuda import interpreter
from quire.backends.cuda.kernels import logits as logits_kernels
from quire.backends.cuda.kernels import logprobs, sampling, steps
from quire.sampling.faults import FAULTS, LogitsError
from quire.sampling.logprobs import position_logprobs
from quire.sampling.pipeline import SamplerState, choose, edit_logits
from quire.types import Admission

VOCAB, BLOCK = 300, 32
PARTS = -(-VOCAB // BLOCK)


def logits_of(seed: int, rows: int, spread: float = 3.0) -> np.ndarray:
    """Return logits with ties, as rounded ones have."""
    x = np.random.default_rng(seed).standard_normal((rows, VOCAB)) * spread
    return (np.round(x * 8) / 8).astype(np.float32)


def state_of(params: SamplingParams, position: int) -> SamplerState:
    """Return the state of a sequence whose next token is at this position."""
    admission = Admission(0, "r", 1, params, (), position)
    return SamplerState(admission, [0] * position, VOCAB)


def chosen(logits: np.ndarray, params: list[SamplingParams], positions: list[int], **edited: Any) -> Any:
    """Return tokens and faults of choose_tokens, which finds the rows of logits in another order."""
    rows = len(logits)
    order = np.arange(rows, dtype=np.int32)[::-1].copy()
    tokens, faults = np.full(rows, -9, np.int32), np.full(rows, -9, np.int32)
    own = [
        np.array([p.temperature for p in params], np.float64),
        np.array([p.top_k for p in params], np.int32),
        np.array([p.top_p for p in params], np.float64),
        np.array([p.min_p for p in params], np.float64),
        np.array([p.seed for p in params], np.int64),
        np.full(rows, 1, np.int32),
        np.array(positions, np.int32),
    ]
    scratch = [np.empty((rows, VOCAB), np.float32), np.empty((rows, VOCAB), np.int32)]
    given = np.ascontiguousarray(logits[::-1])
    other = (edited["edited"], np.arange(rows, dtype=np.int32)) if edited else (given, order)
    raw_tops, tops, firsts = (np.empty((rows, PARTS), t) for t in (np.float32, np.float32, np.int32))
    for found, (values, places) in ((raw_tops, (given, order)), (tops, other)):
        args = [found, firsts, values, places, VOCAB]
        interpreter.run(sampling.survey_logits, (rows, PARTS), args, {"BLOCK": BLOCK})
    sums, how = np.full((rows, PARTS), np.nan), {"BLOCK": BLOCK, "PARTS": 16}
    args = [sums, tops, firsts, *other, own[0], own[3], VOCAB, PARTS]
    interpreter.run(sampling.weigh_logits, (rows, PARTS), args, how)
    args = [tokens, faults, raw_tops, tops, firsts, *other, *own, sums, *scratch, VOCAB, PARTS]
    interpreter.run(sampling.choose_tokens, (rows,), args, how)
    return tokens, faults


HOWS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 1},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.3, "top_k": 40},
    {"temperature": 1.0, "top_k": VOCAB},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.5, "top_p": 1e-6},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.2, "min_p": 0.1, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 2.0, "top_k": 50, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 1e-3, "top_p": 0.5},
]


@pytest.mark.parametrize("spread", [0.2, 3.0])
@pytest.mark.parametrize("how", HOWS, ids=str)
def test_the_token_of_the_definition(how: dict[str, Any], spread: float) -> None:
    logits = logits_of(1, 6, spread)
    logits[2, 5:200] = -np.inf
    params = [SamplingParams(seed=seed * 977 - 3, **how) for seed in range(6)]
    positions = [1, 2, 3, 70, 5000, 100_000]
    tokens, faults = chosen(logits, params, positions)
    rows = zip(logits, params, positions, strict=True)
    assert tokens.tolist() == [choose(row, state_of(p, at)) for row, p, at in rows]
    assert (faults == 0).all()


@pytest.mark.parametrize("how", [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.3}, {}], ids=str)
def test_draws_cover_what_is_kept(how: dict[str, Any]) -> None:
    """Many draws from one row: every kept token is drawn, none other, and each as the definition says."""
    row = logits_of(2, 1, 1.0)[:, :]
    params = [SamplingParams(temperature=1.0, seed=seed, **how) for seed in range(40)]
    tokens, _ = chosen(np.repeat(row, 40, 0), params, [9] * 40)
    assert tokens.tolist() == [choose(row[0], state_of(p, 9)) for p in params]
    assert len(set(tokens.tolist())) > 2


def test_faults() -> None:
    logits = logits_of(3, 7)
    logits[6] = np.nan
    edited = logits.copy()
    logits[0] = edited[0] = -np.inf
    logits[1, 7] = edited[1, 7] = np.nan
    logits[2, 7] = edited[2, 7] = np.inf
    edited[3] = -np.inf
    edited[4, 250] = np.inf
    params = [SamplingParams(temperature=1.0, seed=1)] * 7
    tokens, faults = chosen(logits, params, [4] * 7, edited=edited)
    assert faults.tolist() == [1, 2, 3, 4, 5, 0, 2]
    assert (tokens[faults > 0] == 0).all()  # other kernels go on with what is there
    for row in (0, 1, 2, 6):
        with pytest.raises(LogitsError) as found:
            choose(logits[row], state_of(params[row], 4))
        assert found.value.failure == FAULTS[faults[row]]


def listed(logits: np.ndarray, rows: np.ndarray, tokens: np.ndarray, k: int = 0) -> Any:
    """Return log-probabilities, ranks and faults of tokens, and the first k of the ranking with theirs."""
    count, most = len(rows), 32
    tops, firsts = np.empty((count, PARTS), np.float32), np.empty((count, PARTS), np.int32)
    args: list[Any] = [tops, firsts, logits, rows, VOCAB]
    interpreter.run(sampling.survey_logits, (count, PARTS), args, {"BLOCK": BLOCK})
    sums, before = np.full((count, PARTS), np.nan), np.full((count, PARTS), -1, np.int32)
    found, how = [sums, before, tops, firsts, tokens, logits, rows, VOCAB, PARTS], {"PARTS": 16}
    interpreter.run(logprobs.rank_logits, (count, PARTS), found, how | {"BLOCK": BLOCK})
    own = np.empty(count, np.float32), np.empty(count, np.int32), np.full(count, -9, np.int32)
    log_sums = np.empty((count, 2), np.float64)
    interpreter.run(logprobs.token_logprobs, (count,), [*own, log_sums, *found], how)
    top, ids = np.empty((count, most), np.float32), np.empty((count, most), np.int32)
    if k:
        scratch = [np.empty((count, VOCAB), np.float32), np.empty((count, VOCAB), np.int32)]
        args = [top, ids, log_sums, tops, logits, rows, *scratch, VOCAB, PARTS, k]
        interpreter.run(logprobs.top_logprobs, (count,), args, how | {"BLOCK": BLOCK, "MOST": most})
    return (*own, top[:, :k], ids[:, :k])


@pytest.mark.parametrize("k", [1, 9, 20])
def test_logprobs_and_ranks(k: int) -> None:
    """More of the likely ones than there are parts, and fewer; of a row with many equal logits, too."""
    logits, chosen_ids = logits_of(4, 4), np.array([0, 7, 299, 40], np.int32)
    logits[1, 20:] = -np.inf
    logits[3] = np.minimum(logits[3], 1)
    given, rows = np.ascontiguousarray(logits[[2, 0, 1, 3]]), np.array([1, 2, 0, 3], np.int32)
    found, ranks, faults, top, ids = listed(given, rows, chosen_ids, k)
    assert faults.tolist() == [0, 0, 0, 0]
    for row, token in enumerate(chosen_ids.tolist()):
        first, *others = position_logprobs(logits[row], token, k)
        assert (first.token_id, first.rank) == (token, ranks[row])
        assert np.isclose(found[row], first.logprob, rtol=1e-7)
        assert ids[row].tolist() == [other.token_id for other in others]
        assert np.allclose(top[row], [other.logprob for other in others], rtol=1e-7)


def test_rows_without_log_probabilities_have_their_faults() -> None:
    logits = logits_of(4, 5)
    logits[0], logits[1, 9], logits[2, 9], logits[4] = -np.inf, np.nan, np.inf, np.nan
    faults = listed(logits, np.arange(5, dtype=np.int32), np.zeros(5, np.int32), 20)[2]
    assert faults.tolist() == [1, 2, 3, 0, 2]


def test_a_step_takes_tokens_of_the_one_before() -> None:
    tokens, sampled = np.array([5, -1, 0, -3, 7], np.int32), np.array([40, 41, 42], np.int32)
    interpreter.run(
        steps.feed_tokens,
        (3,),
        [
            tokens,
            sampled,
            4,
        ],
        {"BLOCK": 2},
    )
    assert tokens.tolist() == [5, 40, 0, 42, 7]


def test_entries_are_placed() -> None:
    out = np.zeros(9, np.int32)
    places, values = np.array([8, 0, 3, 5], np.int32), np.array([1, 2, 3, 4], np.int32)
    interpreter.run(steps.place_entries, (2,), [out, places, values, 3], {"BLOCK": 2})
    assert out.tolist() == [2, 0, 0, 3, 0, 0, 0, 0, 1]


def test_edits_have_the_bits_of_the_definition() -> None:
    """Allowed tokens, biases, a grammar's mask, bad words and penalties, each in a row of its own, and
    all.
    """
    rng = np.random.default_rng(6)
    bias = {5: 2.5, 7: -100.0, 299: 1.0}
    every = {
        "repetition_penalty": 1.7,
        "frequency_penalty": 0.3,
        "presence_penalty": -0.4,
        "logit_bias": bias,
    }
    hows = [{"repetition_penalty": 0.6}, {"frequency_penalty": 0.7}, {"presence_penalty": 1.1}, every, {}]
    params = [SamplingParams(seed=1, **how) for how in hows]
    logits, masks = logits_of(5, 5), rng.integers(0, 2**32, (2, -(-VOCAB // 32)), np.uint32)
    mask_rows = np.array([-1, 1, 0, 1, -1], np.int32)
    outputs = rng.integers(0, VOCAB, (5, 40)).tolist()
    prompts = rng.integers(0, VOCAB, (5, 10)).tolist()
    states = []
    for own, prompt, output in zip(params, prompts, outputs, strict=True):
        states.append(SamplerState(Admission(0, "r", 0, own, (), 10), [*prompt, *output], VOCAB))
    seen, counts = np.zeros((6, VOCAB), np.int8), np.zeros((6, VOCAB), np.int32)
    slots = np.array([4, 0, 5, 2, 3], np.int32)
    seen[slots[:, None], prompts] = 1
    num_drafted = [7, 0, 7, 13, 2]
    known = [own[: len(own) - n] for own, n in zip(outputs, num_drafted, strict=True)]
    drafted = np.concatenate([own[len(own) - n :] for own, n in zip(outputs, num_drafted, strict=True)])
    firsts = np.cumsum([0, *num_drafted]).astype(np.int32)
    tokens = np.concatenate(known).astype(np.int32)
    owners = np.repeat(slots, list(map(len, known)))
    args = [seen, counts, owners, tokens, len(tokens), VOCAB]
    interpreter.run(logits_kernels.count_tokens, (-(-len(tokens) // 16),), args, {"BLOCK": 16})
    out = np.empty_like(logits)
    given, rows = np.ascontiguousarray(logits[::-1]), np.arange(5, dtype=np.int32)[::-1].copy()
    args = [out, given, rows, masks, mask_rows, VOCAB, masks.shape[1]]
    interpreter.run(logits_kernels.mask_logits, (5, 3), args, {"BLOCK": 128})
    listed = [
        np.full(3, 3, np.int32),
        np.array(list(bias), np.int32),
        np.array(list(bias.values()), np.float32),
    ]
    interpreter.run(logits_kernels.bias_logits, (1,), [out, *listed, 3, VOCAB], {"BLOCK": 16})
    by_row = [
        np.array([p.repetition_penalty for p in params], np.float64),
        np.array([p.frequency_penalty for p in params], np.float32),
        np.array([p.presence_penalty for p in params], np.float32),
    ]
    args = [out, slots, seen, counts, drafted.astype(np.int32), firsts, *by_row, VOCAB]
    interpreter.run(logits_kernels.penalize_logits, (5, 3), args, {"BLOCK": 128})
    for row, state in enumerate(states):
        mask = None if mask_rows[row] < 0 else masks[mask_rows[row]]
        assert (out[row] == edit_logits(logits[row], state, mask)).all(), hows[row]


@pytest.mark.parametrize("width", [VOCAB - 7, VOCAB + 9])
def test_logits_of_another_vocabulary(width: int) -> None:
    given = np.random.default_rng(0).standard_normal((3, width)).astype(np.float32)
    out = np.empty((3, VOCAB), np.float32)
    interpreter.run(logits_kernels.fit_logits, (3, PARTS), [out, given, VOCAB, width], {"BLOCK": BLOCK})
    common = min(VOCAB, width)
    assert (out[:, :common] == given[:, :common]).all()
    assert np.isneginf(out[:, common:]).all()
