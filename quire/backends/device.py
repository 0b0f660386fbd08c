"""The Device protocol: the properties of a backend, known before it is built, and its construction.

Only `device_for` maps the name in a configuration to a device. A new backend implements a Device and adds a
line there (docs/decisions/0014-device.md).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Protocol

from quire.backends.backend import Backend, Capacity
from quire.backends.draft_model import DraftModel
from quire.backends.host import Kind
from quire.backends.native.device import NativeDevice
from quire.backends.null import NullDevice
from quire.backends.reference import ReferenceDevice
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.images.vision import Vision
from quire.program.caches import CacheSpec
from quire.program.program import Op, Program, WeightSpec
from quire.quantize.kinds import Storage
from quire.weights.load import Progress
from quire.weights.plan import Expect, Layout, WeightPlan, plan, plan_without
from quire.weights.tensors import Tensors

# Where NVIDIA's driver is, also below Windows.
_GPU_DRIVERS = ("/proc/driver/nvidia/version", "/usr/lib/wsl/lib/libcuda.so.1")


class Loops(Protocol):
    """Loops that measure the peak rates of a device, with `threads` threads of one instruction set.

    `machine` is the name of a device that is no CPU, else "". `levels` are bytes to read from each level of
    its memory; None: those of this machine's CPU.
    """

    isa: str
    threads: int
    machine: str
    levels: Mapping[str, int] | None

    def operations(self, kind: str, seconds: float) -> float:
        """Return operations per second of all threads; 0 if there is no instruction for this kind."""
        ...

    def read_bytes(self, threads: int, nbytes: int, seconds: float) -> float:
        """Return bytes per second read by so many threads, each from its own buffer of `nbytes`."""
        ...


class Device(Protocol):
    """One backend with the options of one configuration. Allocates nothing before `build`.

    `computes` is False for a backend that only counts: it holds no weights and no cache, so everything fits.
    `tile_rows` are the rows of activations that are multiplied together. `keeps_floats_as` is the format that
    floating point weights are converted to, "" if they are kept. `kv_dtypes` are the formats of cached keys
    and values. `shares_weights`: other processes use the memory of its weights, too. `is_host`: its memory is
    that of the host, where hidden states that prediction layers read, and blocks beyond the cache, are kept.
    """

    name: str
    computes: bool
    tile_rows: int
    keeps_floats_as: str
    kv_dtypes: tuple[str, ...]
    shares_weights: bool
    is_host: bool

    @property
    def arithmetic(self) -> str:
        """Identify what determines the bits of results, for the fingerprint: "avx2"."""
        ...

    def in_words(self) -> str:
        """Return a readable description: "NumPy, float32"."""
        ...

    def facts(self) -> Mapping[str, str | int]:
        """Return what was chosen, by name, for `inspect`, the startup line and an endpoint."""
        ...

    def storage(self, spec: WeightSpec, stored: Storage, quantization: str | None) -> Storage:
        """Return the storage kind of a weight that the checkpoint has as `stored`.

        Raises ConfigError for a storage kind without a kernel on this device.
        """
        ...

    def layout(self, program: Program, storage: Mapping[str, Storage]) -> Layout:
        """Return the layout of all weights in the memory of this device."""
        ...

    def arithmetic_of(self, op: Op, storage: Mapping[str, Storage], kv_dtype: str) -> Kind:
        """Return the data type of an op's multiplications, with weights in these storage kinds."""
        ...

    def own_kv_dtype(self, floats: str) -> str:
        """Return the meaning of kv_cache_dtype = "auto" for a model in bf16, f16 or f32."""
        ...

    def block_bytes(self, spec: CacheSpec, kv_dtype: str, block_size: int) -> int:
        """Return the bytes of one block of one layer's cache; 0 for a state.

        Raises ConfigError for a cache that this device does not support.
        """
        ...

    def step_bytes(
        self, program: Program, weights: WeightPlan, num_tokens: int, num_logits: int | None = None
    ) -> int:
        """Return the bytes a step of `num_tokens` needs besides weights and cache: values and scratch.

        At most `num_logits` positions have logits; by default all may, for the logprobs of prompts.
        """
        ...

    def slots_bytes(self, program: Program, num_slots: int, block_bytes: int) -> int:
        """Return the bytes that are kept for so many slots in the memory of the device, at most.

        `block_bytes` are those of a block of every cache group together.
        """
        ...

    def drafting_bytes(self, target: Program, draft: Program, num_slots: int, spare_bytes: int) -> int:
        """Return the bytes that are kept for a draft model and so many slots, at most.

        `spare_bytes` are those of the spare blocks of a slot.
        """
        ...

    def loading_bytes(self, weights: WeightPlan) -> int:
        """Return the maximum bytes that loading needs besides the weights."""
        ...

    def available_bytes(self) -> int:
        """Return the memory that is free for weights, cache and steps."""
        ...

    def require_runnable(
        self,
        program: Program,
        weights: WeightPlan,
        capacity: Capacity,
        draft: DraftModel[WeightPlan] | None,
        vision: Vision | None,
    ) -> None:
        """Raise ConfigError for what `build` would refuse, before anything is loaded."""
        ...

    def build(
        self,
        program: Program,
        weights: WeightPlan,
        capacity: Capacity,
        progress: Progress | None = None,
        draft: DraftModel[WeightPlan] | None = None,
        vision: Vision | None = None,
    ) -> Backend:
        """Load the weights and create the backend. `progress` is called with bytes loaded.

        `draft` proposes tokens for it, and `vision`, whose weights are among these, embeds images. Raises
        ConfigError if the draft model cannot use the same block tables.
        """
        ...

    def loops(self) -> Loops:
        """Return the loops that measure this device. Raises ConfigError if it cannot be measured."""
        ...


def device_for(config: EngineConfig, share_weights: bool = False) -> Device:
    """Return the device of a configuration. Raises ConfigError for options it does not support.

    "auto" is a GPU if one works, for any model: a model that it has no kernels for is described again, for
    the CPU. With `share_weights` other processes use the same weights, and memory for them is taken once if
    possible.
    """
    if config.device == "auto":
        gpu, reason = automatic_gpu(config)
        if gpu is not None:
            return gpu
        if config.tensor_parallel_size > 1:
            raise _without_gpus(config, reason)
    if config.tensor_parallel_size > 1 and not config.device.startswith("cuda"):
        raise _without_gpus(config, f"device = {config.device!r} is a CPU")
    if config.device == "null":
        return NullDevice()
    if config.device == "reference":
        return ReferenceDevice(config.num_threads)
    if config.device.startswith("cuda"):
        from quire.backends.cuda.device import cuda_device

        return cuda_device(config.device, config.num_threads, config.tensor_parallel_size)
    return NativeDevice(config.model, config.num_threads, config.packed_cache, share_weights)


def _without_gpus(config: EngineConfig, reason: str) -> ConfigError:
    return ConfigError(
        f"tensor_parallel_size = {config.tensor_parallel_size} needs GPUs: {reason or 'there are none here'}",
        "leave it out; a CPU computes a model on one NUMA node or on all as one, and "
        "'quire serve --replicas' uses several",
    )


def chooses_device(config: EngineConfig) -> bool:
    """Return whether the choice of a device is left to Quire: not that of several GPUs."""
    return config.device == "auto" and config.tensor_parallel_size == 1


def automatic_gpu(config: EngineConfig) -> tuple[Device | None, str]:
    """Return the GPU that "auto" means, or None and why it is none: "" where nothing speaks of a GPU."""
    has_package = find_spec("cuda") is not None and find_spec("cuda.core") is not None
    if not has_package and not any(map(os.path.exists, _GPU_DRIVERS)):
        return None, ""
    from quire.backends.cuda.device import cuda_device

    try:
        return cuda_device("cuda", config.num_threads, config.tensor_parallel_size), ""
    except ConfigError as error:
        return None, error.message


def without_gpu(config: EngineConfig) -> EngineConfig:
    """Return a configuration whose device "auto" is the CPU.

    For processes that start several engines, and divide memory among them: they must not take a part of a
    GPU, as each process that asks it does, and one GPU runs one engine.
    """
    return replace(config, device="native") if chooses_device(config) else config


def named_gpus(config: EngineConfig) -> range:
    """Return the numbers of the GPUs that a configuration asks for; none if it may be computed on a CPU."""
    name, _, first = config.device.partition(":")
    asked = name == "cuda" or (name == "auto" and config.tensor_parallel_size > 1)
    return range(int(first or 0), int(first or 0) + config.tensor_parallel_size) if asked else range(0)


def kv_dtype(device: Device, asked: str, floats: str) -> str:
    """Return the format of cached keys and values, never "auto". Raises ConfigError if unsupported."""
    if asked == "auto":
        return device.own_kv_dtype(floats)
    if asked not in device.kv_dtypes:
        *others, last = map(repr, device.kv_dtypes)
        raise ConfigError(
            f"kv_cache_dtype = {asked!r} is not supported by the {device.name} backend",
            f"choose {', '.join(others)} or {last}, or leave device out",
        )
    return asked


def plan_weights(
    device: Device,
    program: Program,
    tensors: Tensors | None,
    quantization: str | None,
    expected: Expect,
) -> WeightPlan:
    """Plan the weights of a program on a device; without tensors, as if each had the kind `expected`.

    Raises ConfigError for a checkpoint that does not match the program.
    """
    specs = program.weights()
    if tensors is None:
        found = plan_without(specs, expected, quantization, device.storage, program.left_out)
    else:
        found = plan(specs, tensors, quantization, program.ignored, device.storage, program.left_out)
    return replace(found, layout=device.layout(program, found.storage))
