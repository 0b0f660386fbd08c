"""Quire: an inference engine for large language models. docs/tour.md is a guided tour of the source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.sampling_params import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from quire.adapters import LoRARequest
    from quire.async_llm import AsyncLLM
    from quire.llm import LLM
    from quire.outputs import CompletionOutput, RequestOutput

    __version__: str  # of the installed package, named after a tag of git; "0+unknown" if none is

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import LLM or AsyncLLM (and with them NumPy) on first use, so that `import quire` stays cheap."""
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version(__name__)
        except PackageNotFoundError:  # it is run from its source
            return "0+unknown"
    if name == "LLM":
        from quire.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from quire.async_llm import AsyncLLM

        return AsyncLLM
    if name == "LoRARequest":
        from quire.adapters import LoRARequest

        return LoRARequest
    if name in ("CompletionOutput", "RequestOutput"):
        from quire import outputs

        return getattr(outputs, name)
    raise AttributeError(f"module 'quire' has no attribute {name!r}")
