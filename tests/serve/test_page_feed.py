"""The feed of the page by itself: who gets which frames when, and what the engine is asked for."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine.status import EngineStatus, StepReport
from quire.engine.view import StepView, View
from quire.errors import Overloaded
from quire.server.page import feed as feeds
from quire.server.page import parts
from quire.server.page.feed import MAX_VIEWERS, NUM_STEPS, Feed
from quire.step_record import Record


class Watched:
    """A feed over an engine that does what a test says."""

    def __init__(self) -> None:
        self.asked: list[bool] = []  # to watch, or no longer
        self.status = EngineStatus(state="ready")
        engine = SimpleNamespace(status=self.status, watch=self.asked.append)
        service: Any = SimpleNamespace(
            engine=engine,
            first_status=self.status,
            replicas=None,
            tag=lambda request_id: f"<{request_id}>",
            started_s=time.monotonic(),
            names=("demo",),
        )
        self.feed = Feed(service)
        self.num_steps = 0

    def step(self, count: int = 1, viewed: bool = True) -> None:
        """End so many steps, and report each."""
        for _ in range(count):
            record = Record(self.num_steps, 1, 1, 0, 9, 0, 0, 0.1)
            shown = StepView(self.num_steps, 1.0, 2.0, [(0, 7, 1, 5, 1, 0, 0, "a")])
            report = StepReport(record, 1, 0, 9, None, View([shown], None) if viewed else None)
            self.num_steps += 1
            self.status.take_report(report)
            self.feed.take_report(report)

    def viewer(self, may_experiment: bool = False) -> AsyncGenerator[bytes, None]:
        return self.feed.frames(may_experiment)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "FRAME_S", 0.002)
    monkeypatch.setattr(parts.ServerFacts, "of", lambda service, may: {"experiments": may})


def run(check: Callable[[Watched], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(check(Watched()), 20)

    asyncio.run(main())


def indices(frame: bytes) -> list[int]:
    return [step["index"] for step in json.loads(frame).get("steps", [])]


def test_the_engine_is_watched_while_there_is_a_viewer() -> None:
    async def check(own: Watched) -> None:
        own.step(3)
        assert own.asked == []
        assert not own.feed._steps
        viewers = [own.viewer() for _ in range(3)]
        for one in viewers:
            await anext(one)
        assert own.asked == [True]
        for one in viewers:
            await one.aclose()
        assert own.asked == [True, False]
        own.step()
        assert own.feed._timer is None
        assert len(own.feed._steps) == 3
        again = own.viewer()
        assert indices(await anext(again)) == [0, 1, 2, 3]
        assert own.asked == [True, False, True]
        await again.aclose()

    run(check)


def test_a_first_frame_has_all_and_the_next_what_has_changed() -> None:
    async def check(own: Watched) -> None:
        own.step(2)
        viewer = own.viewer()
        first = json.loads(await anext(viewer))
        assert first.keys() == {"t", "facts", "law", "counts", "cache", "steps"}
        assert (first["law"], first["cache"]) == (None, None)
        assert [step["rows"] for step in first["steps"]] == [None, None]
        own.step()
        second = json.loads(await anext(viewer))
        assert second.keys() == {"t", "counts", "steps"}
        assert second["counts"]["num_tokens"] == 3
        (step,) = second["steps"]
        assert (step["index"], step["rows"]) == (2, [[0, 7, 1, 5, 1, 0, 0, "<a>"]])
        assert step["ended_s"] - step["began_s"] == 1.0
        assert step["flops"] is None  # the costs of this engine are not known
        await viewer.aclose()

    run(check)


def test_all_viewers_get_the_same_bytes() -> None:
    async def check(own: Watched) -> None:
        viewers = [own.viewer() for _ in range(4)]
        for _ in range(3):
            frames = await asyncio.gather(*(anext(one) for one in viewers))
            assert all(frame is frames[0] for frame in frames)
            own.step()
        for one in viewers:
            await one.aclose()

    run(check)


def test_only_who_may_experiment_is_told_so() -> None:
    async def check(own: Watched) -> None:
        viewers = [own.viewer(may) for may in (False, True)]
        frames = await asyncio.gather(*(anext(one) for one in viewers))
        assert [json.loads(frame)["facts"]["experiments"] for frame in frames] == [False, True]
        for one in viewers:
            await one.aclose()

    run(check)


def test_nothing_is_kept_for_a_viewer_that_does_not_read() -> None:
    async def check(own: Watched) -> None:
        slow, quick = own.viewer(), own.viewer()
        await asyncio.gather(anext(slow), anext(quick))
        told: list[int] = []
        for _ in range(40):
            own.step(50)
            told += indices(await anext(quick))
        assert told == list(range(2000))
        assert len(own.feed._frames) == 1
        missed = indices(await anext(slow))
        assert missed == list(range(2000 - NUM_STEPS, 2000))
        own.step()
        assert indices(await anext(slow)) == [2000]
        await slow.aclose()
        await quick.aclose()

    run(check)


def test_steps_that_are_not_viewed_are_left_out() -> None:
    async def check(own: Watched) -> None:
        viewer = own.viewer()
        await anext(viewer)
        own.step(5, viewed=False)
        own.step()
        assert indices(await anext(viewer)) == [5]
        await viewer.aclose()

    run(check)


def test_frames_keep_their_distance() -> None:
    async def check(own: Watched) -> None:
        viewer, times = own.viewer(), list[float]()
        end_s = time.monotonic() + 0.2
        while time.monotonic() < end_s:
            own.step()
            times.append(json.loads(await anext(viewer))["t"])
        assert min(b - a for a, b in pairwise(times)) >= 0.0019
        await viewer.aclose()

    run(check)


def test_a_silence_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "LOOK_S", 0.005)
    monkeypatch.setattr(feeds, "QUIET_S", 0.02)

    async def check(own: Watched) -> None:
        viewer = own.viewer()
        await anext(viewer)
        assert json.loads(await anext(viewer)).keys() == {"t"}
        own.status.take_death()  # which no report tells
        own.status.state = "restarting"
        frame: dict[str, Any] = {}
        while "counts" not in frame:
            frame = json.loads(await anext(viewer))
        assert frame["counts"]["state"] == "restarting"
        await viewer.aclose()

    run(check)


def test_there_may_be_too_many_viewers() -> None:
    async def check(own: Watched) -> None:
        viewers = [own.viewer() for _ in range(MAX_VIEWERS)]
        await asyncio.gather(*(anext(one) for one in viewers))
        with pytest.raises(Overloaded, match="64 viewers watch already"):
            await anext(own.viewer())
        await viewers.pop().aclose()
        viewers.append(own.viewer())
        await anext(viewers[-1])
        for one in viewers:
            await one.aclose()

    run(check)


def test_a_feed_that_is_closed_ends_its_frames() -> None:
    async def check(own: Watched) -> None:
        viewer, waiting = own.viewer(), own.viewer()
        await asyncio.gather(anext(viewer), anext(waiting))
        end = asyncio.create_task(anext(waiting, b"the end"))
        await asyncio.sleep(0)
        own.feed.close()
        assert await end == b"the end"
        assert await anext(viewer, b"the end") == b"the end"
        assert own.asked == [True, False]
        with pytest.raises(Overloaded, match="shutting down"):
            await anext(own.viewer())

    run(check)
