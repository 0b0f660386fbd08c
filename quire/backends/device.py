"""Device: what the rest of Quire asks of a backend before it runs, and what makes one.

`device_for` is the only place where the name in a configuration becomes a device. A new backend writes a
Device and adds its line there (docs/decisions/0014-device.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from quire.backends.backend import Backend, Capacity
from quire.backends.native.device import NativeDevice
from quire.backends.null import NullDevice
from quire.backends.reference import ReferenceDevice
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.program.caches import CacheSpec
from quire.program.program import Program, WeightSpec
from quire.quantize.kinds import Storage
from quire.weights.load import Progress
from quire.weights.plan import Layout, WeightPlan, plan, plan_without
from quire.weights.tensors import Tensors


class Loops(Protocol):
    """Loops that find what a device can do at most, with `threads` threads of one instruction set."""

    isa: str
    threads: int

    def operations(self, kind: str, seconds: float) -> float:
        """Return operations a second of all threads; 0 where there is no instruction for this kind."""
        ...

    def read_bytes(self, threads: int, nbytes: int, seconds: float) -> float:
        """Return bytes a second that so many threads read, each from a buffer of its own of `nbytes`."""
        ...


class Device(Protocol):
    """Answers for one backend, with the options of one configuration. Makes nothing before `build`.

    `computes` is False for what only counts: it holds no weights and no cache, so everything fits.
    `keeps_floats_as` names the format into which floating point weights are turned, "" where they are kept.
    `kv_dtypes` are the formats of cached keys and values.
    """

    name: str
    computes: bool
    keeps_floats_as: str
    kv_dtypes: tuple[str, ...]

    @property
    def arithmetic(self) -> str:
        """Name what decides the bits of a result, for the fingerprint: "avx2"."""
        ...

    def in_words(self) -> str:
        """Say for people what computes: "NumPy, float32"."""
        ...

    def facts(self) -> Mapping[str, str | int]:
        """Return what was chosen, by name, for `inspect`, the startup line and an endpoint."""
        ...

    def storage(self, spec: WeightSpec, stored: Storage, quantization: str | None) -> Storage:
        """Return how a weight is kept that the checkpoint has as `stored`.

        Raises ConfigError for a storage kind that this device has no kernel for.
        """
        ...

    def layout(self, program: Program, storage: Mapping[str, Storage]) -> Layout:
        """Return where every weight lies in the memory of this device."""
        ...

    def own_kv_dtype(self, floats: str) -> str:
        """Return what kv_cache_dtype = "auto" means for a model whose numbers are bf16, f16 or f32."""
        ...

    def block_bytes(self, spec: CacheSpec, kv_dtype: str, block_size: int) -> int:
        """Return the bytes of one block of one layer's cache; 0 where it keeps a state.

        Raises ConfigError for a cache that this device does not have.
        """
        ...

    def step_bytes(self, program: Program, weights: WeightPlan, num_tokens: int) -> int:
        """Return what a step of `num_tokens` takes beside weights and cache: values, and room to work."""
        ...

    def loading_bytes(self, weights: WeightPlan) -> int:
        """Return what loading takes beside the weights, at most."""
        ...

    def available_bytes(self) -> int:
        """Return the memory that is free for weights, cache and steps."""
        ...

    def build(
        self,
        program: Program,
        weights: WeightPlan,
        capacity: Capacity,
        progress: Progress | None = None,
    ) -> Backend:
        """Load the weights and make the backend. `progress` hears of bytes loaded."""
        ...

    def loops(self) -> Loops:
        """Return what measures this device. Raises ConfigError where nothing can be measured."""
        ...


def device_for(config: EngineConfig) -> Device:
    """Return the device that a configuration asks for. Raises ConfigError for options that it cannot have."""
    if config.device == "null":
        return NullDevice()
    if config.device == "reference":
        return ReferenceDevice(config.num_threads)
    return NativeDevice(config.model, config.num_threads, config.packed_cache)


def kv_dtype(device: Device, asked: str, floats: str) -> str:
    """Return the format of cached keys and values, never "auto". Raises ConfigError for one it lacks."""
    if asked == "auto":
        return device.own_kv_dtype(floats)
    if asked not in device.kv_dtypes:
        *others, last = map(repr, device.kv_dtypes)
        raise ConfigError(
            f"kv_cache_dtype = {asked!r} is not there on the {device.name} backend",
            f"choose {', '.join(others)} or {last}, or leave device out",
        )
    return asked


def plan_weights(
    device: Device,
    program: Program,
    tensors: Tensors | None,
    quantization: str | None,
    stated: str,
) -> WeightPlan:
    """Plan the weights of a program on a device; without tensors, as if in the `stated` format.

    Raises ConfigError for a checkpoint that does not fit the program.
    """
    specs = program.weights()
    if tensors is None:
        found = plan_without(specs, stated, quantization, device.storage)
    else:
        found = plan(specs, tensors, quantization, program.ignored, device.storage)
    return replace(found, layout=device.layout(program, found.storage))
