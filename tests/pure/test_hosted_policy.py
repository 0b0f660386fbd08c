"""Which of several models are loaded, closed and unloaded."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from quire.server.hosted.policy import TURN_S, Need, Standing, decide, nbytes


def need(size: int, weights: str = "", shared: int = 0) -> Need:
    return Need(weights or f"{id(object())} {size}", shared, size - shared)


def loaded(size: int, **fields: object) -> Standing:
    return replace(Standing(need(size), "loaded"), **fields)  # type: ignore[arg-type]


def asked(size: int, since_s: float = 0.0) -> Standing:
    return Standing(need(size), waits_since_s=since_s)


def test_a_model_that_is_asked_for_is_loaded_where_it_fits() -> None:
    decision = decide({"a": asked(4), "b": Standing(need(4)), "c": loaded(6)}, 10, 0)
    assert (decision.load, decision.unload, decision.closed) == (["a"], [], set())


def test_shared_weights_count_once() -> None:
    needs = [need(10, "w", 8), need(9, "w", 8), need(5)]
    assert nbytes(needs) == 8 + 2 + 1 + 5


def test_the_idle_model_used_least_recently_makes_room() -> None:
    models = {
        "new": loaded(4, used_s=9),
        "old": loaded(4, used_s=5),
        "busy": loaded(2, used_s=1, num_users=1),
        "a": asked(4),
    }
    decision = decide(models, 10, 10)
    assert (decision.load, decision.unload, decision.closed) == ([], ["old"], set())


def test_a_model_in_use_is_closed_after_its_turn_and_never_unloaded() -> None:
    models = {"a": loaded(6, num_users=3, loaded_s=5), "b": asked(6)}
    early = decide(models, 10, 5)
    assert (early.unload, early.closed, early.wake_s) == ([], set(), 5 + TURN_S)
    late = decide(models, 10, 5 + TURN_S)
    assert (late.load, late.unload, late.closed) == ([], [], {"a"})


def test_a_turn_lasts_as_long_as_loading_did() -> None:
    models = {"a": loaded(6, num_users=1, load_s=60), "b": asked(6)}
    assert decide(models, 10, 59).closed == set()
    assert decide(models, 10, 60).closed == {"a"}


def test_what_leaves_makes_room_first() -> None:
    models = {"a": Standing(need(6), "unloading"), "b": loaded(4), "c": asked(6)}
    decision = decide(models, 10, 0)
    assert (decision.load, decision.unload) == ([], [])


def test_none_overtakes_one_that_waits_for_room() -> None:
    models = {"busy": loaded(6, num_users=1), "large": asked(10, 1), "small": asked(2, 2)}
    assert decide(models, 10, 3).load == []


def test_an_idle_model_is_unloaded_in_time() -> None:
    models = {"a": loaded(1, used_s=10), "b": loaded(1, used_s=10, num_users=1)}
    assert decide(models, 10, 309).wake_s == 310
    assert decide(models, 10, 309).unload == []
    assert decide(models, 10, 310).unload == ["a"]


@pytest.mark.parametrize("seed", range(8))
def test_nobody_starves_and_memory_keeps_its_limit(seed: int) -> None:
    """Requests for five models at random; each model can hold any number of them for a while."""
    rng, limit, now = random.Random(seed), 12, 0.0
    sizes = [rng.randint(1, 12) for _ in range(5)]
    models = {str(i): Standing(need(size, str(i))) for i, size in enumerate(sizes)}
    ends: dict[str, list[float]] = {name: [] for name in models}
    waiting: dict[str, list[float]] = {name: [] for name in models}
    longest_s = 0.0
    for _ in range(3000):
        now += 0.1
        name = rng.choice(list(models))
        if rng.random() < 0.5:
            waiting[name].append(now)
        for name, one in models.items():
            ends[name] = [end for end in ends[name] if end > now]
            state = one.state
            if state in ("loading", "unloading") and rng.random() < 0.2:
                state = "loaded" if state == "loading" else "unloaded"
                one = replace(one, loaded_s=now, used_s=now)
            first = min(waiting[name], default=None)
            models[name] = replace(one, state=state, num_users=len(ends[name]), waits_since_s=first)
        decision = decide(models, limit, now)
        for name, one in models.items():
            if name in decision.load:
                models[name] = replace(one, state="loading")
            elif name in decision.unload:
                assert not ends[name]
                models[name] = replace(one, state="unloading")
            elif one.state == "loaded" and name not in decision.closed and waiting[name]:
                longest_s = max(longest_s, now - min(waiting[name]))
                ends[name] += [now + rng.random() * 3 for _ in waiting[name]]
                waiting[name] = []
                models[name] = replace(models[name], used_s=now)
        assert nbytes(one.need for one in models.values() if one.state != "unloaded") <= limit
    still = max((now - min(times) for times in waiting.values() if times), default=0.0)
    assert max(longest_s, still) < 5 * (TURN_S + 10)
