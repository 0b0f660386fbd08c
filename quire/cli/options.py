"""Command-line flags generated from the fields of EngineConfig, ServerConfig and SamplingParams."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

from quire.cli.option_types import DRAFTS, DURATION, FRACTION, RANGE, SIZE, TEXT, WHOLE, Repeated, choice_of
from quire.config import EngineConfig, ServerConfig
from quire.config_option import check_value
from quire.sampling_params import SamplingParams

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "stop")
FRACTIONS = ("temperature", "top_p", "min_p", "repetition_penalty")
# Help texts for the command line where those of the field are written for Python.
HELP = {
    "max_tokens": "maximum tokens per answer (default: the rest of the context)",
    "stop": "text that ends the answer; repeatable",
    "kv_cache_memory_bytes": "size of the KV cache, such as 512M or 4G",
    "prefix_cache_bytes": "maximum size of all files in --prefix-cache-dir, such as 20G; what was used least "
    "recently is removed",
    "itl_goal": "time between two tokens, such as 60ms, to be kept in 99 of 100 cases: prompts are computed "
    "in chunks, and sequences together, as that allows",
    "replicas": "engines that serve the model, each in a process with its own share of the cores and of the "
    "memory; more than one get requests by a router that knows what each has cached; MIN-MAX: as many as are "
    "predicted to keep --ttft-goal and --itl-goal",
    "idle_unload": "time without a request, such as 10m, after which one of several models is unloaded",
    "load_wait": "time that a request waits at most, such as 2m, until its model is loaded, where there are "
    "several",
    "ttft_goal": "time until the first token, such as 1s; a request whose first token would come later is "
    "refused with a 503",
}
UNSET = {"kv_cache_memory_bytes": "what fits in memory, up to what --max-num-seqs can use"}
# Names that can only be fields: "seed", "stop" and, but for the beginning of errors, "speculative" are also
# ordinary words.
_CONFIGURED = [f.name for f in (*fields(EngineConfig), *fields(ServerConfig))]
_FIELDS = {name for name in (*SAMPLING, *_CONFIGURED) if "_" in name}
_WORD = re.compile(r"\b(\w+)\b( = )?")  # one of all names would take longer to compile than all the rest here


def add_engine_flags(
    parser: argparse.ArgumentParser,
    defaults: Mapping[str, Any] | None = None,
    names: Collection[str] | None = None,
    unset: Mapping[str, str] | None = None,
) -> None:
    """Add one flag for each field of EngineConfig but `model`, or for those with these names.

    `defaults` are those of the command where they differ; `unset` says what it does without a value.
    """
    group = parser.add_argument_group("engine")
    for field in fields(EngineConfig):
        if field.name != "model" and (names is None or field.name in names):
            group.add_argument(
                _flag(field.name),
                **_describe(field, *(given.get(field.name) for given in (defaults or {}, unset or {}))),
            )


def add_server_flags(parser: argparse.ArgumentParser, names: Collection[str] | None = None) -> None:
    """Add one flag for each field of ServerConfig, or for those with these names."""
    group = parser.add_argument_group("server")
    for field in fields(ServerConfig):
        if names is None or field.name in names:
            group.add_argument(_flag(field.name), **_describe(field))


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each sampling parameter that is useful in a terminal. Defaults are the model's."""
    group = parser.add_argument_group("sampling (defaults: the model's generation_config.json)")
    for field in fields(SamplingParams):
        if field.name not in SAMPLING:
            continue
        text = HELP.get(field.name) or field.metadata["help"]
        if field.name == "stop":
            group.add_argument("--stop", action=Repeated, type=TEXT, metavar="TEXT", help=text)
        else:
            kind, metavar = (FRACTION, "X") if field.name in FRACTIONS else (WHOLE, "N")
            group.add_argument(_flag(field.name), type=kind, metavar=metavar, help=text)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values given for fields of EngineConfig, as keywords."""
    names = [field.name for field in fields(EngineConfig) if field.name != "model"]
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def server_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values given for fields of ServerConfig, as keywords."""
    given = {field.name: getattr(args, field.name, None) for field in fields(ServerConfig)}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if value is not None
    }


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values given for sampling parameters, as keywords."""
    return {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}


def check_option(name: str, value: Any) -> None:
    """Raise ConfigError or RequestError for a value outside its option's range."""
    if name in SAMPLING:
        rule = next(field for field in fields(SamplingParams) if field.name == name).metadata
        rule["check"](name, value)
    for field in (*fields(EngineConfig), *fields(ServerConfig)):
        if field.name == name:
            check_value(field, value)


def in_flags(text: str) -> str:
    """Rewrite a message for the command line: max_num_seqs = 0 becomes --max-num-seqs 0."""

    def renamed(found: re.Match[str]) -> str:
        is_field = found[1] in _FIELDS or (found[1] == "speculative" and found[2])
        return _flag(found[1]) + (" " if found[2] else "") if is_field else found[0]

    return _WORD.sub(renamed, text).replace(", or None", "")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _describe(field: Field[Any], default: Any = None, unset: str | None = None) -> dict[str, Any]:
    """Return argparse's options for a field. `default` and `unset` are the command's own, if it has any.

    The defaults of fields are left to their classes.
    """
    rule = field.metadata
    text = (HELP.get(field.name) or rule["help"]).replace("%", "%%")
    shown = field.default if default is None else default
    if isinstance(field.default, bool):
        text += f" (default: {'on' if shown else 'off'})"
        return {"action": argparse.BooleanOptionalAction, "help": text, "default": default}
    if shown in (None, (), MISSING):
        shown = unset or UNSET.get(field.name, rule.get("unset"))
    if rule.get("duration") and isinstance(shown, float):
        shown = f"{shown:g}s"
    if shown is not None:
        text += f" (default: {shown})"
    if rule.get("many"):
        return {"action": Repeated, "type": TEXT, "help": text, "metavar": "TEXT"}
    described = {"help": text, "default": default}
    if choices := rule.get("choices"):
        metavar = "{" + ",".join(map(str, choices)) + "}"
        others = (rule.get("numbered", ()), rule.get("misread", ()), rule.get("instead"))
        return described | {"type": choice_of(choices, *others), "metavar": metavar}
    if field.name == "speculative":
        return described | {"type": DRAFTS, "metavar": rule["metavar"]}
    if rule.get("duration"):
        return described | {"type": DURATION, "metavar": "TIME"}
    if field.name.endswith("_bytes") or rule.get("size"):
        return described | {"type": SIZE, "metavar": "BYTES"}
    if rule.get("range"):
        return described | {"type": RANGE, "metavar": "N|MIN-MAX"}
    if "low" in rule:
        return described | {"type": WHOLE, "metavar": "N"}
    metavar = rule.get("metavar", "FILE" if field.name.endswith("file") else "TEXT")
    return described | {"type": TEXT, "metavar": metavar}
