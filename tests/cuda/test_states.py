"""States of slots on the interpreted accelerator: convolutions and recurrences, in any schedule."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lowered import OneOp, distance
from on_accelerator import interpreted, wide_config, write_checkpoint
from test_cuda_engine import PARAMS, ask, make
from test_exactness import fingerprint
from test_native_state import step
from tiny import Paged, Sequence, random_weights, same_bits

from quire.backends.cuda.interpreted import InterpretedAccelerator
from quire.backends.cuda.refused import require_kernels
from quire.errors import ConfigError
from quire.models import read_model
from quire.program import Builder, Names, Value
from quire.types import Snapshot

W = Names("w")
NUM_TOKENS = 68  # one boundary between chunks, and a little more


def random_inputs(*widths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(widths)
    return [rng.standard_normal((NUM_TOKENS + 1, width)).astype(np.float32) for width in widths]


def convolution(b: Builder, x: Value) -> Value:
    return b.short_convolution(x, W / "conv", 4, bias=True, activation="silu")


def delta(b: Builder, x: Value, decay: Value, beta: Value) -> Value:
    """Two heads of 3 values share keys of 5 numbers."""
    return b.delta_rule(x, decay, beta, W, 1, 5)


def space(b: Builder, x: Value, step: Value) -> Value:
    """A head of 40 numbers, which two programs divide, with states of 70 numbers in a column."""
    return b.state_space(x, step, W, 1, 70, (0.01, 0.5))


OPS = {
    "convolution": (convolution, random_inputs(20)),
    "delta": (delta, random_inputs(16, 2, 2)),
    "space": (space, random_inputs(180, 1)),
}


@pytest.mark.parametrize("name", OPS)
def test_one_op_in_any_schedule(name: str) -> None:
    """Numbers of the reference; and the same bits in chunks, beside others, after drafts and from snapshots.

    A slot that was used before is taken, and the last token's inputs are NaN: whatever it leaves in a state
    is found.
    """
    record, inputs = OPS[name]
    for x in inputs:
        x[NUM_TOKENS] = np.nan
    one = OneOp(inputs, record)
    ids = list(range(NUM_TOKENS))
    reference = Paged(one.program, one.weights)
    whole = Paged(one.program, one.weights, make=interpreted)
    expected = whole.prefill(whole.sequence(ids)).reshape(NUM_TOKENS, -1)
    wanted = reference.prefill(reference.sequence(ids)).reshape(NUM_TOKENS, -1)
    assert distance(expected, wanted) < 1e-5
    paged = Paged(one.program, one.weights, make=partial(interpreted, num_snapshots=4))
    blocks = paged.sequence(ids).blocks
    spoilt, own = (Sequence(own, blocks, slot=5) for own in ([NUM_TOKENS] * 3, ids))
    other, found = Sequence(ids, blocks, slot=2), list[np.ndarray]()

    def run(*rows: tuple[Sequence, int], **snapshots: Any) -> None:
        parts = step(paged, list(rows), **snapshots)
        for part, (sequence, count) in zip(parts, rows, strict=True):
            part, end = part.reshape(count, -1), sequence.computed
            if sequence is own:
                found.append(part)
            elif sequence is other:
                assert same_bits(part, expected[end - count : end])

    def saved(*places: tuple[int, int]) -> tuple[Snapshot, ...]:
        return tuple(Snapshot(5, 0, position, number) for position, number in places)

    run((spoilt, 3))
    run((other, 1), (own, 9), saved=saved((0, 3), (4, 0), (9, 1)))
    run((own, 1))
    run((Sequence([NUM_TOKENS] * 13, blocks, slot=5, computed=10), 3))  # drafts that are rejected
    run((own, 1), (other, 1))
    run((own, NUM_TOKENS - 13), (other, 2), saved=saved((12, 2), (64, 3)))
    run((own, 2))
    assert same_bits(np.concatenate(found), expected)
    for position, number, counts in ((4, 0, (1,)), (9, 1, (2,)), (12, 2, (1,)), (64, 3, (1, 3))):
        own, found = Sequence(ids, blocks, slot=7, computed=position), []
        run((Sequence([NUM_TOKENS] * 3, blocks, slot=7), 3))
        restored = (Snapshot(7, 0, position, number),)
        for count in counts:
            run((own, count), restored=restored)
            restored = ()
        assert same_bits(np.concatenate(found), expected[position : own.computed])


def test_snapshots_go_out_and_come_back() -> None:
    one = OneOp(random_inputs(16, 2, 2), delta)
    ids, make_one = list(range(12)), partial(interpreted, num_snapshots=2)
    paged, other = (Paged(one.program, one.weights, make=make_one) for _ in range(2))
    sequence = paged.sequence(ids)
    step(paged, [(sequence, 10)], saved=(Snapshot(sequence.slot, 0, 10, 1),))
    expected = step(paged, [(sequence, 2)])[0]
    (content,) = paged.backend.read_blocks(0, [1])
    assert len(content) == paged.backend.block_bytes(0) == one.program.caches[0].snapshot_bytes
    other.backend.write_blocks(0, [0], [content])
    moved = Sequence(ids, sequence.blocks, slot=3, computed=10)
    assert same_bits(step(other, [(moved, 2)], restored=(Snapshot(3, 0, 10, 0),))[0], expected)


def test_what_has_no_kernels_is_refused() -> None:
    b = Builder()
    x = b.embed(W / "e", 4, 601)
    with pytest.raises(ConfigError, match="states of 300 numbers"):
        require_kernels(b.program(b.state_space(x, b.slice(x, 0, 1), W, 1, 300)), {})
    b = Builder()
    x = b.embed(W / "e", 4, 16)
    gates = (b.slice(x, 0, 2), b.slice(x, 2, 2))
    with pytest.raises(ConfigError, match="negative eigenvalues"):
        require_kernels(b.program(b.delta_rule(x, *gates, W, 1, 5, beta_factor=2.0)), {})
    b = Builder()
    x = b.embed(W / "e", 4, 16)
    rounded = b.program(b.short_convolution(x, W / "conv", 4, "bfloat16"))
    with pytest.raises(ConfigError, match="keeps states in float32"):
        interpreted(rounded, random_weights(rounded), num_blocks=[1] * 2, block_size=16)


SMALL = {"linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 4}


@pytest.mark.parametrize(("family", "others"), [("lfm2", {}), ("qwen3_5", SMALL)])
def test_engines(
    family: str, others: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests by themselves; in chunks, in company, two steps in flight; from snapshots, with drafts.

    Blocks for the last engine are too few for all requests, so that one is preempted.
    """
    config, restored = wide_config(family, **others), list[str]()
    model, params = write_checkpoint(tmp_path, config), [replace(one, max_tokens=8) for one in PARAMS]
    launch = InterpretedAccelerator.launch
    monkeypatch.setattr(
        InterpretedAccelerator, "launch", lambda own, one: (restored.append(one.kernel), launch(own, one))
    )
    llm = make(model, enable_prefix_caching=False, max_num_seqs=1)
    alone = [fingerprint(output) for output in ask(llm, params)]
    llm.close()
    llm = make(model, max_num_batched_tokens=12, max_steps_in_flight=2)
    for _ in range(2):
        assert [fingerprint(output) for output in ask(llm, params)] == alone
    assert "restore_states" in restored
    llm.close()
    memory = read_model(config).program.kv_token_bytes(4) * 4 * 8  # four blocks
    few = {"kv_cache_memory_bytes": memory, "max_model_len": 24, "enable_prefix_caching": False}
    llm = make(model, speculative="auto", max_num_seqs=3, **few)
    assert [fingerprint(output) for output in ask(llm, params)] == alone
    assert llm.engine.scheduler.num_preemptions > 0
    llm.close()
