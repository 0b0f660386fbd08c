"""`quire inspect --quality`: compare a quantized model with the original, on text included with Quire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

from quire.backends.device import device_for
from quire.build import Built, build
from quire.config import QUANTIZATIONS, EngineConfig
from quire.errors import ConfigError
from quire.progress import Advance
from quire.quantize.kinds import Array
from quire.quantize.quality import Quality, compare, text_logits
from quire.text.tokenizer import find_tokenizer

LENGTH = 512  # tokens per text
_TOKENS = 1 << 12  # by which the bytes of caches are counted: so many are whole entries
MOST_LOGITS = 1 << 26  # of the original, which are kept: a large vocabulary means a shorter text

HOW_TO_READ = (
    "KL: divergence of the next-token probabilities from those of the original, in nats per token "
    "(0: equal, 0.01: negligible, 0.1: noticeable). Same best: how often both rank the same token first."
)


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of one storage format. `bits` is the size of a weight, or of a cached number."""

    stored: str
    bits: float
    quality: Quality

    def as_dict(self) -> dict[str, Any]:
        return {"stored": self.stored, "bits": self.bits, **asdict(self.quality)}


def measure(model: str, options: Mapping[str, Any], advance: Advance) -> list[Loss]:
    """Measure every format of weights (or the one in `options`) and of the KV cache, one after the other.

    Raises ConfigError without a tokenizer, or without memory for the unquantized model.
    """
    plain = {**options, "max_num_seqs": 1, "quantization": None, "kv_cache_dtype": "float32"}
    device = device_for(EngineConfig.from_keywords(**plain, model=model))
    if not device.computes:
        raise ConfigError(
            f"device = {device.name!r} computes nothing, so there is nothing to measure", "leave it out"
        )
    chosen = options.get("quantization")
    ways: list[tuple[str, dict[str, Any]]] = [("original", {})]
    ways += [(f"{name} weights", {"quantization": name}) for name in ([chosen] if chosen else QUANTIZATIONS)]
    caches = [name for name in device.kv_dtypes if name != "float32"]
    ways += [(f"{name} KV cache", {"kv_cache_dtype": name}) for name in caches]
    texts: list[list[int]] = []
    base: list[Array] = []
    losses: list[Loss] = []
    for number, (name, change) in enumerate(ways):
        built = build(EngineConfig.from_keywords(model=model, **{**plain, **change}))
        texts = texts or _texts(built)
        total = sum(len(text) for text in texts)
        found: list[Array] = []
        for text in texts:
            advance(name, total * number + sum(len(logits) for logits in found), total * len(ways))
            found.append(logits_of(built, text))
        if number:
            losses.append(Loss(name, _bits(built, change), compare(zip(base, found, strict=True))))
        base = base or found
        del built  # before the next model is loaded
    return losses


def _texts(built: Built) -> list[list[int]]:
    """Return token ids of the included text, in pieces that fit the model's context."""
    facts = built.description
    tokenizer = find_tokenizer(facts.source)
    if tokenizer is None:
        raise ConfigError(
            "this model has no tokenizer, so it cannot read text", "add tokenizer.json to its folder"
        )
    ids = tokenizer.encode(files("quire.assets").joinpath("quality.txt").read_text("utf-8"))
    ids = ids[: max(1, MOST_LOGITS // facts.model.config.vocab_size)]
    length = min(LENGTH, facts.memory.max_model_len)
    return [ids[start : start + length] for start in range(0, len(ids), length)]


def logits_of(built: Built, ids: list[int]) -> Array:
    """Return the logits of every position of one text [T], [T, vocab]."""
    facts = built.description
    return text_logits(
        built.backend.execute,
        ids,
        num_blocks=facts.memory.blocks,
        block_size=facts.config.block_size,
        chunk_size=facts.config.max_num_batched_tokens,
        variant=facts.model.context_variant(len(ids)),
    )


def _bits(built: Built, change: Mapping[str, Any]) -> float:
    """Return the mean bits of a weight, unquantized ones included, or of a cached number; scales count."""
    program = built.description.program
    if "kv_cache_dtype" in change:
        device, dtype = built.description.device, change["kv_cache_dtype"]
        nbytes = sum(device.block_bytes(spec, dtype, _TOKENS) for spec in program.caches)
        return 8 * nbytes / (_TOKENS * program.kv_token_bytes(1))
    specs = program.weights().values()
    return 8 * sum(map(built.description.weights.stored_bytes, specs)) / sum(spec.size for spec in specs)


def print_table(losses: list[Loss]) -> None:
    """Print one row for each format, and how to read the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"\nQuantized against original, over {losses[0].quality.positions:,} tokens",
        title_justify="left",
    )
    table.add_column("format")
    for name in ("bits", "mean KL", "1 in 100 above", "same best"):
        table.add_column(name, justify="right")
    for loss in losses:
        q = loss.quality
        mean = f"{_short(q.mean)} ± {_short(q.error)}"
        table.add_row(loss.stored, f"{loss.bits:.3g}", mean, _short(q.worst), f"{q.agreement:.2%}")
    console = Console()
    console.print(table)
    console.print(HOW_TO_READ, markup=False, highlight=False, soft_wrap=not console.is_terminal)


def _short(nats: float) -> str:
    return f"{max(nats, 0):.2g}"
