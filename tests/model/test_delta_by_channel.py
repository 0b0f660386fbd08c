"""The delta rule with a decay for each channel: against a plain recurrence, and its bits in any schedule."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import test_delta
from slot_ops import NUM_TOKENS, OneOp, W, check_ends, check_kv_bytes
from test_delta import (  # noqa: F401  # run here with the programs of this file
    test_a_snapshot_continues_like_the_sequence_it_was_taken_of,
    test_any_chunking_gives_the_same_bits,
    test_rejected_drafts_leave_no_trace,
)
from tiny import VOCAB

from quire.errors import ConfigError
from quire.program import Builder, Program

KEY_HEADS, HEADS, DK, DV = 2, 4, 3, 5
KEYS, VALUES = KEY_HEADS * DK, HEADS * DV
# Of the last head 150 in a position: e^-G would overflow in one.
RATE = np.array([-1.0, 0.5, -3.0, 5.0], np.float32)
BIAS = np.random.default_rng(1).standard_normal(HEADS * DK).astype(np.float32)
FACTOR = 2.0


def one_op() -> OneOp:
    rng = np.random.default_rng(0)
    widths = (KEYS, KEYS, VALUES, HEADS * DK, HEADS)
    inputs = [rng.standard_normal((NUM_TOKENS, n)).astype(np.float32) for n in widths]
    return OneOp(record, inputs, {"w.A_log": RATE, "w.dt_bias": BIAS})


def record(b, q, k, v, decay, beta):  # type: ignore[no-untyped-def]
    """The rule over separate queries, keys and values, with eigenvalues below zero."""
    by_channel = b.slice(decay, 0, (HEADS, DK))
    return b.delta_rule((q, k, v), by_channel, beta, W, KEY_HEADS, DK, beta_factor=FACTOR)


def recurrence(*inputs: np.ndarray) -> np.ndarray:
    """The rule position by position, in float64."""
    q, k, v, decay, beta = (part.astype(np.float64) for part in inputs)
    out = np.zeros((len(q), HEADS, DV))
    for head in range(HEADS):
        state, shared = np.zeros((DK, DV)), slice(head // 2 * DK, head // 2 * DK + DK)
        own = slice(head * DK, head * DK + DK)
        for t in range(len(q)):
            qt, kt = (y / np.sqrt(y @ y + 1e-6) for y in (q[t, shared], k[t, shared]))
            g = -np.exp(RATE[head]) * np.log1p(np.exp(decay[t, own] + BIAS[own]))
            state *= np.exp(g)[:, None]
            told, each = kt @ state, v[t].reshape(HEADS, DV)[head]
            state += np.outer(kt, FACTOR * (each - told) / (1 + np.exp(-beta[t, head])))
            out[t, head] = qt @ state / np.sqrt(DK)
    return out


def test_it_is_the_recurrence() -> None:
    one = one_op()
    np.testing.assert_allclose(one.run(0, NUM_TOKENS), recurrence(*one.inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ends", [[1, 2, 3, 64, 65, 300], [63, 127, 128, 129, 250, 300], [64, 300]], ids=str)
def test_rows_may_end_anywhere(ends: list[int]) -> None:
    check_ends(one_op, ends)


@pytest.mark.parametrize("row", [(0, 50), (70, 1), (64, 3), (2, 1), (120, 20), (3, 290)], ids=str)
def test_cost_is_what_is_read_and_kept(row: tuple[int, int]) -> None:
    check_kv_bytes(one_op(), row)


def test_a_slot_keeps_a_sum_of_decays_for_each_channel() -> None:
    """Also a backend takes the memory of a slot from this."""
    state = one_op().op.state
    assert state.inputs == KEYS + VALUES + HEADS * DK
    assert state.slot_bytes == 4 * (2 * HEADS * DK * DV + (63 + 32) * state.inputs)
    assert state.snapshot_bytes == 4 * (HEADS * DK * DV + 63 * state.inputs)


def test_decays_of_another_shape_are_refused() -> None:
    b = Builder()
    h = b.embed(W / "e", 4, 4)
    x, decay, beta = (b.linear(h, W / n, s) for n, s in (("x", 2 * KEYS + VALUES), ("a", (4, 2)), ("b", 4)))
    with pytest.raises(ConfigError, match="shapes differ"):
        b.delta_rule(x, decay, beta, W, KEY_HEADS, DK)


# Programs


def hybrid() -> Program:
    """Two layers of a convolution, a delta rule and a gated norm, attention between them."""
    b = Builder()
    x = b.embed(W / "e", VOCAB, 8)
    for i in range(2):
        p = W / f"{i}"
        h = b.rms_norm(x, p / "norm", 1e-5)
        mixed = b.short_convolution(b.linear(h, p / "in", 2 * KEYS + VALUES), p / "conv", 4)
        q, k, v = (b.slice(mixed, at, n) for at, n in ((0, KEYS), (KEYS, KEYS), (2 * KEYS, VALUES)))
        decay, beta = b.linear(h, p / "a", (HEADS, DK)), b.linear(h, p / "b", HEADS)
        mixed = b.delta_rule((q, k, v), decay, beta, p, KEY_HEADS, DK, beta_factor=1.0 + i)
        z = b.linear(h, p / "z", (HEADS, DV))
        h = b.gated_rms_norm(mixed, z, p / "gated_norm", 1e-5, "sigmoid")
        x = b.add(x, b.linear(h, p / "out", 8))
        if i == 0:
            q, k, v = (b.linear(x, p / name, (2, 4)) for name in "qkv")
            x = b.add(x, b.linear(b.attention(q, k, v), p / "o", 8))
    return b.program(b.linear(b.sampled_rows(x), W / "head", VOCAB))


@pytest.fixture(autouse=True, scope="module")
def _these_programs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_delta, "hybrid", hybrid)
        yield


def test_what_is_imported_runs_here() -> None:
    assert test_delta.hybrid() == hybrid()
