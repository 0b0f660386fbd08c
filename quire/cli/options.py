"""Flags from fields: options of EngineConfig and ServerConfig, and sampling parameters one sets by hand."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

from quire.config import EngineConfig, ServerConfig
from quire.errors import did_you_mean, shortened
from quire.sampling_params import SamplingParams

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "stop")
FRACTIONS = ("temperature", "top_p", "min_p", "repetition_penalty")
# Words for the command line where those of the field are for Python.
HELP = {
    "max_tokens": "tokens of an answer at most (default: what is left of the context)",
    "stop": "text that ends the answer; may be given several times",
    "kv_cache_memory_bytes": "size of the KV cache, such as 512M or 4G (default: what fits, "
    "bounded by what --max-num-seqs can use)",
}
NOT_YET = ("cuda", "gpu", "rocm", "hip", "mps", "metal", "xpu", "tpu")
# Names that can only be those of fields: "seed" and "stop" are words, too.
_CONFIGURED = [f.name for f in (*fields(EngineConfig), *fields(ServerConfig))]
_FIELDS = [name for name in (*SAMPLING, *_CONFIGURED) if "_" in name]
_NAMES = re.compile(rf"\b({'|'.join(_FIELDS)})\b( = )?")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?", re.IGNORECASE)


def add_engine_flags(parser: argparse.ArgumentParser, defaults: Mapping[str, Any] | None = None) -> None:
    """One flag for each field of EngineConfig but `model`, under its own name.

    `defaults` are those of the command where they differ.
    """
    group = parser.add_argument_group("engine")
    for field in fields(EngineConfig):
        if field.name != "model":
            group.add_argument(_flag(field.name), **_describe(field, (defaults or {}).get(field.name)))


def add_server_flags(parser: argparse.ArgumentParser, names: Collection[str] | None = None) -> None:
    """Add one flag for each field of ServerConfig, or for those with these names."""
    group = parser.add_argument_group("server")
    for field in fields(ServerConfig):
        if names is None or field.name in names:
            group.add_argument(_flag(field.name), **_describe(field, None))


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """The sampling parameters that matter at a terminal; defaults are the model's."""
    group = parser.add_argument_group("sampling (defaults: the model's generation_config.json)")
    for field in fields(SamplingParams):
        if field.name not in SAMPLING:
            continue
        text = HELP.get(field.name) or field.metadata["help"]
        if field.name == "stop":
            group.add_argument("--stop", action="append", metavar="TEXT", help=text)
        else:
            kind, metavar = (_fraction, "X") if field.name in FRACTIONS else (_whole, "N")
            group.add_argument(_flag(field.name), type=kind, metavar=metavar, help=text)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was given of EngineConfig's fields, as keywords."""
    names = [field.name for field in fields(EngineConfig) if field.name != "model"]
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def server_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was given of ServerConfig's fields, as keywords."""
    given = {field.name: getattr(args, field.name, None) for field in fields(ServerConfig)}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if value is not None
    }


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was given of the sampling parameters, as keywords."""
    return {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}


def in_flags(text: str) -> str:
    """A message as the command line says it: --max-num-seqs 0 where Python says max_num_seqs = 0."""
    text = _NAMES.sub(lambda found: _flag(found[1]) + (" " if found[2] else ""), text)
    return text.replace(", or None", "")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _describe(field: Field[Any], default: Any) -> dict[str, Any]:
    """argparse's words for a field. Its class has the defaults, once; `default` is a command's own."""
    rule = field.metadata
    text = (HELP.get(field.name) or rule["help"]).replace("%", "%%")
    shown = field.default if default is None else default
    if isinstance(field.default, bool):
        text += f" (default: {'on' if shown else 'off'})"
        return {"action": argparse.BooleanOptionalAction, "help": text, "default": default}
    if rule.get("many"):
        return {"action": "append", "help": text, "metavar": "TEXT"}
    if shown is not None and shown is not MISSING:
        text += f" (default: {shown})"
    described = {"help": text, "default": default}
    if choices := rule.get("choices"):
        metavar = "{" + ",".join(map(str, choices)) + "}"
        return described | {"type": _chooser(choices), "metavar": metavar}
    if field.name.endswith("_bytes"):
        return described | {"type": _size, "metavar": "BYTES"}
    return described | ({"type": _whole, "metavar": "N"} if "low" in rule else {"metavar": "TEXT"})


def _chooser(choices: tuple[Any, ...]) -> Callable[[str], Any]:
    """Takes one of the choices. argparse's own check would not suggest the nearest."""
    by_name = {str(choice): choice for choice in choices}

    def choose(text: str) -> Any:
        if text in by_name:
            return by_name[text]
        if text.split(":")[0].lower() in NOT_YET:
            raise _refusal(f"{text!r} is not there yet", "models are computed on the processor so far")
        hint = did_you_mean(text[:80], by_name) or f"choose one of {', '.join(by_name)}"
        raise _refusal(f"{shortened(text)!r} is not possible", hint)

    return choose


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise _refusal(f"{shortened(text)!r} is not a whole number") from None


def _fraction(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise _refusal(f"{shortened(text)!r} is not a number") from None


def _size(text: str) -> int:
    """Bytes: 512M and 4G in powers of 1000, as Quire prints them; 4Gi in powers of 1024."""
    if (match := _SIZE.fullmatch(text.strip())) is None:
        raise _refusal(f"{shortened(text)!r} is not a size", "give bytes, or a number with K, M or G: 512M")
    number, unit, binary = match.groups()
    power = " kmgt".index(unit.lower()) if unit else 0
    return round(float(number) * (1024 if binary else 1000) ** power)


def _refusal(message: str, hint: str | None = None) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{message}\nhint: {hint}" if hint else message)
