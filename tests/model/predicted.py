"""Prediction layers that draft, on any backend, against their formula over whole sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from drafted import BLOCKS, PARAMS, PLAIN, SIZE, SLOTS, TEXTS, Drafts, check_equal, proposed
from driver import DrivenSequence
from tiny import CONFIGS, VOCAB, Dense, random_weights, tiny

from quire.backends.backend import Backend
from quire.backends.draft_model import DraftModel
from quire.backends.reference import ReferenceBackend
from quire.models import read_model, read_prediction
from quire.program import Program
from quire.program.batch import Batch
from quire.program.passes import fuse, hand_out_hidden

Proposed = tuple[int, int, tuple[int, ...]]  # slot, known tokens, drafts
FAMILIES = ("qwen3_next", "qwen3_5", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe")


class Make(Protocol):
    """Makes a backend for a program, drafted for by a layer if there is one; the weights are of both."""

    def __call__(
        self, program: Program, layer: Program | None, weights: dict[str, Dense], **how: Any
    ) -> Backend: ...


def programs(name: str) -> tuple[Program, Program, dict[str, Dense]]:
    """A model that hands out its hidden states, its prediction layer, and weights for both."""
    program = hand_out_hidden(fuse(tiny(name).program))
    layer = read_prediction(CONFIGS[name], lambda tensor: False)
    assert program is not None
    assert layer is not None
    layer = fuse(layer)
    return program, layer, random_weights(replace(program, ops=(*program.ops, *layer.ops)))


def on_reference(
    program: Program,
    layer: Program | None,
    weights: dict[str, Dense],
    *,
    max_tokens: int = 512,
    num_blocks: int = BLOCKS,
) -> ReferenceBackend:
    return ReferenceBackend(
        program,
        weights,
        num_blocks=[num_blocks] * len(program.cache_groups),
        block_size=SIZE,
        num_slots=SLOTS,
        draft=None if layer is None else DraftModel(layer, None, max_tokens, 256),
    )


def whole(tokens: list[int], start: int, groups: int, hidden: np.ndarray | None = None) -> Batch:
    """A row of tokens from a position on, with logits of all."""
    count = len(tokens)
    return Batch(
        token_ids=np.array(tokens),
        positions=np.arange(start, start + count),
        row_offsets=np.array([0, count]),
        block_tables=(np.arange(BLOCKS)[None],) * groups,
        context_lens=np.array([start + count]),
        slots=np.array([0]),
        variants=np.array([0]),
        logit_rows=np.arange(count),
        block_size=SIZE,
        hidden=hidden,
    )


def by_formula(
    program: Program, layer: Program, weights: dict[str, Dense], tokens: list[int], wanted: dict[int, int]
) -> dict[int, tuple[int, ...]]:
    """The greedy drafts of so many tokens as are `wanted`, by known ones: without blocks, steps or lag.

    All states are computed at once; then each position goes on with the layer's own states, the last first,
    so that none reads what another one has written.
    """
    target = on_reference(program, None, weights)
    _, hidden = target.compute(whole(tokens, 0, len(program.cache_groups)))
    assert hidden is not None
    drafter, groups = on_reference(layer, None, weights), len(layer.cache_groups)
    before = np.concatenate([np.zeros_like(hidden[:1]), kept(hidden[:-1])])
    logits, own = drafter.compute(whole(tokens, 0, groups, before))
    assert own is not None
    found = {}
    for num_known, count in sorted(wanted.items(), reverse=True):
        position = num_known - 1
        drafts, state = [int(logits[position].argmax())], own[position : position + 1]
        while len(drafts) < count:
            one = whole(drafts[-1:], position + len(drafts), groups, kept(state))
            further, state = drafter.compute(one)  # type: ignore[assignment]
            drafts.append(int(further[0].argmax()))
        found[num_known] = tuple(drafts)
    return found


def kept(hidden: np.ndarray) -> np.ndarray:
    """Hidden states as they are kept."""
    return hidden.astype(ml_dtypes.bfloat16).astype(np.float32)


def run(drafts: Drafts, sequences: list[DrivenSequence], length: int, chunk: int = 999) -> list[Proposed]:
    """Give every sequence so many tokens; return what was proposed: slot, known tokens, drafts."""
    found = []
    while left := [one for one in sequences if len(one.tokens) < length]:
        rows = [(one, min(chunk, len(one.tokens) - one.computed)) for one in left]
        results = drafts.step(rows, (3, 3, 0, 1)[drafts.num_steps % 4])
        found += [
            (one.slot, len(one.tokens), proposed(result))
            for one, result in zip(left, results, strict=True)
            if proposed(result)
        ]
    return found


def check_formula(make: Make, name: str, chunk: int, max_tokens: int = 512) -> None:
    """Whatever the chunks, refused tokens and lag: what is proposed is what the formula gives."""
    program, layer, weights = programs(name)
    plain = Drafts(program, make(program, None, weights))
    wanted = [plain.admit(slot, text) for slot, text in enumerate(TEXTS)]
    plain.run(wanted, 84, 0)
    drafts = Drafts(program, make(program, layer, weights, max_tokens=max_tokens))
    sequences = [drafts.admit(slot, text) for slot, text in enumerate(TEXTS)]
    found = run(drafts, sequences, 80, chunk)
    check_equal(sequences, wanted)
    assert drafts.num_drafted > drafts.num_accepted
    assert len(found) > 50
    check_found(found, sequences, program, layer, weights)


def check_found(
    found: list[Proposed],
    sequences: list[DrivenSequence],
    program: Program,
    layer: Program,
    weights: dict[str, Dense],
) -> None:
    for one in sequences:
        own = {num_known: drafted for slot, num_known, drafted in found if slot == one.slot}
        wanted = {num_known: len(drafted) for num_known, drafted in own.items()}
        assert own == by_formula(program, layer, weights, one.tokens, wanted)


def check_drawn(make: Make, name: str, params: str) -> None:
    """Drawn tokens are those without drafts."""
    program, layer, weights = programs(name)
    outputs = []
    for used in (None, layer):
        drafts = Drafts(program, make(program, used, weights))
        sequences = [drafts.admit(slot, text, PARAMS[params]) for slot, text in enumerate(TEXTS)]
        drafts.run(sequences, 90, 0 if used is None else 3, 13)
        outputs.append(sequences)
    check_equal(outputs[1], outputs[0])
    assert drafts.num_drafted > 100


def check_prefix(make: Make, known: bool) -> None:
    """Sequences on cached blocks are drafted for as if they had computed them, known to the layer or not."""
    program, layer, weights = programs("glm4_moe")
    drafts = Drafts(program, make(program, layer, weights))
    first = drafts.admit(0, TEXTS[0], PLAIN)
    drafts.step([(first, 70)], 3 if known else 0)
    others = [drafts.admit(slot, [*TEXTS[0][:64], slot, 3, 7], start=64, shared=first) for slot in (1, 2)]
    found = run(drafts, [*others, first], 90)
    assert {slot for slot, _, _ in found} == {0, 1, 2}
    check_found(found, [first, *others], program, layer, weights)


def check_replaced(make: Make) -> None:
    """Nothing is left of what blocks had before their contents were replaced; no output changes."""
    program, layer, weights = programs("glm4_moe")
    backend = make(program, layer, weights)
    drafts = Drafts(program, backend)
    first, other = drafts.admit(0, TEXTS[0]), drafts.admit(1, [(t + 1) % VOCAB for t in TEXTS[0]])
    drafts.step([(first, 70), (other, 70)], 3)
    own, others = first.blocks[0][:4], other.blocks[0][:4]
    drafts.driver.release(other)
    backend.write_blocks(0, others, backend.read_blocks(0, own))
    again = drafts.admit(2, TEXTS[0], start=64, shared=other)
    drafts.run([again, first], 100)
    assert first.tokens[:100] == again.tokens[:100]


def counting(name: str) -> tuple[Program, Program, dict[str, Dense]]:
    """A model that gives token t + 1 after t, and a layer that knows it from the hidden state before t alone.

    All of a layer but its residual is zero, so a draft is right only if it is made of the right state.
    """
    raw = {**CONFIGS[name], "vocab_size": 24, "hidden_size": 24}
    program, layer = (
        hand_out_hidden(fuse(read_model(raw).program)),
        read_prediction(raw, lambda tensor: False),
    )
    assert program is not None
    assert layer is not None
    layer = fuse(layer)
    weights = random_weights(replace(program, ops=(*program.ops, *layer.ops)))
    after = np.roll(np.eye(24, dtype=np.float32), 1, axis=0)  # after @ unit vector t = unit vector t + 1
    for key, weight in weights.items():
        if "norm" in key:
            value = np.full(weight.shape, 0.0 if "qwen" in name else 1.0)
        elif "embed_tokens" in key:
            value = np.eye(24)
        elif "lm_head" in key:
            value = 4 * after
        elif key.endswith(("eh_proj.weight", "fc.weight")):
            value = np.concatenate([np.zeros((24, 24)), after], axis=1)
        else:
            value = np.zeros(weight.shape)
        weights[key] = Dense(value.astype(np.float32))
    return program, layer, weights


def check_accepted(make: Make, name: str) -> None:
    """A layer that is right is accepted at every position, greedy and drawn."""
    program, layer, weights = counting(name)
    for params in (PLAIN, PARAMS["likely"]):
        drafts = Drafts(program, make(program, layer, weights))
        sequences = [drafts.admit(slot, [3, 4, 5, 6 + slot, 7 + slot], params) for slot in (0, 1)]
        drafts.run(sequences, 60, 3, 2)
        if params is PLAIN:
            assert drafts.num_accepted == drafts.num_drafted > 60
            assert drafts.num_steps < 40
        assert drafts.num_accepted > 0.5 * drafts.num_drafted
