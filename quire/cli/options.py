"""Flags from fields: every option of EngineConfig, and the sampling parameters one sets by hand."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from typing import Any

from quire.config import EngineConfig
from quire.sampling_params import SamplingParams

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "stop")
NUMBERS = {"temperature": float, "top_p": float, "min_p": float, "repetition_penalty": float}


def add_engine_flags(parser: argparse.ArgumentParser, skip: Iterable[str] = ("model",)) -> None:
    """One flag for each field of EngineConfig, under its own name."""
    group = parser.add_argument_group("engine")
    for field in fields(EngineConfig):
        if field.name not in skip:
            group.add_argument(_flag(field.name), **_describe(field))


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """The sampling parameters that matter at a terminal; defaults are the model's."""
    group = parser.add_argument_group("sampling (defaults: the model's generation_config.json)")
    for field in fields(SamplingParams):
        if field.name in SAMPLING:
            kind = str if field.name == "stop" else NUMBERS.get(field.name, int)
            group.add_argument(
                _flag(field.name), type=kind, metavar=_metavar(kind), help=field.metadata["help"]
            )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was given of EngineConfig's fields, as keywords."""
    names = [field.name for field in fields(EngineConfig) if field.name != "model"]
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was given of the sampling parameters, as keywords."""
    return {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _metavar(kind: type) -> str:
    return {int: "N", float: "X", str: "TEXT"}[kind]


def _describe(field: Field[Any]) -> dict[str, Any]:
    """argparse's words for a field. No defaults here: EngineConfig has them, once."""
    rule, text = field.metadata, field.metadata["help"]
    if field.default is not None and field.default is not MISSING and not isinstance(field.default, bool):
        text += f" (default: {field.default})"
    if isinstance(field.default, bool):
        state = "on" if field.default else "off"
        return {
            "action": argparse.BooleanOptionalAction,
            "help": f"{text} (default: {state})",
            "default": None,
        }
    choices = rule.get("choices")
    numeric = "low" in rule or (choices and isinstance(choices[0], int))
    kind = int if numeric else str
    return {"type": kind, "choices": choices, "metavar": None if choices else _metavar(kind), "help": text}
