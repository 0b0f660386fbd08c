"""A step's rows sampled by the native core, against the pipeline in NumPy row by row."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from every_parameter import EVERYTHING
from sampled import EOS, Case, admit, assert_same, expected, run

from quire.backends.native import _core
from quire.backends.native.sampling import row_results
from quire.sampling.logprobs import position_logprobs
from quire.sampling.philox import uniform
from quire.sampling.pipeline import SamplerState, sample
from quire.sampling_params import SamplingParams
from quire.types import Admission, RowResult, TokenLogprob

BATCH = 24


def mask_of(allowed: np.ndarray) -> np.ndarray:
    padded = np.zeros(-(-len(allowed) // 32) * 32, np.uint8)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.uint32)


# Random rows --------------------------------------------------------------------------------------------


def random_logits(rng: np.random.Generator, size: int) -> np.ndarray:
    normal = rng.normal(size=size)
    match rng.integers(12):
        case 0:
            normal = np.round(normal * 2)  # ties everywhere
        case 1:
            normal[rng.random(size) < 0.5] = -np.inf
        case 2:
            normal *= 30
        case 3:
            normal = normal * 1e-3 + 5
        case 4:
            normal = np.zeros(size)
        case 5:
            normal[rng.integers(size)] = 60
        case 6 if rng.random() < 0.3:
            normal[rng.integers(size)] = rng.choice([np.nan, np.inf, -np.inf])
        case 7 if rng.random() < 0.2:
            normal[:] = -np.inf
        case _:
            normal *= 3
    return normal.astype(np.float32)


def random_mask(rng: np.random.Generator, size: int) -> np.ndarray | None:
    match rng.integers(6):
        case 0:
            return None
        case 1:
            return mask_of(np.arange(size) == EOS)
        case 2:
            return mask_of(rng.random(size) < 3 / size)
        case 3:
            return mask_of(np.ones(size, bool))
        case _:
            return mask_of(rng.random(size) < 0.5)


def random_params(rng: random.Random, size: int) -> SamplingParams:
    def some(share: float, value: Any) -> dict[str, Any]:
        name, makes = value
        return {name: makes()} if rng.random() < share else {}

    def ids(count: int) -> list[int]:
        return [rng.randrange(size) for _ in range(count)]

    return SamplingParams(
        seed=rng.randint(-(2**63) + 2, 2**63 - 1),
        max_tokens=None,
        **some(0.7, ("temperature", lambda: rng.choice([0, 0, 0.3, 0.8, 2.0, 1e-9]))),
        **some(0.3, ("top_k", lambda: rng.choice([1, 5, 40, 333, 10**6]))),
        **some(0.5, ("top_p", lambda: rng.choice([1e-9, 0.3, 0.9, 0.99, 1 - 1e-12]))),
        **some(0.2, ("min_p", lambda: rng.choice([0.01, 0.2]))),
        **some(0.3, ("presence_penalty", lambda: rng.uniform(-2, 2))),
        **some(0.3, ("frequency_penalty", lambda: rng.uniform(-2, 2))),
        **some(0.3, ("repetition_penalty", lambda: rng.choice([0.7, 1.1, 1.3, 1.7, 1e-300]))),
        **some(0.2, ("logit_bias", lambda: {i: rng.uniform(-100, 100) for i in ids(5)})),
        **some(0.15, ("allowed_token_ids", lambda: [*ids(6), EOS])),
        **some(0.3, ("bad_words_token_ids", lambda: [ids(rng.randint(1, 3)) for _ in range(8)])),
        **some(0.2, ("stop_token_ids", lambda: ids(3))),
        **some(0.3, ("min_tokens", lambda: rng.randint(1, 8))),
        **some(0.3, ("logprobs", lambda: rng.choice([0, 1, 20, -1 if size < 2000 else 5]))),
        **some(0.3, ("prompt_logprobs", lambda: rng.choice([0, 2, 20, -1 if size < 2000 else 5]))),
    )


def random_case(seed: int, size: int) -> Case:
    """Tokens are few different ones, so that bad words complete and drafts are met."""
    rng, arrays = random.Random(seed), np.random.default_rng(seed)
    params = random_params(rng, size)
    few = [rng.randrange(size) for _ in range(4)]
    prompt, emitted = rng.choices(few, k=rng.randint(1, 9)), rng.choices(few, k=rng.randint(0, 7))
    case = Case(params, prompt, emitted, np.zeros((0, size), np.float32), rng.randrange(128))
    if params.prompt_logprobs is not None and rng.random() < 0.7:
        case.following = rng.choices(few, k=rng.randint(1, 3))
        case.samples = rng.random() < 0.6
    num_drafted = rng.choice([0, 0, 1, 3]) if case.samples else 0
    num_sampled = 1 + num_drafted if case.samples else 0
    rows = [random_logits(arrays, size) for _ in range(len(case.following) + num_sampled)]
    case.logits = np.stack(rows)
    if rng.random() < 0.4 and case.samples:
        case.masks = [random_mask(arrays, size) for _ in range(num_sampled)]
    for _ in range(num_drafted):  # mostly the token that the row gives after those drafted so far
        own = expected(case).token_ids
        guessed = len(own) > len(case.drafted) and rng.random() < 0.8
        case.drafted.append(own[-1] if guessed else rng.choice(few))
    return case


COUNTS = {5: 400, 40: 600, 1025: 600, 3000: 400}


@pytest.fixture(scope="module")
def random_rows() -> dict[int, list[tuple[Case, RowResult]]]:
    made = {
        size: [random_case(seed * 10_000 + size, size) for seed in range(n)] for size, n in COUNTS.items()
    }
    return {size: [(case, expected(case)) for case in cases] for size, cases in made.items()}


@pytest.fixture(params=_core.isas())
def isa(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("size", COUNTS)
def test_random_rows_give_what_the_definition_gives(random_rows: Any, isa: str, size: int) -> None:
    sampler = _core.Sampler(isa, size, BATCH, 2)
    rows = random_rows[size]
    for first in range(0, len(rows), BATCH):
        batch = rows[first : first + BATCH]
        results = run(sampler, [case for case, _ in batch])
        for got, (case, wanted) in zip(results, batch, strict=True):
            assert_same(got, wanted, case)


def test_the_random_rows_are_of_every_kind(random_rows: Any) -> None:
    """So that what is compared above is not all alike."""
    every = [pair for rows in random_rows.values() for pair in rows]
    messages = {result.error.message for _, result in every if result.error}
    assert len(messages) == 5, messages
    accepted = [len(result.token_ids) - 1 for case, result in every if case.drafted and result.token_ids]
    assert {0, 1, 2, 3} <= set(accepted)
    assert sum(case.masks is not None and not result.error for case, result in every) > 200
    assert sum(bool(result.prompt_logprobs) for _, result in every) > 100
    assert sum(len(entry) > 30 for _, result in every for entry in result.logprobs) > 20


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 1),
        ("temperature", 1.1),
        ("top_k", 2),
        ("top_p", 0.2),
        ("min_p", 0.5),
        ("presence_penalty", 2.0),
        ("frequency_penalty", 2.0),
        ("repetition_penalty", 2.0),
        ("logit_bias", {0: 9.0}),
        ("allowed_token_ids", [0, 1, 2]),
        ("bad_words_token_ids", [[1], [2], [4]]),
        ("min_tokens", 30),
    ],
)
def test_every_parameter_can_make_a_difference(name: str, value: Any) -> None:
    """The comparison fails if one were left out: with it, some tokens are others."""
    sampler = _core.Sampler(_core.isas()[0], 40, BATCH, 1)
    differ = 0
    for seed in range(40):
        arrays = np.random.default_rng(seed)
        logits = arrays.normal(size=(1, 40)).astype(np.float32)
        logits[0, EOS] += 2
        plain = SamplingParams(seed=seed, max_tokens=None)
        other = SamplingParams(**{"seed": seed, "max_tokens": None, name: value})
        pair = [Case(params, [1, 2, 7], [4, 4, 9, *range(20)], logits) for params in (plain, other)]
        one, two = run(sampler, pair)
        assert_same(two, expected(pair[1]))
        differ += one.token_ids != two.token_ids
    assert differ > 0


# Rows do not know of each other -------------------------------------------------------------------------


def test_batch_order_and_threads_do_not_matter(isa: str) -> None:
    cases = [random_case(seed, 1100) for seed in range(40)]
    alone = [run(_core.Sampler(isa, 1100, 1, 1), [case])[0] for case in cases]
    order = list(range(40))
    for threads in (1, 2, 5):
        random.Random(threads).shuffle(order)
        sampler = _core.Sampler(isa, 1100, 64, threads)
        for _ in range(3):
            results = run(sampler, [cases[i] for i in order], random.sample(range(64), 40))
            assert list(results) == [alone[i] for i in order]  # the bits of log-probabilities, too


def test_memory_of_a_row_does_not_matter(isa: str) -> None:
    case = random_case(5, 1003)
    case.params, case.logits = SamplingParams(seed=1, top_p=0.9, logprobs=5), case.logits[:1]
    case.drafted, case.following, case.samples, case.masks = [], [], True, None
    sampler = _core.Sampler(isa, 1003, 4, 1)
    admit(sampler, case.admission(0), case.prompt)
    results = []
    for offset in range(1, 5):
        admit(sampler, case.admission(offset % 4 or 1), case.prompt) if offset < 4 else None
        logits = np.full((6, 1003), np.nan, np.float32)
        logits[offset] = case.logits[0]
        slot = offset if offset < 4 else 0
        results.append(row_results(sampler.sample(logits, [(slot, 0, (), offset, (), None)])))
    assert len(set(results)) == 1


# State --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 1, 11, 29])
def test_a_slot_takes_note_of_its_tokens(cut: int) -> None:
    """Many steps, as the definition gives them; after a preemption, too."""
    params, prompt, rng = SamplingParams(seed=77, **EVERYTHING), [1, 2, 2, 8], np.random.default_rng(cut)
    rows = rng.normal(size=(30, 1, 12)).astype(np.float32)
    state = SamplerState(Admission(0, "r", 5, params, (EOS,), 4), prompt, 12)
    sampler, emitted = _core.Sampler(_core.isas()[0], 12, 2, 1), list[int]()
    admit(sampler, Admission(0, "r", 5, params, (EOS,), 4), prompt)
    slot = 0
    for step, logits in enumerate(rows):
        if step == cut:
            sampler.release(slot)
            slot = 1
            admit(sampler, Admission(slot, "r", 5, params, (EOS,), 4), [*prompt, *emitted])
        (got,) = row_results(sampler.sample(logits, [(slot, 0, (), 0, (), None)]))
        wanted = sample(logits[0], state)
        assert_same(got, wanted)
        state.extend(wanted.token_ids)
        emitted += wanted.token_ids


def test_drafts_change_nothing() -> None:
    """However many are guessed, and however well: the tokens are those that come one by one."""
    params, vocab_size, rng = SamplingParams(seed=3, **EVERYTHING), 12, random.Random(2)

    def logits_after(tokens: list[int]) -> np.ndarray:
        return np.random.default_rng(tokens).normal(size=vocab_size).astype(np.float32)

    def generate(guesses: bool) -> tuple[list[int], list[Any], int]:
        sampler = _core.Sampler(_core.isas()[0], vocab_size, 1, 2)
        admit(sampler, Admission(0, "r", 0, params, (EOS,), 2), [1, 2])
        known, listed, steps = [1, 2], [], 0
        while len(known) < 60:
            drafted = [one if rng.random() < 0.8 else 0 for one in right[len(known) :][:3]] if guesses else []
            logits = np.stack([logits_after(known + drafted[:i]) for i in range(len(drafted) + 1)])
            (got,) = row_results(sampler.sample(logits, [(0, 0, (), 0, drafted, None)]))
            known += got.token_ids
            listed += got.logprobs
            steps += 1
        return known[:60], listed[:58], steps

    right: list[int] = []
    right, listed, steps = generate(False)
    again, listed_again, fewer = generate(True)
    assert (again, listed_again) == (right, listed)
    assert fewer < 0.6 * steps


# Single matters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        {"top_p": 0.95},
        {"top_p": 0.5, "temperature": 2.0},
        {"top_p": 0.999, "temperature": 0.3},
        {},
        {"top_k": 50},
    ],
)
def test_a_whole_vocabulary(isa: str, values: dict[str, Any]) -> None:
    size = 128_256
    cases = []
    for seed, deviation in enumerate((1, 3, 12)):
        rng = np.random.default_rng(seed)
        logits = (rng.normal(size=(1, size)) * deviation).astype(np.float32)
        masks: list[Any] | None = [mask_of(rng.random(size) < 0.5)] if seed else None
        params = SamplingParams(seed=seed, repetition_penalty=1.1, **values)
        cases.append(Case(params, rng.integers(size, size=500).tolist(), [9], logits, masks=masks))
    for got, case in zip(run(_core.Sampler(isa, size, 3, 2), cases), cases, strict=True):
        assert_same(got, expected(case))


def test_the_draw_is_that_of_philox(isa: str) -> None:
    """Among equal logits the token says what the random number was."""
    sampler = _core.Sampler(isa, 100_003, 1, 1)
    for seed, sequence, length in [(0, 0, 1), (-1, 127, 5), (2**63 - 1, 3, 70_001), (-(2**63), 0, 2)]:
        params = SamplingParams(seed=seed if seed != -1 else -2)
        case = Case(params, [0] * length, [], np.zeros((1, 100_003), np.float32), sequence)
        u = uniform(params.seed or 0, sequence, length)
        assert run(sampler, [case])[0].token_ids == (int(u * 100_003),)


def test_bits_beyond_the_vocabulary_mean_nothing(isa: str) -> None:
    logits = np.arange(40, dtype=np.float32)[None]
    params = SamplingParams(seed=1, temperature=0)
    masks = [np.array([0, bits], np.uint32) for bits in (0xFFFFFF00, 0xFFFFFFFF, 0xFFFFFF01)]
    cases = [Case(params, [1], [], logits, masks=[mask]) for mask in masks]
    results = run(_core.Sampler(isa, 40, 3, 1), cases)
    assert [result.token_ids for result in results] == [(), (39,), (32,)]
    assert list(results) == [expected(case) for case in cases]


@pytest.mark.parametrize("k", [64, 65, 500, 5000, -1])
def test_any_number_of_logprobs(isa: str, k: int) -> None:
    sampler, rng = _core.Sampler(isa, 1500, 1, 1), np.random.default_rng(1)
    logits = np.round(rng.normal(size=(2, 1500)) * 2, 1).astype(np.float32)
    params = SamplingParams(seed=1)
    object.__setattr__(params, "logprobs", k)
    object.__setattr__(params, "prompt_logprobs", k)
    (got,) = run(sampler, [Case(params, [1], [], logits, following=[7])])
    assert_same(
        got,
        RowResult(
            got.token_ids,
            (position_logprobs(logits[1], got.token_ids[0], k),),
            (position_logprobs(logits[0], 7, k),),
        ),
    )


def test_results_without_extras_are_made_at_once() -> None:
    """The way of greedy rows gives what the general one gives."""
    cases = [Case(SamplingParams(seed=0), [1], [], np.eye(8, dtype=np.float32)[i : i + 1]) for i in range(8)]
    listed = SamplingParams(seed=0, logprobs=0)
    sampler = _core.Sampler(_core.isas()[0], 8, 9, 1)
    plain = run(sampler, cases)
    general = run(sampler, [*cases, Case(listed, [1], [], np.zeros((1, 8), np.float32))])
    assert plain == general[:8]
    assert isinstance(general[8].logprobs[0][0], TokenLogprob)
    assert math.isclose(general[8].logprobs[0][0].logprob, -math.log(8), rel_tol=1e-6)


def test_what_is_out_of_range_is_refused() -> None:
    sampler, logits = _core.Sampler(_core.isas()[0], 40, 2, 1), np.zeros((2, 40), np.float32)
    admission = Admission(1, "r", 0, SamplingParams(seed=0), (EOS,), 1)
    admit(sampler, admission, [1])
    good = (1, 0, (), 0, (), None)
    assert len(sampler.sample(logits, [good]).token_ids) == 1
    mask = np.zeros(2, np.uint32)
    for rows, problem in [
        ([(0, *good[1:])], "empty"),
        ([(2, *good[1:])], "empty"),
        ([good, good], "two rows"),
        ([(1, 0, (), 2, (), None)], "a row of logits is out of range"),
        ([(1, 0, (), 1, (4,), None)], "a row of logits is out of range"),
        ([(1, 1, (4, 4), -1, (), None)], "a row of logits is out of range"),
        ([(1, 0, (40,), 1, (), None)], "vocabulary"),
        ([(1, 0, (), 0, (), [mask, mask])], "one mask"),
        ([(1, 0, (), 0, (), [mask[:1]])], "one bit per token"),
        ([(1, 0, ())], "six fields"),
    ]:
        with pytest.raises(ValueError, match=problem):
            sampler.sample(logits, rows)
    for wrong in (logits.astype(np.float64), logits[0], np.zeros((2, 80), np.float32)[:, ::2]):
        with pytest.raises(TypeError):
            sampler.sample(wrong, [good])
    with pytest.raises(ValueError, match="vocabulary"):
        sampler.sample(logits[:, :39].copy(), [good])
    for slot, tokens in ((1, [1]), (2, [1]), (-1, [1]), (0, [40])):
        with pytest.raises(ValueError, match=r"slot|vocabulary"):
            admit(sampler, Admission(slot, "r", 0, SamplingParams(seed=0), (EOS,), 1), tokens)
    with pytest.raises(ValueError, match="empty"):
        sampler.release(0)
    with pytest.raises(ValueError, match="seed"):
        admit(sampler, Admission(0, "r", 0, SamplingParams(), (EOS,), 1), [1])
