"""Which models to load, to close and to unload: a decision from their states alone.

A model that is asked for is loaded if the limit has room for it. Otherwise others make room, those used least
recently first: at once if they have no requests, else when these have ended. A model that is to make room
takes no new requests meanwhile, but not before it had its turn, so two models that do not fit together
alternate and neither starves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

TURN_S = 10.0  # at least, from the time a model is loaded until it takes no more requests for another's sake

State = Literal["unloaded", "loading", "loaded", "unloading"]


@dataclass(frozen=True, slots=True)
class Need:
    """The memory of a loaded model. Models with the same `weights` share those bytes."""

    weights: str
    weight_bytes: int
    other_bytes: int  # KV cache and activations

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.other_bytes


@dataclass(frozen=True, slots=True)
class Standing:
    """State of a model, as far as the policy needs it. Times are of one clock, in seconds.

    `num_users` requests are open in it; `waits_since_s` is the arrival of the first that waits for it, if one
    does. It was loaded at `loaded_s`, which took `load_s`, and used last at `used_s`; without requests it is
    unloaded `idle_unload_s` later.
    """

    need: Need
    state: State = "unloaded"
    num_users: int = 0
    waits_since_s: float | None = None
    used_s: float = 0.0
    loaded_s: float = 0.0
    load_s: float = 0.0
    idle_unload_s: float = 300.0

    @property
    def turn_end_s(self) -> float:
        """When it has had its turn: one at least as long as it took to load."""
        return self.loaded_s + max(TURN_S, self.load_s)


@dataclass(slots=True)
class Arrangement:
    """Models to load and to unload now, and those that take no new requests for the time being.

    `wake_s` is when to decide again if nothing else happens before.
    """

    load: list[str] = field(default_factory=list)
    unload: list[str] = field(default_factory=list)
    closed: set[str] = field(default_factory=set)
    wake_s: float | None = None

    def wake(self, when_s: float) -> None:
        """Decide again at this time, if not before."""
        self.wake_s = when_s if self.wake_s is None else min(self.wake_s, when_s)


def nbytes(needs: Iterable[Need]) -> int:
    """Return the memory of these models together."""
    needs = list(needs)
    weights = {need.weights: need.weight_bytes for need in needs}
    return sum(weights.values()) + sum(need.other_bytes for need in needs)


def decide(models: Mapping[str, Standing], limit_bytes: int, now_s: float) -> Arrangement:
    """Return what to do with the models now. Those asked for are loaded in the order of their first requests.

    None overtakes one that waits for room: a large model would wait for ever behind small ones.
    """
    decision = Arrangement()
    _unload_idle(decision, models, now_s)
    held = {name: one for name, one in models.items() if one.state != "unloaded"}
    asked = {name: one.waits_since_s for name, one in models.items() if one.state == "unloaded"}
    for name, _ in sorted(((n, since) for n, since in asked.items() if since is not None), key=_second):
        if _fits(models[name], held, limit_bytes):
            decision.load.append(name)
            held[name] = models[name]
        else:
            _make_room(decision, models[name], held, limit_bytes, now_s)
            break
    return decision


def _second(pair: tuple[str, float]) -> float:
    return pair[1]


def _fits(model: Standing, held: Mapping[str, Standing], limit_bytes: int) -> bool:
    return nbytes([model.need, *(one.need for one in held.values())]) <= limit_bytes


def _unload_idle(decision: Arrangement, models: Mapping[str, Standing], now_s: float) -> None:
    for name, one in models.items():
        if one.state != "loaded" or one.num_users or one.waits_since_s is not None:
            continue
        if one.used_s + one.idle_unload_s <= now_s:
            decision.unload.append(name)
        else:
            decision.wake(one.used_s + one.idle_unload_s)


def _make_room(
    decision: Arrangement, model: Standing, held: Mapping[str, Standing], limit_bytes: int, now_s: float
) -> None:
    """Unload or close models until what is left has room for this one."""
    left = {
        name: one for name, one in held.items() if one.state != "unloading" and name not in decision.unload
    }
    loaded = [name for name in left if left[name].state == "loaded"]
    for name in sorted(loaded, key=lambda one: (held[one].num_users > 0, held[one].used_s)):
        if _fits(model, left, limit_bytes):
            return
        one = left[name]
        if one.turn_end_s > now_s and (one.num_users or one.waits_since_s is not None):
            decision.wake(one.turn_end_s)
        elif one.num_users:
            decision.closed.add(name)
        else:
            decision.unload.append(name)
        del left[name]
