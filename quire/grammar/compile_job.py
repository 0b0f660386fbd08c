"""The job of the process that compiles grammars first, within limits, before the engine does.

It compiles with a quarter of the engine's stack, so a grammar that passes here does not overflow the stack
there.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from quire.grammar.json_schema import tighten_formats
from quire.grammar.matcher import fault, make_matcher, make_vocabulary
from quire.sandbox.job import Job

STACK_BYTES = 4 << 20

# Between two tokens of JSON: nothing, a space, as in most training data (", " and ": "), or a line break and
# indentation. If more were allowed, a small model might write blanks until max_tokens.
_WHITESPACE = {"whitespace_pattern": r"\x20|\n(\x20{0,16}|\t{0,8})"}

# What tells Lark from GBNF: a directive, or the rule `start` with its modifiers and attributes.
_LARK = re.compile(r"^[ \t]*(%llguidance\b|[?!]*start\s*(\[[^]\n]*\]\s*)?:(?!:=))", re.MULTILINE)


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Compile one grammar and compute which tokens may come first."""
    begin_s = time.thread_time()
    special = tuple((token_id, name) for token_id, name in request["special"])
    grammar = llguidance_text(request["structure"])
    matcher = make_matcher(_vocabulary(request["vocab_size"], special), grammar)
    matcher.compute_bitmask()
    if (error := fault(matcher)) is not None:
        return {"error": error}
    return {"grammar": grammar, "seconds": time.thread_time() - begin_s}


def describe(error: Exception) -> str:
    """Return the message of an error for the caller whose structure met it."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error) or type(error).__name__


def llguidance_text(structure: Mapping[str, Any]) -> str:
    """Return the one given field of StructuredOutputsParams as a grammar in llguidance's JSON."""
    ((kind, value),) = structure.items()
    if kind == "json":
        schema = json.loads(value) if isinstance(value, str) else value
        schema = {} if schema is True else schema
        if isinstance(schema, dict):
            # At the end: llguidance moves the last key to where this one is, and the order of keys matters.
            schema = tighten_formats(schema) | {"x-guidance": schema.get("x-guidance", _WHITESPACE)}
        return json.dumps({"grammars": [{"json_schema": schema}]}, allow_nan=False)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(value)
    if kind == "choice":
        # A terminal, as its alternatives cost less than those of a rule.
        value = "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, value))
    elif value.lstrip().startswith("{"):
        return str(value)
    return LLMatcher.grammar_from_lark(value if _LARK.search(value) else gbnf_to_lark(value))


@lru_cache(maxsize=1)
def _vocabulary(vocab_size: int, special: tuple[tuple[int, str], ...]) -> LLTokenizer:
    """Make a vocabulary of the model's special tokens with their ids and, after all ids, one token a byte.

    It suffices to compile a grammar and compute a mask.
    """
    tokens = [b""] * vocab_size + [bytes((byte,)) for byte in range(256)]
    return make_vocabulary(tokens, dict(special), lambda text: [vocab_size + byte for byte in text.encode()])


_SAMPLE = {"structure": {"json": {}}, "vocab_size": 0, "special": []}

JOB = Job(run, describe, warm_up=_SAMPLE, stack_bytes=STACK_BYTES)
