"""Errors of the CUDA driver as faults of a device, with hints."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from quire.backends.cuda.accelerator import DeviceFault

_WRONG = "a kernel of Quire is wrong: report it with the model, the GPU and these words"
# Hints by what is in the name of an error of the driver.
_HINTS = {
    "OUT_OF_MEMORY": "end what else uses the GPU, or lower max_num_batched_tokens or kv_cache_memory_bytes",
    "ILLEGAL": _WRONG,
    "MISALIGNED": _WRONG,
}
_LOST = "nvidia-smi, and the lines with Xid in dmesg, say what happened to the GPU"
_P = ParamSpec("_P")
_T = TypeVar("_T")


class DriverError(RuntimeError):
    """A call of the driver failed."""


def checked(result: Any, *values: Any) -> Any:
    """Return the values of a call of the driver, a single one by itself. Raises DriverError if it failed."""
    if int(result) != 0:
        raise DriverError(f"the CUDA driver reports {result.name}")
    return values[0] if len(values) == 1 else values


class Reported:
    """Makes decorators. `works` returns whether the GPU still works after an error."""

    def __init__(self, works: Callable[[], bool]) -> None:
        self._works = works

    def __call__(self, hint: str | None = None) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
        """Let a function raise errors of the driver as DeviceFault, with a hint for those that have none."""

        def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
            @wraps(function)
            def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
                try:
                    return function(*args, **kwargs)
                except Exception as error:
                    if is_of_driver(error):
                        raise self._fault_of(error, hint) from error
                    raise

            return call

        return decorate

    def _fault_of(self, error: Exception, hint: str | None) -> DeviceFault:
        works, said = self._works(), first_line(error)
        if hint is None or not works:
            hint = next((found for name, found in _HINTS.items() if name in said), None if works else _LOST)
        state = "it still works" if works else "it works no more in this process"
        return DeviceFault(f"the GPU reports {said}; {state}", hint, works)


def is_of_driver(error: Exception) -> bool:
    """Return whether an error is of cuda-core, whose class for it is not public, of cuBLAS, or our own."""
    package = type(error).__module__.partition(".")[0]
    return isinstance(error, RuntimeError | MemoryError) or package in ("cuda", "nvmath")


def first_line(error: Exception) -> str:
    """Return the first line of what an error says."""
    return (str(error) or type(error).__name__).splitlines()[0]
