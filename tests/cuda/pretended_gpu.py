"""GPUs without a GPU: cuda-core on a driver (pretended_driver.c) whose kernels Triton's interpreter runs.

So quire.backends.cuda.driver is tested as it is: which calls it makes, with which arguments, in which order.
A process that has called `pretend` has these GPUs, and no others.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.backends.cuda import interpreter
from quire.backends.cuda.interpreted import _kernels
from quire.backends.cuda.interpreter import Pointer, TensorDescriptor
from quire.backends.cuda.kernels.product_variants import tiles_on
from quire.backends.cuda.kernels.variants import variants
from quire.backends.cuda.manifest import Manifest

TARGET = "sm_90"
_TYPES = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    **{
        f"{sign}{bits}": f"{word}{bits}"
        for sign, word in (("i", "int"), ("u", "uint"))
        for bits in (8, 16, 32, 64)
    },
}  # of arrays, by what Triton calls them
_Load = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_Decode = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(ctypes.c_void_p), ctypes.c_int
)
_Run = ctypes.CFUNCTYPE(None, ctypes.c_int)


class PretendedKernels:
    """The kernels that the driver was given, and the launches that it was asked for.

    `fail` lets a device report an error from then on, or the driver itself, which is device -1; 0 is none.
    """

    def __init__(self) -> None:
        self.dependent: list[bool] = []  # of each launch
        self.errors: list[Exception] = []  # of kernels and of tests in calls from C, which cannot raise them
        self._variants = {variant.key: variant for variant in variants()}
        self._loaded: list[str] = []
        self._launches: list[tuple[Any, tuple[int, ...], list[Any], dict[str, Any]]] = []
        self.fail: Callable[[int, int], None] = lambda device, error: None
        self.functions = _Load(self._load), _Decode(self._decode), _Run(self._run)

    def _load(self, image: int) -> int:
        self._loaded.append(ctypes.string_at(image).decode())
        return len(self._loaded) - 1

    def _decode(self, kernel: int, sizes: Any, params: Any, dependent: int) -> int:
        """Return the number of a launch, -1 for one that is wrong, which the driver refuses."""
        try:
            return self._keep(kernel, sizes, params, bool(dependent))
        except Exception as error:
            self.errors.append(error)
            return -1

    def _keep(self, kernel: int, sizes: Any, params: Any, dependent: bool) -> int:
        """Keep a launch: its grid, and its arguments as they are now."""
        variant = self._variants[self._loaded[kernel]]
        assert sizes[3] == 32 * variant.warps
        tiles, addresses, args = tiles_on(variant, TARGET), iter(params), list[Any]()
        for name, type in variant.types.items():
            args.append(
                _matrix(addresses, tiles[name]) if name in tiles else _argument(next(addresses), type)
            )
        constants = variant.constants | ({"TILED": True} if tiles else {})
        self._launches.append((_kernels()[variant.kernel], (sizes[0], sizes[1], sizes[2]), args, constants))
        self.dependent.append(dependent)
        return len(self._launches) - 1

    def _run(self, launch: int) -> None:
        kernel, grid, args, constants = self._launches[launch]
        try:
            interpreter.run(kernel, grid, args, constants)
        except Exception as error:
            self.errors.append(error)


def _matrix(addresses: Any, tile: tuple[int, int]) -> TensorDescriptor:
    """Read a tensor descriptor, in which is what the driver was told, and the sizes and strides behind it."""
    words = (ctypes.c_uint64 * 6).from_address(next(addresses))
    rows, inputs = (ctypes.c_int32.from_address(next(addresses)).value for _ in range(2))
    strides = [ctypes.c_int64.from_address(next(addresses)).value for _ in range(2)]
    assert list(words[1:]) == [inputs, rows, 2 * inputs, tile[1], tile[0]]
    assert strides == [inputs, 1]
    return TensorDescriptor(Pointer(words[0], "bfloat16"), [rows, inputs], strides, list(tile))


def _argument(address: int, type: str) -> Pointer | int | float:
    """Read an argument of a launch."""
    if type.startswith("*"):
        return Pointer(ctypes.c_uint64.from_address(address).value, _TYPES[type[1:]])
    return (ctypes.c_int32 if type == "i32" else ctypes.c_float).from_address(address).value


def compiled(folder: Path, source: str, name: str) -> ctypes.CDLL:
    """Compile a file of these tests to a library, which this process finds by its name from then on."""
    flags = ("-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror", "-shared", "-fPIC")
    command = ["cc", *flags, f"-Wl,-soname,{name}", "-o", folder / name, Path(__file__).with_name(source)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)


def pretend(folder: Path) -> PretendedKernels:
    """Let this process have GPUs, whose files are in an empty folder."""
    kernels = PretendedKernels()
    library = compiled(folder, "pretended_driver.c", "libcuda.so.1")
    library.pretended_functions(*kernels.functions)
    kernels.fail = library.pretended_error
    (folder / TARGET).mkdir()
    entries = dict[str, dict[str, Any]]()
    for variant in variants():
        image = variant.key.encode() + b"\0"  # in place of machine code
        digest = hashlib.sha256(image).hexdigest()
        (folder / TARGET / f"{digest}.cubin").write_bytes(image)
        entries[variant.key] = {"symbol": variant.kernel, "sha256": digest, "num_warps": variant.warps}
        entries[variant.key] |= {"shared_bytes": 1 << 16, "num_scratch": 2, "waits": True}
        names, tiles = list(variant.types), tiles_on(variant, TARGET)
        entries[variant.key]["tiles"] = {names.index(name): tile for name, tile in tiles.items()}
    (folder / "manifest.json").write_text(json.dumps({"targets": {TARGET: entries}}), "utf-8")
    found = Manifest.read(folder)
    Manifest.read = classmethod(lambda cls: found)  # type: ignore[assignment, method-assign]
    return kernels
