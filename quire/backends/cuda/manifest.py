"""The kernels that were compiled ahead of time: their manifest, which is committed, and the binaries.

The manifest lists each compiled kernel by target and key. Binaries are files named by the SHA-256 of their
bytes, which is checked when one is read: so the digest of the manifest identifies all of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.backends.cuda.accelerator import Argument, ByRank, DeviceArray, Launch, OfRank
from quire.errors import ConfigError

FOLDER = Path(__file__).with_name("cubins")
SWIZZLE = 3  # of tiles in shared memory, as tensor descriptors say it: by 128 bytes
_POINTERS = {
    "float64": "*fp64",
    "float32": "*fp32",
    "float16": "*fp16",
    "bfloat16": "*bf16",
    "int64": "*i64",
    "int32": "*i32",
    "uint32": "*u32",
    "int16": "*i16",
    "uint16": "*u16",
    "int8": "*i8",
    "uint8": "*u8",
}  # by NumPy type, as Triton writes them


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A compiled kernel: its function, its launch, and how many addresses of scratch memory it takes last.

    `waits`: before it touches memory, it waits until the kernel before it has ended. `tiles`: arguments, by
    their numbers, that are tensor descriptors of a matrix, with tiles of so many rows and inputs.
    """

    symbol: str
    sha256: str
    num_warps: int
    shared_bytes: int
    num_scratch: int
    waits: bool
    tiles: Mapping[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The compiled kernels of all targets. `digest` identifies their bytes."""

    folder: Path
    targets: Mapping[str, Mapping[str, CompiledKernel]]
    digest: str

    @classmethod
    def read(cls, folder: Path = FOLDER) -> Manifest:
        """Read the manifest in a folder. Raises ConfigError if it is missing or damaged."""
        file = folder / "manifest.json"
        try:
            text = file.read_bytes()
            targets = {
                target: {key: _compiled(entry) for key, entry in kernels.items()}
                for target, kernels in json.loads(text)["targets"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{file} cannot be read: {error}", "install Quire again") from error
        return cls(folder, targets, hashlib.sha256(text).hexdigest())

    def require(self, target: str) -> None:
        """Raise ConfigError unless there are kernels for a target, and their files."""
        if not (kernels := self.targets.get(target)):
            others = ", ".join(sorted(self.targets))
            raise ConfigError(f"no kernels were compiled for {target}, only for {others}", _hint(target))
        held = {file.stem for file in (self.folder / target).glob("*.cubin")}
        if missing := sum(kernel.sha256 not in held for kernel in kernels.values()):
            problem = f"{missing} of {len(kernels)} kernels for {target} are not in {self.folder / target}"
            raise ConfigError(problem, _hint(target))

    def kernel(self, target: str, key: str) -> CompiledKernel:
        """Return a compiled kernel. Raises ConfigError if there is none."""
        if (found := self.targets.get(target, {}).get(key)) is None:
            problem = f"no kernel {key} was compiled for {target}"
            raise ConfigError(problem, f"use device='native', or {_hint(target)}")
        return found

    def cubin(self, target: str, kernel: CompiledKernel) -> bytes:
        """Return the bytes of a compiled kernel. Raises ConfigError if they are missing or others."""
        file = self.folder / target / f"{kernel.sha256}.cubin"
        try:
            found = file.read_bytes()
        except OSError as error:
            raise ConfigError(f"the compiled kernel {file} cannot be read: {error}", _hint(target)) from error
        if hashlib.sha256(found).hexdigest() != kernel.sha256:
            raise ConfigError(f"the compiled kernel {file} is not the one in the manifest", _hint(target))
        return found


def _hint(target: str) -> str:
    number = target.removeprefix("sm_")
    return f'in a checkout of Quire, run `make cubins ARGS="--targets {number}"`'


def variant_key(kernel: str, types: Sequence[str], constants: Mapping[str, Any]) -> str:
    """Return the name of a kernel compiled for arguments of these types ("*fp32", "i32") and constants."""
    named = ",".join(f"{name}={constants[name]}" for name in sorted(constants))
    return f"{kernel}({','.join(types)};{named})"


def launch_key(launch: Launch) -> str:
    """Return the name of the compiled kernel that a launch asks for."""
    return variant_key(launch.kernel, list(map(_type_of, launch.args)), launch.constants)


def _type_of(arg: Argument) -> str:
    if isinstance(arg, DeviceArray):
        return _POINTERS[arg.dtype.name]
    if isinstance(arg, OfRank):
        return _POINTERS[arg.rows.dtype.name]
    return "i32" if isinstance(arg, int | ByRank) else "fp32"


def _compiled(entry: Mapping[str, Any]) -> CompiledKernel:
    return CompiledKernel(
        str(entry["symbol"]),
        str(entry["sha256"]),
        int(entry["num_warps"]),
        int(entry["shared_bytes"]),
        int(entry["num_scratch"]),
        bool(entry["waits"]),
        {int(number): (rows, inputs) for number, (rows, inputs) in entry.get("tiles", {}).items()},
    )
