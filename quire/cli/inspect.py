"""`quire inspect`: what a checkpoint is, what it takes, and whether it fits this machine."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from quire.cli.options import add_engine_flags, engine_options

if TYPE_CHECKING:
    from quire.build import Description

DESCRIPTION = """Say what a checkpoint is before running it: architecture, parameters, bytes by kind of
weight, bytes of KV cache for each token, and what fits into this machine's memory. Reads no weights: a
folder with config.json is enough, and of a hub model only the small files are fetched.
"""


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "inspect",
        help="what a checkpoint is, what it takes, whether it fits",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="checkpoint folder, hub id, or 'demo'")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_flags(parser)
    parser.set_defaults(function=inspect, parser=parser)


def inspect(args: argparse.Namespace) -> int:
    """Print the description of a model as a table, or as JSON."""
    from quire.build import describe
    from quire.config import EngineConfig

    facts = describe(EngineConfig.from_keywords(model=args.model, **engine_options(args)), weights=False)
    if args.json:
        print(json.dumps(as_dict(facts), indent=2))
    else:
        _print_table(facts)
    return 0


def as_dict(facts: Description) -> dict[str, Any]:
    """Everything that is shown, with plain numbers and full names."""
    from quire.memory import misfit

    cfg, memory, program = facts.model.config, facts.memory, facts.program
    specs = program.weights().values()
    by_kind: Counter[str] = Counter()
    for spec in specs:
        by_kind[str(facts.storage[spec.name])] += facts.nbytes(spec)
    return {
        "model": facts.config.model,
        "path": str(facts.folder.path),
        "architecture": facts.model.architecture,
        "num_hidden_layers": cfg.num_hidden_layers,
        "hidden_size": cfg.hidden_size,
        "num_attention_heads": cfg.num_attention_heads,
        "num_key_value_heads": cfg.num_key_value_heads,
        "head_dim": cfg.head_dim,
        "vocab_size": cfg.vocab_size,
        "max_position_embeddings": cfg.max_position_embeddings,
        "parameters": sum(spec.size for spec in specs),
        "weight_bytes": dict(by_kind),
        "kv_bytes_per_token": memory.kv_block_bytes // facts.config.block_size,
        "problem": str(misfit(memory, facts.config) or "") or None,
        "memory": {
            "available_bytes": memory.available_bytes,
            "working_weight_bytes": memory.working_bytes,
            "activation_bytes": memory.activation_bytes,
            "kv_cache_bytes": memory.kv_bytes,
            "kv_cache_tokens": memory.num_blocks * facts.config.block_size,
            "max_model_len": memory.max_model_len,
        },
    }


def _print_table(facts: Description) -> None:
    from rich.console import Console
    from rich.table import Table

    from quire.memory import gigabytes

    d = as_dict(facts)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    table.add_row("model", d["model"] if d["model"] == d["path"] else f"{d['model']}  ({d['path']})")
    table.add_row("architecture", d["architecture"])
    heads = (
        f"{d['num_attention_heads']} query and {d['num_key_value_heads']} key/value heads of {d['head_dim']}"
    )
    table.add_row("shape", f"{d['num_hidden_layers']} layers, hidden {d['hidden_size']:,}, {heads}")
    context = f"{d['max_position_embeddings']:,} positions"
    table.add_row("vocabulary, context", f"{d['vocab_size']:,} tokens, {context}")
    table.add_row("parameters", _count(d["parameters"]))
    for kind, nbytes in d["weight_bytes"].items():
        table.add_row("weights", f"{gigabytes(nbytes)} in {kind}")
    table.add_row("KV cache a token", gigabytes(d["kv_bytes_per_token"]))
    memory = d["memory"]
    table.add_row("memory available", gigabytes(memory["available_bytes"]))
    table.add_row("  weights in use", f"{gigabytes(memory['working_weight_bytes'])} as float32")
    table.add_row("  activations", f"{gigabytes(memory['activation_bytes'])} at most")
    tokens = memory["kv_cache_tokens"]
    sequences = tokens // max(memory["max_model_len"], 1)
    plural = "" if sequences == 1 else "s"
    fits = f"{tokens:,} tokens = {sequences:,} sequence{plural} of {memory['max_model_len']:,}"
    table.add_row("  KV cache", f"{gigabytes(memory['kv_cache_bytes'])}: {fits}")
    table.add_row("fits this machine", "no: " + d["problem"] if d["problem"] else "yes")
    Console().print(table)


def _count(parameters: int) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6), ("thousand", 1e3)):
        if parameters >= size:
            return f"{parameters:,} ({parameters / size:.3g} {unit})"
    return str(parameters)
