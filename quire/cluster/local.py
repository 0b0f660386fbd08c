"""Replicas on this machine, as `quire serve --replicas` asks for."""

from __future__ import annotations

from dataclasses import replace

from quire.backends.device import device_for, named_gpus, without_gpu
from quire.cluster.autoscaling import Autoscaler, goal_of
from quire.cluster.placement import Place, allowed_cores, divide, granted_cores, spread
from quire.cluster.replicas import Replicas
from quire.config import EngineConfig, ServerConfig
from quire.errors import ConfigError
from quire.routing.prefix_router import PrefixRouter
from quire.server.remote import RemoteEngine


def local_replicas(config: ServerConfig, engine_config: EngineConfig, measure: bool) -> Replicas:
    """Return the replicas of a configuration, not started yet. Raises ConfigError if they cannot be.

    Each plans with its share of the memory that is free now, or has GPUs of its own, from the first one that
    the configuration names on.
    """
    if config.record is not None:
        hint = "leave out --record, or serve with one engine"
        raise ConfigError("steps of several replicas cannot be recorded", hint)
    autoscaler = _autoscaler(config, engine_config)
    most = config.replicas[1] if isinstance(config.replicas, tuple) else config.replicas
    places = divide(allowed_cores(), most)
    num_threads = spread(places, engine_config.num_threads, granted_cores())
    own = replace(without_gpu(engine_config), num_threads=num_threads)
    gpus = named_gpus(own)
    share_bytes = None if gpus else device_for(own).available_bytes() // len(places)

    def make(place: Place) -> RemoteEngine:
        device = f"cuda:{gpus.start + places.index(place) * len(gpus)}" if gpus else own.device
        return RemoteEngine(
            replace(own, device=device),
            measure=measure,
            processors=place.processors,
            available_bytes=share_bytes,
            num_sharing=1 if gpus else sum(place.nodes == other.nodes for other in places),
        )

    router = PrefixRouter(own)
    return Replicas(
        make,
        places,
        router,
        block_size=own.block_size,
        drain_s=config.drain_timeout_s,
        autoscaler=autoscaler,
    )


def _autoscaler(config: ServerConfig, engine_config: EngineConfig) -> Autoscaler | None:
    if not isinstance(config.replicas, tuple):
        return None
    goal = goal_of(config.ttft_goal, engine_config.itl_goal, config.replicas)
    return Autoscaler(goal, engine_config, *config.replicas)
