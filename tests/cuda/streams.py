"""GPUs whose streams are lists: each does what is in it as far as events allow, one ahead of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.backends.cuda.accelerator import DeviceArray, Launch, RankExchange
from quire.backends.cuda.gpu_group import GpuGroup
from quire.backends.cuda.interpreted import InterpretedAccelerator

Task = Callable[[], bool]  # returns whether it is done, or else has to wait


@dataclass(eq=False)
class FakeEvent:
    """What a stream reaches; with the graph that it is part of, if its stream is being captured."""

    stream: FakeStream
    graph: FakeGraph | None
    reached: bool = False


@dataclass(eq=False)
class FakeStream:
    tasks: list[Task] = field(default_factory=list)
    graph: FakeGraph | None = None  # that captures what is put into it
    ends_with_launch: bool = False

    def put(self, task: Task) -> None:
        self.ends_with_launch = False
        if self.graph is None:
            self.tasks.append(task)
        else:
            self.graph.tasks.setdefault(id(self), []).append(task)
            self.graph.joined.discard(id(self))


@dataclass(eq=False)
class FakeGraph:
    """A graph, and its builder. All streams that it captured must have joined the first one."""

    machine: Machine
    stream: FakeStream = field(default_factory=FakeStream)
    tasks: dict[int, list[Task]] = field(default_factory=dict)
    events: list[FakeEvent] = field(default_factory=list)
    joined: set[int] = field(default_factory=set)  # streams with nothing that the first one does not wait for

    def end_building(self) -> FakeGraph:
        for stream in (self.stream, *self.machine.streams):
            if stream.graph is self:
                if stream is not self.stream and id(stream) not in self.joined:
                    raise RuntimeError("a captured stream did not join the first one")
                stream.graph = None
        return self

    def complete(self) -> FakeGraph:
        return self

    def close(self) -> None:
        """Do nothing."""

    def launch(self, stream: FakeStream) -> None:
        stream.put(self._run)

    def _run(self) -> bool:
        for event in self.events:
            event.reached = False
        self.machine.run([list(tasks) for tasks in self.tasks.values()])
        return True


class Machine:
    """GPUs of which those with the number `first` go ahead, and the others only when it has to wait."""

    def __init__(self, number: int, first: int) -> None:
        self.streams = [FakeStream() for _ in range(number)]
        self._first = first
        self.group = GpuGroup([FakeGpu(self, stream) for stream in self.streams])  # type: ignore[misc]

    def drain(self) -> None:
        """Let all streams end."""
        self.run([stream.tasks for stream in self.streams])

    def run(self, queues: Sequence[list[Task]]) -> None:
        order = [*queues[self._first :], *queues[: self._first]]
        while any(order):
            if not any(queue and queue[0]() and (queue.pop(0) or True) for queue in order):
                raise RuntimeError("every stream waits")


class FakeGpu(InterpretedAccelerator):
    """An accelerator with the face of a Gpu of the driver."""

    def __init__(self, machine: Machine, stream: FakeStream) -> None:
        super().__init__()
        self.stream, self._machine = stream, machine

    def let_read(self, others: Sequence[Any]) -> None:
        """Do nothing: all can."""

    def call(self, launch: Launch, dependent: bool = False) -> tuple[Launch, bool]:
        return (launch, dependent)

    def submit(self, call: tuple[Launch, bool], stream: FakeStream) -> None:
        """Put a launch into a stream. Raises RuntimeError for a dependent one that is not behind another."""
        launch, dependent = call
        if dependent and not stream.ends_with_launch:
            raise RuntimeError(f"{launch.kernel} depends on something that is no launch")
        stream.put(lambda: InterpretedAccelerator.launch(self, launch) is None)
        stream.ends_with_launch = True

    def launch(self, launch: Launch | RankExchange) -> None:
        assert isinstance(launch, Launch)
        self.submit(self.call(launch), self.stream)

    def record(self, stream: FakeStream) -> FakeEvent:
        event = FakeEvent(stream, stream.graph)
        if stream.graph is not None:
            stream.graph.events.append(event)

        def reach() -> bool:
            event.reached = True
            return True

        stream.put(reach)
        return event

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        stream.graph = event.graph or stream.graph
        stream.put(lambda: event.reached)
        if event.graph is not None and stream is event.graph.stream:
            event.graph.joined.add(id(event.stream))

    def copy(self, to: DeviceArray, source: DeviceArray, stream: FakeStream) -> None:
        def copy() -> bool:
            InterpretedAccelerator.write(self, to, InterpretedAccelerator.fetch(self, source).result())
            return True

        stream.put(copy)

    def begin_graph(self) -> FakeGraph:
        graph = FakeGraph(self._machine)
        graph.stream.graph = graph
        return graph

    def write(self, array: DeviceArray, values: np.ndarray) -> None:
        kept = values.copy()
        self.stream.put(lambda: InterpretedAccelerator.write(self, array, kept) is None)

    def fetch(self, array: DeviceArray) -> Any:
        self._machine.drain()
        return super().fetch(array)
