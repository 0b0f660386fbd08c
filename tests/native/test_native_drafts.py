"""A draft model beside the native backend: what the reference backend's does, on every instruction set."""

from __future__ import annotations

from functools import partial

import drafted
import numpy as np
import pytest
from drafted import BLOCKS, PARAMS, SIZE, SLOTS, TEXTS, Drafts, on_reference, proposed
from lowered import ISAS, plain, planned, tensors
from tiny import random_weights, tiny

from quire.backends.draft_model import DraftModel
from quire.backends.native import _core
from quire.backends.native.backend import NativeBackend
from quire.backends.native.weights import Packed, load_packed
from quire.program import Program
from quire.program.passes import fuse
from quire.types import Admission, Failure, Grant, Row, Step


def packed(program: Program) -> Packed:
    checkpoint = tensors(random_weights(program), "f32")
    return load_packed(planned(program, checkpoint), isa=ISAS[0], nodes=_core.Nodes(1))


def on_native(
    program: Program,
    draft: Program | None = None,
    *,
    max_tokens: int = 512,
    max_len: int = 256,
    num_blocks: int = BLOCKS,
    isa: str = ISAS[0],
    num_threads: int = 2,
) -> NativeBackend:
    program, model = plain(fuse(program)), None
    if draft is not None:
        draft = plain(fuse(draft))
        own = packed(draft)
        model = DraftModel(draft, (own.matrices, own.vectors), max_tokens, max_len)
    own = packed(program)
    return NativeBackend(
        program,
        own.matrices,
        own.vectors,
        num_blocks=[num_blocks] * len(program.cache_groups),
        block_size=SIZE,
        kv_cache_dtype="float32",
        isa=isa,
        nodes=_core.Nodes(num_threads),
        max_num_seqs=SLOTS,
        ahead=True,
        draft=model,
    )


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral", "gpt2", "qwen3_moe", "llama-dynamic"])
def test_a_model_that_drafts_for_itself(name: str) -> None:
    drafted.check_itself(on_native, name, PARAMS["greedy"])


@pytest.mark.parametrize("isa", ISAS)
def test_on_every_instruction_set(isa: str) -> None:
    drafted.check_itself(partial(on_native, isa=isa, num_threads=1), "llama", PARAMS["drawn"])


@pytest.mark.parametrize("name", PARAMS)
def test_it_draws_as_its_target_will(name: str) -> None:
    drafted.check_itself(on_native, "llama", PARAMS[name])


@pytest.mark.parametrize(("name", "drafter"), [("llama", "gemma3"), ("gemma3", "llama"), ("mixtral", "gpt2")])
@pytest.mark.parametrize("params", ["greedy", "penalized"])
def test_another_model_changes_nothing(name: str, drafter: str, params: str) -> None:
    drafts = drafted.check_same_outputs(on_native, name, drafter, PARAMS[params])
    assert drafts.num_accepted < drafts.num_drafted


@pytest.mark.parametrize("params", ["greedy", "constrained", "penalized"])
@pytest.mark.parametrize("max_tokens", [512, 9])
def test_it_proposes_what_the_reference_backend_does(params: str, max_tokens: int) -> None:
    """Token for token, also while it lags and where some tokens are proposed and others not."""
    pairs = []
    for make in (on_native, on_reference):
        program, draft = tiny("llama").program, tiny("qwen3").program
        drafts = Drafts(program, make(program, draft, max_tokens=max_tokens))
        sequences = [drafts.admit(slot, text, PARAMS[params]) for slot, text in enumerate(TEXTS)]
        found = []
        for number in range(30):
            rows = [(one, min(30, len(one.tokens) - one.computed)) for one in sequences]
            found.append([*map(proposed, drafts.step(rows, (3, 0, 5, 1)[number % 4]))])
        pairs.append(found)
    assert pairs[0] == pairs[1]
    assert 20 < sum(any(tokens) for tokens in pairs[0]) < 30


def test_what_it_proposes_follows_from_the_tokens() -> None:
    drafted.check_no_memory(on_native)


def test_those_that_lack_least_come_first() -> None:
    drafted.check_order(on_native)


def test_it_catches_up() -> None:
    drafted.check_lag(on_native, "llama")


@pytest.mark.parametrize("known", [True, False])
def test_cached_blocks(known: bool) -> None:
    drafted.check_prefix(on_native, known)


def test_replaced_blocks() -> None:
    drafted.check_replaced_blocks(on_native)


def test_used_blocks() -> None:
    drafted.check_used_blocks(on_native)


def test_other_vocabularies() -> None:
    drafted.check_vocabularies(on_native)


def test_the_longest_context() -> None:
    drafted.check_longest(on_native)


def test_blocks_that_left_the_window() -> None:
    drafted.check_window(on_native)


def test_rows_with_masks_are_drafted_for_and_failed_ones_are_not() -> None:
    """Their tokens are known only when the step is collected."""
    program, results = tiny("llama").program, []
    for make in (on_native, on_reference):
        backend = make(program, program)
        rows = tuple(Row(slot, 0, len(text), tuple(text)) for slot, text in enumerate(TEXTS))
        admitted = tuple(
            Admission(slot, str(slot), 0, PARAMS["greedy"], (), len(text)) for slot, text in enumerate(TEXTS)
        )
        granted = tuple(Grant(slot, 0, 0, tuple(range(8 * slot, 8 * slot + 8))) for slot in range(4))
        only = np.array([1 << 7], np.uint32)  # this token alone
        masks = {0: [only], 2: Failure("no mask")}
        step = Step(0, rows, admitted, granted, num_proposed=3)
        result = backend.launch(step, lambda masks=masks: masks).result()
        assert result.rows[0].token_ids == (7,)
        assert [len(proposed(row)) for row in result.rows] == [3, 3, 0, 3]
        assert 0 < result.draft_s < result.ended_s - result.began_s
        results.append([*map(proposed, result.rows)])
    assert results[0] == results[1]
