"""`quire inspect`: show a checkpoint's architecture and size, and whether it fits in memory."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from quire.cli.arguments import add_words, check_model
from quire.cli.options import add_engine_flags, engine_options, in_flags
from quire.cli.terminal import bold, counted

if TYPE_CHECKING:
    from quire.cli.quality_report import Loss
    from quire.description import Description
    from quire.weights.kinds_report import KindReport

DESCRIPTION = """Describe a checkpoint before running it: architecture, parameters, size of the weights by
format, KV cache per token, and whether it fits in this machine's memory.

Weights are not read unless --quality is given: a folder with config.json is enough, and only the
small files of a Hub model are downloaded.
"""
WIDTH = 22  # of the first column


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "inspect",
        help="show a model's architecture, size, and whether it fits in memory",
        usage="quire inspect MODEL [flags]",
        description=DESCRIPTION,
    )
    add_words(parser, "MODEL    checkpoint folder, Hub id, or 'demo'")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--quality", action="store_true", help="compare the quantized model with the original (loads both)"
    )
    add_engine_flags(parser)
    parser.set_defaults(function=inspect, parser=parser)


def inspect(args: argparse.Namespace) -> int:
    """Print the description of a model as a table, or as JSON."""
    model, *more = args.words or [args.model]
    if model is None:
        args.parser.refuse("MODEL is missing", "try: quire inspect demo")
    if more:
        args.parser.refuse_unknown(more[0])
    check_model(model)
    from quire.config import EngineConfig
    from quire.description import describe

    options = engine_options(args)
    facts = describe(EngineConfig.from_keywords(model=model, **options), weights=False)
    if not args.json:
        for name, value in _rows(facts):
            _print_row(name, value)
    losses = _measured(model, options) if args.quality else None
    if args.json:
        shown = as_dict(facts) | ({} if losses is None else {"quality": [loss.as_dict() for loss in losses]})
        print(json.dumps(shown, indent=2))
    elif losses is not None:
        from quire.cli.quality_report import print_table

        print_table(losses)
    return 0


def _measured(model: str, options: dict[str, Any]) -> list[Loss]:
    from quire.cli.quality_report import measure
    from quire.progress import steps_bar

    with steps_bar("loading", "measuring: ") as advance:
        return measure(model, options, advance)


def as_dict(facts: Description) -> dict[str, Any]:
    """Return all facts as numbers with full names."""
    from quire.memory import misfit
    from quire.weights.kinds_report import bits_per_weight, report

    cfg, memory, program = facts.model.config, facts.memory, facts.program
    specs = program.weights().values()
    by_kind: Counter[str] = Counter()
    kinds = report(facts.weights)
    for kind in kinds:
        by_kind[str(kind.kept)] += kind.kept_bytes
    in_checkpoint, kept = bits_per_weight(kinds)
    beyond = sum(group.block_bytes for group in memory.sizing.groups if group.window is None)
    in_place = sum(
        facts.weights.stored_bytes(spec) for spec in specs if spec.name in facts.weights.layout.in_place
    )
    error = misfit(memory, facts.config, facts.device)
    return {
        "model": facts.config.model,
        "path": facts.source.where,
        "architecture": facts.model.architecture,
        "backend": facts.device.name,
        **facts.device.facts(),
        "kv_cache_dtype": facts.kv_dtype,
        "drafts": facts.config.drafts if facts.model.pooling is None else "off",
        "gives": _gives(facts),
        "image_tokens": 0 if facts.model.vision is None else facts.model.vision.patching.most_of_all,
        "num_hidden_layers": cfg.num_hidden_layers,
        "hidden_size": cfg.hidden_size,
        "num_attention_heads": cfg.num_attention_heads,
        "num_key_value_heads": facts.model.num_kv_heads,
        "head_dim": cfg.head_dim,
        "vocab_size": cfg.vocab_size,
        "max_position_embeddings": cfg.max_position_embeddings,
        "parameters": sum(spec.size for spec in specs),
        "weights_here": facts.weights_here,
        "weight_bytes": dict(by_kind),
        "weight_format": facts.weights.summary,
        "weight_kinds": [_kind_as_dict(kind) for kind in kinds],
        "bits_per_weight": {"checkpoint": round(in_checkpoint, 3), "memory": round(kept, 3)},
        "notes": list(facts.weights.notes),
        "kv_bytes_per_token": memory.kv_block_bytes // facts.config.block_size,
        "kv_bytes_beyond_windows": beyond // facts.config.block_size,
        "fits": error is None,
        "problem": error.message if error else None,
        "hint": error.hint if error else None,
        "memory": {
            "available_bytes": memory.available_bytes,
            "working_weight_bytes": memory.working_bytes,
            **({"in_place_weight_bytes": in_place} if in_place else {}),
            "activation_bytes": memory.activation_bytes,
            "kv_cache_bytes": memory.kv_bytes,
            "kv_cache_tokens": memory.num_tokens,
            "kv_cache_reason": memory.kv_reason,
            "state_bytes": memory.state_bytes,
            "max_model_len": memory.max_model_len,
            **({"draft_model_bytes": memory.draft_bytes} if memory.draft else {}),
        },
        **({"draft_model": facts.draft.name} if facts.draft else {}),
    }


def _kind_as_dict(kind: KindReport) -> dict[str, Any]:
    return {
        "stored": str(kind.stored),
        "kept": str(kind.kept),
        "stored_bytes": kind.stored_bytes,
        "kept_bytes": kind.kept_bytes,
        "computed": kind.computed,
        "rounded_twice": kind.rounded_twice,
        "weights": [spec.name for spec in kind.specs],
    }


def _gives(facts: Description) -> str:
    """Return in words what the model gives for a text."""
    pooling, width = facts.model.pooling, facts.program.output.width
    if pooling is None:
        return "text"
    if pooling.task == "score":
        return "scores of pairs of texts"
    ways = {"mean": "the mean", "cls": "of the first token", "last": "of the last token"}
    scaled = ", scaled to length 1" if pooling.normalized else ""
    return f"embeddings of {width:,} numbers: {ways[pooling.method]}{scaled}"


def _heads(facts: Description, d: dict[str, Any]) -> str:
    from quire.program.ops import CompressedAttention, LatentAttention

    queries = f"{d['num_attention_heads']} query"
    if found := [op for op in facts.program if isinstance(op, CompressedAttention)]:
        kinds = sorted({op.every: op.most for op in found if op.every}.items())
        entries = [f"{every}" if most is None else f"{every} (at most {most:,})" for every, most in kinds]
        over = f"{queries} heads over vectors of {d['head_dim']} numbers, of {found[0].window} positions"
        return f"{over} and of entries of {' or '.join(entries)} tokens" if entries else over
    if op := next((op for op in facts.program if isinstance(op, LatentAttention)), None):
        over = f"{queries} heads over latents of {op.spec.rank} + {op.spec.rope_dim} numbers"
        return over if op.most is None else f"{over}, of at most {op.most:,} positions"
    return f"{queries} and {d['num_key_value_heads']} key/value heads of {d['head_dim']}"


def _cache_in_words(d: dict[str, Any]) -> str:
    from quire.memory import gigabytes

    whole, beyond = d["kv_bytes_per_token"], d["kv_bytes_beyond_windows"]
    return gigabytes(whole) if whole == beyond else f"{gigabytes(whole)}, {gigabytes(beyond)} beyond windows"


def _rows(facts: Description) -> Iterator[tuple[str, str]]:
    """Yield the rows of the table."""
    from quire.weights.left_out import in_words

    d = as_dict(facts)
    yield "model", d["model"] if d["model"] == d["path"] else f"{d['model']}  ({d['path']})"
    yield "architecture", d["architecture"]
    heads = _heads(facts, d)
    yield "shape", f"{counted(d['num_hidden_layers'], 'layer')}, hidden {d['hidden_size']:,}, {heads}"
    context = f"{d['max_position_embeddings']:,} positions"
    yield "vocabulary, context", f"{d['vocab_size']:,} tokens, {context}"
    parameters = d["parameters"]
    yield "parameters", f"{parameters:,} ({in_words(parameters)})" if parameters >= 1000 else str(parameters)
    yield from _weight_rows(facts, d)
    if (vision := facts.model.vision) is not None:
        size = in_words(sum(spec.size for spec in vision.program.weights().values()))
        yield "images", f"up to {vision.patching.most_of_all:,} tokens each, by a tower of {size} parameters"
    if not d["weights_here"]:
        yield "weight files", f"{facts.source.without_weights()}: sizes from config.json"
    yield "KV cache per token", _cache_in_words(d)
    yield "backend", f"{d['backend']}: {facts.device.in_words()}"
    yield ("drafts", d["drafts"]) if facts.model.pooling is None else ("gives", d["gives"])
    yield from _memory_rows(d, _kept_as(facts))
    if d["hint"]:
        yield "", f"hint: {in_flags(d['hint'])}"


def _weight_rows(facts: Description, d: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the rows about the kinds of weights: of a quantized checkpoint, which weights have which."""
    from quire.memory import gigabytes
    from quire.weights.kinds_report import report

    if all(kind.stored.is_float for kind in report(facts.weights)):
        for name, nbytes in d["weight_bytes"].items():
            yield "weights", f"{gigabytes(nbytes)} in {name}"
    else:
        if facts.weights.summary:
            yield "checkpoint", facts.weights.summary
        for kind in report(facts.weights):
            yield "weights", f"{gigabytes(kind.stored_bytes)} in {kind.stored}: {kind.roles()}"
            if kind.computed:
                yield "  computed", kind.computed
        bits = d["bits_per_weight"]
        kept = f", {bits['memory']:.3g} in memory" if bits["memory"] != bits["checkpoint"] else ""
        yield "  average", f"{bits['checkpoint']:.3g} bits a weight{kept}"
    if len(d["weight_bytes"]) > 1:
        yield "  total", gigabytes(sum(d["weight_bytes"].values()))
    if any(kind["rounded_twice"] for kind in d["weight_kinds"]):
        yield "", "hint: these weights are rounded already: without --quantization they stay as they are"
    for note in d["notes"]:
        yield "  note", note


def _memory_rows(d: dict[str, Any], kept_as: str) -> Iterator[tuple[str, str]]:
    """Yield the rows that compare the memory needed with the memory available."""
    from quire.memory import gigabytes

    memory = d["memory"]
    available, working = memory["available_bytes"], memory["working_weight_bytes"]
    tokens, longest = memory["kv_cache_tokens"], memory["max_model_len"]
    yield "memory available", gigabytes(available)
    yield "  weights in use", gigabytes(working) + kept_as
    if in_place := memory.get("in_place_weight_bytes"):
        yield "  read in place", f"{gigabytes(in_place)} more stay in the files, read by row"
    yield "  activations", f"{gigabytes(memory['activation_bytes'])} at most"
    if tokens:
        sequences = counted(tokens // max(longest, 1), "sequence")
        room = (
            f"{tokens:,} tokens = {sequences} of {longest:,}" if tokens >= longest else f"{tokens:,} tokens"
        )
        reserved = f"{gigabytes(memory['kv_cache_bytes'])}: {room}"
        yield "  KV cache", f"{reserved} ({memory['kv_cache_reason']})"
    if memory["state_bytes"]:
        yield "  states", gigabytes(memory["state_bytes"])
    if "draft_model_bytes" in memory:
        yield "  draft model", f"{gigabytes(memory['draft_model_bytes'])} of these"
    fixed = working + memory["activation_bytes"] + memory["state_bytes"]
    short = fixed + memory["kv_cache_bytes"] - available
    if d["fits"]:
        yield "fits this machine", "yes"
    elif short > 0:
        culprit = "the weights alone are" if working > available else "weights and activations are"
        culprit = culprit if fixed > available else "the requested KV cache is"
        yield "fits this machine", f"no: {gigabytes(short)} short: {culprit} too large"
    else:
        yield "fits this machine", f"no: {in_flags(d['problem'])}"


def _kept_as(facts: Description) -> str:
    """Describe the format of weights that the backend does not keep as stored."""
    if not (kept := facts.device.keeps_floats_as):
        return ""
    quantized = any(not how.is_float for how in facts.weights.storage.values())
    return f", unquantized ones as {kept}" if quantized else f" as {kept}"


def _print_row(name: str, value: str) -> None:
    """Print one row: wrapped in a terminal, else in one line."""
    value = "".join(c if c.isprintable() else "?" for c in value)  # a path or a config can hold anything
    lines = [value]
    if sys.stdout.isatty():
        width = max(shutil.get_terminal_size().columns - WIDTH, 20)
        lines = textwrap.wrap(value, width, break_long_words=False, break_on_hyphens=False) or [""]
    print(bold(f"{name:<{WIDTH}}") + ("\n" + " " * WIDTH).join(lines))
