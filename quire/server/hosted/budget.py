"""The memory of several models: what each may plan with, and the refusal of one that can never fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.backends.device import device_for
from quire.config import EngineConfig, ServerConfig
from quire.description import Description, describe
from quire.engine.status import ModelFacts
from quire.environment import user_path
from quire.errors import ConfigError, QuireError
from quire.memory import beside_bytes, gigabytes, misfit
from quire.models.purpose import Pooling
from quire.server.hosted.policy import Need, nbytes
from quire.weights.adapters import found_in

# Fields that decide what weights are in memory
OF_WEIGHTS = ("model", "revision", "hf_overrides", "quantization", "speculative", "task", "adapter_dir")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model that a server has, by its first name, with the settings of its engine and its endpoints."""

    name: str
    config: ServerConfig
    engine_config: EngineConfig

    def adapter_names(self) -> list[str]:
        """Return the names of the adapters in its folder. Raises ConfigError if that cannot be read."""
        folder = self.engine_config.adapter_dir
        return [] if folder is None else found_in(user_path(folder))


@dataclass(frozen=True, slots=True)
class Allotment:
    """The memory of one model: its engine plans with `available_bytes`, and needs `need` of it.

    `num_sharing` models have the same weights, this one included. `facts` are its sizes; `pooling` tells how
    it gives vectors or scores, None if it generates text.
    """

    available_bytes: int
    need: Need
    num_sharing: int
    facts: ModelFacts
    pooling: Pooling | None

    @property
    def engine_bytes(self) -> int:
        """Bytes that its engine plans with, which counts its part of weights that several share."""
        weight_bytes = self.need.weight_bytes
        return self.available_bytes - weight_bytes + -(-weight_bytes // self.num_sharing)


def budgets(specs: Sequence[ModelSpec], limit_bytes: int | None) -> tuple[int, list[Allotment]]:
    """Return the limit for all models together, by default the memory that is free now, and each one's part.

    What the limit leaves beside the weights of all models is divided among them in equal parts; if they do
    not fit together, what it leaves beside the largest. Raises ConfigError for a model that cannot fit alone.
    Models are described by their small files: weights may be downloaded later.
    """
    free_bytes = device_for(specs[0].engine_config).available_bytes()
    if limit_bytes is not None and limit_bytes > free_bytes:
        problem = f"max_loaded_memory is {gigabytes(limit_bytes)}, and {gigabytes(free_bytes)} are free"
        raise ConfigError(problem, "give less, or leave it out: then all that is free is used")
    limit = free_bytes if limit_bytes is None else limit_bytes
    alone = [_described(spec, limit) for spec in specs]
    fixed = [one.memory.needed_bytes(0) + beside_bytes(one.device, one.config) for one in alone]
    weights = [_weights(spec) for spec in specs]
    together = nbytes(
        Need(name, one.memory.working_bytes, own - one.memory.working_bytes)
        for name, one, own in zip(weights, alone, fixed, strict=True)
    )
    rest = limit - (together if together < limit else max(fixed))
    found = []
    for spec, one, name, own in zip(specs, alone, weights, fixed, strict=True):
        available = own + rest // len(specs)
        planned = describe(spec.engine_config, weights=False, available_bytes=available)
        if misfit(planned.memory, planned.config, planned.device) is not None:
            available, planned = limit, one  # the others make room
        working = planned.memory.working_bytes
        other = planned.memory.total_bytes - working + beside_bytes(planned.device, planned.config)
        need = Need(name, working, other)
        facts, pooling = planned.model_facts, planned.model.pooling
        found.append(Allotment(available, need, weights.count(name), facts, pooling))
    return limit, found


def _described(spec: ModelSpec, limit_bytes: int) -> Description:
    """Describe a model that has the whole limit. Raises ConfigError if it cannot be served."""
    try:
        described = describe(spec.engine_config, weights=False, available_bytes=limit_bytes)
        error = misfit(described.memory, described.config, described.device)
    except QuireError as failure:
        raise ConfigError(f"model {spec.name!r}: {failure.message}", failure.hint) from None
    if error is not None:
        hint = "; ".join(filter(None, ("raise --max-loaded-memory", error.hint)))
        raise ConfigError(f"model {spec.name!r} cannot be loaded: {error.message}", hint)
    return described


def _weights(spec: ModelSpec) -> str:
    """Return what models with the same weights in memory have in common; they share them by a file."""
    if not device_for(spec.engine_config, share_weights=True).shares_weights:
        return spec.name
    return repr([getattr(spec.engine_config, name) for name in OF_WEIGHTS])
