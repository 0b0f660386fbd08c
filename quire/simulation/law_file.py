"""Files of laws: JSON with the law of a model's steps on a machine, and the delays of its clients."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.engine.step_law import Stage, StepLaw
from quire.errors import ConfigError
from quire.program.features import Feature
from quire.simulation.clients import NO_DELAYS, Delays

VERSION = 1


@dataclass(frozen=True, slots=True)
class KnownLaw:
    """A law and the delays of clients. `source` says in words where they come from."""

    law: StepLaw
    delays: Delays = NO_DELAYS
    source: str = ""


def as_json(known: KnownLaw) -> dict[str, Any]:
    """Return the content of a file."""
    law = known.law
    return {
        "quire_law": VERSION,
        "source": known.source,
        "delays": known.delays._asdict(),
        "law": law._asdict()
        | {
            "features": [feature._asdict() for feature in law.features],
            "stages": [stage._asdict() for stage in law.stages],
            "roof": [stage._asdict() for stage in law.roof],
        },
    }


def write_law(path: Path, known: KnownLaw) -> None:
    """Write a file."""
    path.write_text(json.dumps(as_json(known), indent=1) + "\n", "utf-8")


def read_law(path: Path) -> KnownLaw:
    """Read a file. Raises ConfigError for one that is not a law."""
    try:
        return from_json(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{path}: not a law of steps: {type(error).__name__}: {error}",
            "'quire simulate --save-law FILE' writes one",
        ) from error


def from_json(content: Any) -> KnownLaw:
    """Return the law of a file's content. Raises ValueError, LookupError, TypeError or AttributeError."""
    if content["quire_law"] != VERSION:
        raise ValueError(f"version {content['quire_law']} instead of {VERSION}")
    fields = dict(content["law"])
    fields["features"] = tuple(Feature(**one) for one in fields["features"])
    for name in ("stages", "roof"):
        fields[name] = tuple(_stage(one, len(fields["features"])) for one in fields[name])
    fields["overhead"] = _row(fields["overhead"], len(fields["features"]))
    delays = Delays(**{name: float(value) for name, value in content["delays"].items()})
    return KnownLaw(StepLaw(**fields), delays, str(content.get("source", "")))


def _stage(content: dict[str, Any], num_features: int) -> Stage:
    rows = {name: _row(content[name], num_features) for name in ("memory", "arithmetic")}
    return Stage(**content | rows)


def _row(content: list[Any], num_features: int) -> tuple[float, ...]:
    row = tuple(map(float, content))
    if len(row) != num_features:
        raise ValueError(f"{len(row)} coefficients for {num_features} features")
    return row
