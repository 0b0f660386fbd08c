"""A GPU as an Accelerator, through cuda-core. Only this module knows the CUDA driver.

None of it has run on a GPU yet: tests run it with cuda-core on pretended ones (tests/cuda/pretended_gpu.py).
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from cuda.bindings import driver
from cuda.core import (
    Buffer,
    Device,
    DeviceMemoryResource,
    Event,
    LaunchConfig,
    LegacyPinnedMemoryResource,
    ObjectCode,
    Stream,
    TensorMapDescriptorOptions,
)
from cuda.core import launch as launch_kernel
from cuda.core.graph import Graph, GraphBuilder
from cuda.core.utils import StridedMemoryView

from quire.backends.cuda.accelerator import (
    Argument,
    ByRank,
    DeviceArray,
    HostBuffer,
    Launch,
    OfRank,
    RankExchange,
    in_graph,
    row_of,
)
from quire.backends.cuda.faults import DriverError, Reported, checked, first_line, is_of_driver
from quire.backends.cuda.library import Library, open_library
from quire.backends.cuda.manifest import SWIZZLE, CompiledKernel, Manifest, launch_key
from quire.backends.cuda.pinned import PinnedBuffers
from quire.errors import ConfigError

LEAST_DRIVER = 13000  # the CUDA version, times 1000, that runs these cubins
RESERVED_BYTES = 512 << 20  # for the driver, for kernels, and for other programs
_OWN_SHARED_BYTES = 48 << 10  # shared memory that a block has without asking for more
_MOST_DESCRIPTORS = 1 << 13  # that are kept
_L2_PROMOTION = 2  # of what tensor descriptors describe: 128 bytes are read at once
_ON_CPU = "leave device out to use the CPU"
_MAX_SHARED = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


_opened: list[Device] = []


def _works() -> bool:
    """Return whether all GPUs that this process opened work: others feel it when one does not."""
    for device in (None, *_opened):
        if device is not None:
            device.set_current()
        if int(driver.cuCtxSynchronize()[0]) != 0:
            return False
    return True


reported = Reported(_works)


@cache
def open_gpu(index: int) -> Gpu:
    """Return a GPU. Raises ConfigError if there is none, or if its driver or its kind is too old."""
    try:
        version = checked(*driver.cuDriverGetVersion())
        checked(*driver.cuInit(0))
        count = checked(*driver.cuDeviceGetCount())
    except DriverError as error:
        problem = f"the NVIDIA driver cannot be used: {first_line(error)}"
        raise ConfigError(problem, f"nvidia-smi may say what it needs, or {_ON_CPU}") from error
    except (RuntimeError, ImportError) as error:  # pathfinder's error is one of the two, by version
        problem = "no NVIDIA driver was found on this machine"
        raise ConfigError(problem, f"install the driver (nvidia-smi shows it), or {_ON_CPU}") from error
    if version < LEAST_DRIVER:
        problem = (
            f"the NVIDIA driver supports CUDA {_dotted(version)}, and CUDA {_dotted(LEAST_DRIVER)} is needed"
        )
        raise ConfigError(problem, f"install a newer driver, or {_ON_CPU}")
    if index >= count:
        problem = f"there is no GPU {index}: this machine has {count}"
        raise ConfigError(problem, f"choose one from 'cuda:0' to 'cuda:{count - 1}'" if count else _ON_CPU)
    try:
        return Gpu(Device(index), Manifest.read())
    except Exception as error:
        if not is_of_driver(error):
            raise
        # Another process may have the GPU alone, or all of its memory.
        problem = f"GPU {index} cannot be used: {first_line(error)}"
        raise ConfigError(problem, f"nvidia-smi shows who uses it, or {_ON_CPU}") from error


class Gpu:
    """One GPU: a stream in which everything happens in order, and the kernels loaded so far."""

    def __init__(self, device: Device, manifest: Manifest) -> None:
        device.set_current()
        _opened.append(device)
        self.name = f"cuda:{device.device_id}"
        self.manifest = manifest
        self.target = _target(device, manifest)
        self.ranks, self.num_ranks = (self,), 1
        self.stream: Stream = device.create_stream()
        self._device = device
        self._pinned = PinnedBuffers(LegacyPinnedMemoryResource().allocate)
        self._kernels: dict[str, _Loaded] = {}
        self._descriptors: dict[tuple[Any, ...], Any] = {}
        self._library: Library | None = None

    def on(self, rank: int, array: DeviceArray) -> DeviceArray:
        return array

    def in_words(self) -> str:
        return f"{self._device.name}, {self.target}"

    @reported()
    def free_bytes(self) -> int:
        """See Accelerator.free_bytes. What models before had may be of garbage, or in the driver's pool."""
        gc.collect()
        self._device.set_current()
        self.stream.sync()
        if isinstance(pool := self._device.memory_resource, DeviceMemoryResource):
            checked(*driver.cuMemPoolTrimTo(pool.handle, 0))
        free, _ = checked(*driver.cuMemGetInfo())
        return max(0, free - RESERVED_BYTES)

    def state(self) -> str:
        try:
            told = self._device.to_system_device()
            sm, memory = (told.get_clock(name).get_current_mhz() for name in ("sm", "memory"))
            return f"{told.temperature.get_sensor()} °C, cores at {sm} MHz, memory at {memory} MHz"
        except Exception:  # of NVML, which may be missing, or may not know
            return ""

    @reported()
    def allocate(self, num_bytes: int) -> DeviceArray:
        self._device.set_current()
        buffer = self._device.allocate(num_bytes, stream=self.stream)
        return DeviceArray(buffer, np.dtype(np.uint8), (num_bytes,))

    @reported()
    def write(self, array: DeviceArray, values: np.ndarray) -> None:
        contents = np.ascontiguousarray(values)
        if contents.nbytes == 0:
            return
        self._device.set_current()
        staged = self._pinned.take(contents.nbytes)
        ctypes.memmove(int(staged.handle), contents.ctypes.data, contents.nbytes)
        _region(array).copy_from(_first(staged, contents.nbytes), stream=self.stream)
        self._pinned.give_back(staged, self.stream.record())

    def addresses(self, array: DeviceArray) -> tuple[int, ...]:
        return (_address(array),)

    @reported()
    def fetch(self, array: DeviceArray) -> _Fetched:
        self._device.set_current()
        staged = self._pinned.take(max(array.num_bytes, 1))
        if array.num_bytes:
            _region(array).copy_to(_first(staged, array.num_bytes), stream=self.stream)
        return _Fetched(array.shape, array.dtype, staged, self.stream.record(), self._pinned)

    def has_kernel(self, key: str) -> bool:
        return key in self.manifest.targets[self.target]

    @reported("raise the limit of locked memory (ulimit -l)")
    def stage(self, num_bytes: int) -> HostBuffer:
        self._device.set_current()
        pinned = self._pinned.allocate(num_bytes)
        there = (ctypes.c_uint8 * num_bytes).from_address(int(pinned.handle))
        return HostBuffer(np.ctypeslib.as_array(there), pinned)

    @reported()
    def upload(self, buffer: HostBuffer, array: DeviceArray) -> _Uploaded:
        self._device.set_current()
        _region(array).copy_from(_first(buffer.owner, array.num_bytes), stream=self.stream)
        return _Uploaded(self.stream.record())

    @reported()
    def launch(self, launch: Launch | RankExchange) -> None:
        if isinstance(launch, RankExchange) or launch.is_empty:
            return
        self._device.set_current()
        if self._library is None or not self._library.computes(launch):
            self.submit(self.call(launch), self.stream)

    @reported()
    def open_library(self) -> Library | None:
        self._device.set_current()
        self._library = self._library or open_library(self)
        return self._library

    @reported()
    def capture(self, launches: Sequence[Launch | RankExchange], dependent: bool = True) -> _Captured:
        steps = in_graph([own for own in launches if isinstance(own, Launch)], dependent)
        calls = [self.call(own, behind) for own, behind in steps if isinstance(own, Launch)]
        builder = self.begin_graph()
        try:
            for call in calls:
                self.submit(call, builder.stream)
            graph = builder.end_building().complete()
        finally:
            builder.close()
        return _Captured(self._device, graph, self.stream)

    def begin_graph(self) -> GraphBuilder:
        """Begin a graph of what is submitted to the stream of the builder that is returned."""
        self._device.set_current()
        return self._device.create_graph_builder().begin_building()

    def submit(self, call: tuple[Any, ...], stream: Stream) -> None:
        """Launch what `call` returned in a stream of this GPU."""
        self._device.set_current()
        launch_kernel(stream, *call)

    def record(self, stream: Stream) -> Event:
        """Return an event that comes when a stream of this GPU has done what is in it by now."""
        self._device.set_current()
        return stream.record()

    def wait(self, stream: Stream, event: Event) -> None:
        """Let what is put into a stream of this GPU from now on wait for an event of any."""
        self._device.set_current()
        stream.wait(event)

    def copy(self, to: DeviceArray, source: DeviceArray, stream: Stream) -> None:
        """Copy an array of any GPU to one of this GPU, in a stream of this GPU."""
        self._device.set_current()
        _region(to).copy_from(_region(source), stream=stream)

    def let_read(self, others: Sequence[Gpu]) -> None:
        """Let other GPUs read the memory of this one, where they can: copies then need not pass the host."""
        memory = self._device.memory_resource
        if isinstance(memory, DeviceMemoryResource):
            able = [gpu._device for gpu in others if gpu._device.can_access_peer(self._device)]
            memory.peer_accessible_by = able

    def call(self, launch: Launch, dependent: bool = False) -> tuple[Any, ...]:
        """Return the configuration of a launch, its kernel and its arguments, as cuda-core takes them.

        If it is `dependent`, a kernel that waits for the one before it may be prepared while that one ends.

        The kernel is loaded if it was not yet, which cannot be done while a graph is begun.
        """
        self._device.set_current()
        key = launch_key(launch)
        if key not in self._kernels:
            self._kernels[key] = self._load(key)
        loaded = self._kernels[key]
        args = list[Any]()
        for number, arg in enumerate(launch.args):
            tile = loaded.entry.tiles.get(number)
            args += [_passed(arg)] if tile is None else self._tiled(arg, tile)
        args += [0] * loaded.entry.num_scratch  # addresses of memory that these kernels do not need
        return (loaded.config(launch.grid, dependent), loaded.kernel, *args)

    def _tiled(self, array: Argument, tile: tuple[int, int]) -> list[Any]:
        """Return a matrix as kernels take it by tiles: a tensor descriptor, its sizes and its strides."""
        if not isinstance(array, DeviceArray):
            raise TypeError(f"{array} has no tiles")
        rows, inputs = array.shape
        key = (_address(array), rows, inputs, tile)
        if key not in self._descriptors:
            if len(self._descriptors) == _MOST_DESCRIPTORS:  # places of activations differ by their number
                self._descriptors.clear()
            # It owns no memory: what is kept here would keep that of arrays that nobody has any more.
            region = Buffer.from_handle(_address(array), array.num_bytes)
            view = StridedMemoryView.from_buffer(region, array.shape, dtype=array.dtype)
            options = TensorMapDescriptorOptions(tile, data_type=array.dtype)
            options.swizzle = type(options.swizzle)(SWIZZLE)
            options.l2_promotion = type(options.l2_promotion)(_L2_PROMOTION)
            self._descriptors[key] = view.as_tensor_map(options=options)
        sizes = ctypes.c_int32(rows), ctypes.c_int32(inputs)
        return [self._descriptors[key], *sizes, ctypes.c_int64(inputs), ctypes.c_int64(1)]

    def _load(self, key: str) -> _Loaded:
        entry = self.manifest.kernel(self.target, key)
        kernel = ObjectCode.from_cubin(self.manifest.cubin(self.target, entry)).get_kernel(entry.symbol)
        if entry.shared_bytes > _OWN_SHARED_BYTES:
            at = self._device.device_id
            checked(*driver.cuKernelSetAttribute(_MAX_SHARED, entry.shared_bytes, kernel.handle, at))
        return _Loaded(kernel, entry)


@dataclass(frozen=True, slots=True)
class _Uploaded:
    """A copy to a GPU; the event comes when it has ended."""

    ended: Event

    @reported()
    def wait(self) -> None:
        self.ended.sync()


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph, and the stream in which it is launched."""

    device: Device
    graph: Graph
    stream: Stream

    @reported()
    def replay(self) -> None:
        self.device.set_current()
        self.graph.launch(self.stream)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A kernel in the memory of a GPU, and how it is launched."""

    kernel: Any
    entry: CompiledKernel

    def config(self, grid: tuple[int, int, int], dependent: bool) -> LaunchConfig:
        return LaunchConfig(
            grid=grid,
            block=32 * self.entry.num_warps,
            shmem_size=self.entry.shared_bytes,
            programmatic_stream_serialization=dependent and self.entry.waits,
        )


@dataclass(frozen=True, slots=True)
class _Fetched:
    """A copy to pinned memory; the event comes when it has ended."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    staged: Buffer
    ended: Event
    pinned: PinnedBuffers

    @reported()
    def result(self) -> np.ndarray:
        self.ended.sync()
        found = np.empty(self.shape, self.dtype)
        ctypes.memmove(found.ctypes.data, int(self.staged.handle), found.nbytes)
        self.pinned.give_back(self.staged, self.ended)
        return found


def _target(device: Device, manifest: Manifest) -> str:
    """Return the target whose kernels run on a GPU: its own compute capability."""
    target = f"sm_{device.arch}"
    try:
        manifest.require(target)
    except ConfigError as error:
        raise ConfigError(f"{device.name}: {error}", f"{error.hint}, or {_ON_CPU}") from error
    return target


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _address(array: DeviceArray) -> int:
    return int(array.buffer.handle) + array.first_byte


def _region(array: DeviceArray) -> Buffer:
    return Buffer.from_handle(_address(array), array.num_bytes, owner=array.buffer)


def _first(buffer: Buffer, num_bytes: int) -> Buffer:
    return Buffer.from_handle(int(buffer.handle), num_bytes, owner=buffer)


def _passed(arg: Argument) -> Any:
    """Return an argument as the driver takes it: an int is an address."""
    if isinstance(arg, OfRank):
        arg = row_of(0, arg)
    if isinstance(arg, DeviceArray):
        return _address(arg)
    if isinstance(arg, ByRank):
        return ctypes.c_int32(0)
    return ctypes.c_int32(arg) if isinstance(arg, int) else ctypes.c_float(arg)
