"""Grammars as the engine gets them."""

from __future__ import annotations

from quire.grammar.compiler import GrammarCompiler
from quire.sampling_params import StructuredOutputsParams


def compiled(regex: str) -> str:
    """Compile what an output must match."""
    compiler = GrammarCompiler(400, {})
    try:
        return compiler.compile(StructuredOutputsParams(regex=regex))
    finally:
        compiler.close()
