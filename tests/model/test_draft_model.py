"""A draft model on the block tables of its target: it is right wherever it can be, and changes no output."""

from __future__ import annotations

from typing import Any

import drafted
import pytest
from drafted import PARAMS, PLAIN, TEXTS, Drafts, on_reference, proposed
from test_state import hybrid
from tiny import CONFIGS

from quire.backends.draft_model import SharedTable, shared_table
from quire.backends.null import NullBackend
from quire.backends.reference import ReferenceBackend
from quire.errors import ConfigError
from quire.models import read_model
from quire.program import Program

COMPUTE = ReferenceBackend.compute


def program(name: str, **changed: Any) -> Program:
    return read_model({**CONFIGS[name], **changed}).program


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral", "gpt2", "qwen3_moe", "llama-dynamic"])
def test_a_model_that_drafts_for_itself(name: str) -> None:
    drafted.check_itself(on_reference, name, PLAIN)


@pytest.mark.parametrize("name", PARAMS)
def test_it_draws_as_its_target_will(name: str) -> None:
    drafted.check_itself(on_reference, "llama", PARAMS[name])


@pytest.mark.parametrize(
    ("params", "name", "drafter"),
    [
        *(("greedy", *pair) for pair in (("llama", "gemma3"), ("gemma3", "llama"), ("mixtral", "gpt2"))),
        ("penalized", "gemma3", "llama"),
    ],
)
def test_another_model_changes_nothing(name: str, drafter: str, params: str) -> None:
    drafts = drafted.check_same_outputs(on_reference, name, drafter, PARAMS[params])
    assert drafts.num_accepted < drafts.num_drafted


def test_what_it_proposes_follows_from_the_tokens() -> None:
    drafted.check_no_memory(on_reference)


def test_those_that_lack_least_come_first() -> None:
    drafted.check_order(on_reference)


def test_it_catches_up() -> None:
    drafted.check_lag(on_reference, "llama")


def test_it_computes_no_more_tokens_in_a_step_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    llama, counts = program("llama"), []
    monkeypatch.setattr(
        ReferenceBackend,
        "compute",
        lambda self, batch: counts.append(batch.num_tokens) or COMPUTE(self, batch),
    )
    drafts = Drafts(llama, on_reference(llama, llama, max_tokens=9))
    sequences = [drafts.admit(slot, TEXTS[slot]) for slot in (0, 2)]
    drafts.step([(sequences[0], 70), (sequences[1], 23)], 2)
    for _ in range(14):
        drafts.step([(one, 1) for one in sequences], 2)
    assert counts[0] == 93
    assert max(counts[1:]) == 9


@pytest.mark.parametrize("known", [True, False])
def test_cached_blocks(known: bool) -> None:
    drafted.check_prefix(on_reference, known)


def test_replaced_blocks() -> None:
    drafted.check_replaced_blocks(on_reference)


def test_used_blocks() -> None:
    drafted.check_used_blocks(on_reference)


def test_other_vocabularies() -> None:
    drafted.check_vocabularies(on_reference)


def test_the_longest_context() -> None:
    drafted.check_longest(on_reference)


def test_blocks_that_left_the_window() -> None:
    drafted.check_window(on_reference)


def test_the_table_that_reaches_back_farthest_is_shared() -> None:
    assert shared_table(program("gemma3"), program("llama")) == SharedTable(1, None, None)
    assert shared_table(program("gemma3"), program("mistral")) == SharedTable(1, None, 20)
    assert shared_table(program("mistral", sliding_window=30), program("mistral")) == SharedTable(0, 30, 20)


def test_models_that_cannot_share() -> None:
    with pytest.raises(ConfigError, match="looks back at 20 tokens, but the model keeps no more than 19"):
        shared_table(program("mistral", sliding_window=19), program("mistral"))
    with pytest.raises(ConfigError, match="looks back at all tokens"):
        shared_table(program("mistral"), program("llama"))
    with pytest.raises(ConfigError, match="recurrent states"):
        shared_table(program("llama"), hybrid())


def test_without_a_draft_model_nothing_is_proposed() -> None:
    llama = program("llama")
    for backend in (on_reference(llama), NullBackend(llama, lambda spec: 4 * spec.size, 4, 16)):
        drafts = Drafts(llama, backend)
        sequence = drafts.admit(0, TEXTS[2])
        assert proposed(drafts.step([(sequence, 23)], 3)[0]) == ()
