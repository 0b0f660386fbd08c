"""The process that tries grammars out: whatever one costs, it costs here first, within limits.

One JSON document a line on stdin and stdout. It compiles with a stack of a quarter of the engine's, so a
grammar that has passed here does not overflow the stack there. It ends when its stdin does.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from quire.grammar.matcher import fault, make_matcher, make_vocabulary
from quire.text.formats import narrowed

STACK_BYTES = 4 << 20

# Between two tokens of JSON: nothing or a space, as in what models were trained on (", " and ": "), or a line
# break and its indentation. With room for more blanks a small model writes them until max_tokens cuts it.
_WHITESPACE = {"whitespace_pattern": r"\x20|\n(\x20{0,16}|\t{0,8})"}


def main() -> None:
    """Serve requests until stdin ends. Arguments: memory limit in bytes, processor seconds a request."""
    memory_bytes, cpu_s = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _answer(b'{"structure": {"json": {}}, "vocab_size": 0, "special": []}')
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))  # no file, no socket: 0, 1 and 2 are taken
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    server = threading.Thread(target=_serve, args=(cpu_s,))
    server.start()
    server.join()


def _serve(cpu_s: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    _write({"ready": True})
    for line in sys.stdin.buffer:
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + cpu_s + 1, hard))
        _write(_answer(line))


def _answer(line: bytes) -> dict[str, Any]:
    """Compile one grammar and ask what may come first; every failure is an answer."""
    begin_s = time.thread_time()
    try:
        request = json.loads(line)
        special = tuple((token_id, name) for token_id, name in request["special"])
        grammar = llguidance_text(request["structure"])
        matcher = make_matcher(_vocabulary(request["vocab_size"], special), grammar)
        matcher.compute_bitmask()
        if (error := fault(matcher)) is not None:
            return {"error": error}
        return {"grammar": grammar, "seconds": time.thread_time() - begin_s}
    except MemoryError:
        return {"kind": "memory"}
    except RecursionError:
        return {"error": "it is nested too deeply"}
    except Exception as error:
        return {"error": str(error)[:500] or type(error).__name__}


def llguidance_text(structure: Mapping[str, Any]) -> str:
    """The fields of StructuredOutputsParams, of which one is given, as a grammar in llguidance's JSON."""
    ((kind, value),) = structure.items()
    if kind == "json":
        schema = json.loads(value) if isinstance(value, str) else value
        schema = {} if schema is True else schema
        if isinstance(schema, dict):
            # At the end: llguidance puts the last key in the place of this one, and their order counts.
            schema = narrowed(schema) | {"x-guidance": schema.get("x-guidance", _WHITESPACE)}
        return json.dumps({"grammars": [{"json_schema": schema}]}, allow_nan=False)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(value)
    if kind == "choice":
        # A terminal, for its alternatives cost less than a rule's.
        value = "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, value))
    elif value.lstrip().startswith("{"):
        return str(value)
    return LLMatcher.grammar_from_lark(any_to_lark(value))


@lru_cache(maxsize=1)
def _vocabulary(vocab_size: int, special: tuple[tuple[int, str], ...]) -> LLTokenizer:
    """The model's special tokens under their ids, and behind all of its tokens one for every byte.

    It is enough to know what a grammar does.
    """
    tokens = [b""] * vocab_size + [bytes((byte,)) for byte in range(256)]
    return make_vocabulary(tokens, dict(special), lambda text: [vocab_size + byte for byte in text.encode()])


def _write(reply: Mapping[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
    sys.stdout.buffer.flush()
