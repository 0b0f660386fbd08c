"""GPUs of one machine as a group: events order their streams, and the driver copies from one to another.

None of it has run on GPUs yet.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from quire.backends.cuda.accelerator import DeviceArray, Launch, RankExchange, in_graph
from quire.backends.cuda.driver import Gpu, reported
from quire.backends.cuda.group import AcceleratorGroup
from quire.errors import ConfigError


class GpuGroup(AcceleratorGroup):
    """GPUs of one kind, each with a stream. Raises ConfigError for different ones."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        super().__init__(gpus)
        self._gpus = gpus
        if len(targets := {gpu.target for gpu in gpus}) > 1:
            kinds = ", ".join(f"{gpu.name} is {gpu.in_words()}" for gpu in gpus)
            problem = f"GPUs of {len(targets)} kinds cannot compute a model together: {kinds}"
            raise ConfigError(problem, "choose equal ones with CUDA_VISIBLE_DEVICES")
        for gpu in gpus:
            gpu.let_read([other for other in gpus if other is not gpu])

    @reported()
    def capture(self, launches: Sequence[Launch | RankExchange], dependent: bool = True) -> _CapturedGroup:
        """See Accelerator.capture: one graph, which begins and ends in a stream of the first GPU."""
        steps = [
            launch.parts if isinstance(launch, RankExchange) else self._calls(launch, behind)
            for launch, behind in in_graph(launches, dependent)
        ]
        with _no_collection():
            return _CapturedGroup(self, self._captured(steps))

    def _captured(self, steps: Sequence[DeviceArray | list[tuple[Any, ...]]]) -> Any:
        """Return the graph of steps, each an exchange or a launch of all GPUs."""
        first, *others = self._gpus
        builder = first.begin_graph()
        try:
            streams = [builder.stream, *(gpu.stream for gpu in others)]
            self._fork(streams)
            for step in steps:
                if isinstance(step, DeviceArray):
                    self._copy_parts(step, streams)
                    continue
                for gpu, call, stream in zip(self._gpus, step, streams, strict=True):
                    gpu.submit(call, stream)
            self._join(streams)
            return builder.end_building().complete()
        finally:
            builder.close()

    @reported()
    def replay(self, graph: Any) -> None:
        """Launch a graph behind what the streams of all GPUs have, and before what they get."""
        streams = [gpu.stream for gpu in self._gpus]
        self._join(streams)
        graph.launch(streams[0])
        self._fork(streams)

    def _calls(self, launch: Launch, dependent: bool) -> list[tuple[Any, ...]]:
        return [gpu.call(self.of_rank(rank, launch), dependent) for rank, gpu in enumerate(self._gpus)]

    def _fork(self, streams: Sequence[Any]) -> None:
        """Let all streams wait for the first."""
        event = self._gpus[0].record(streams[0])
        for gpu, stream in zip(self._gpus[1:], streams[1:], strict=True):
            gpu.wait(stream, event)

    def _join(self, streams: Sequence[Any]) -> None:
        """Let the first stream wait for all others."""
        for gpu, stream in zip(self._gpus[1:], streams[1:], strict=True):
            self._gpus[0].wait(streams[0], gpu.record(stream))

    @reported()
    def _exchange(self, parts: DeviceArray) -> None:
        self._copy_parts(parts, [gpu.stream for gpu in self._gpus])

    def _copy_parts(self, parts: DeviceArray, streams: Sequence[Any]) -> None:
        """Let each GPU wait for all others, and copy their parts."""
        events = [gpu.record(stream) for gpu, stream in zip(self._gpus, streams, strict=True)]
        for rank, (gpu, stream) in enumerate(zip(self._gpus, streams, strict=True)):
            for source in (number for number in range(len(self._gpus)) if number != rank):
                gpu.wait(stream, events[source])
                if parts.num_bytes:
                    part = parts.rows(source, 1)
                    gpu.copy(self.on(rank, part), self.on(source, part), stream)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Let no garbage be collected: arrays in it are freed in streams, and not in one that is captured."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class _CapturedGroup:
    """A graph of several GPUs."""

    group: GpuGroup
    graph: Any

    def replay(self) -> None:
        self.group.replay(self.graph)
