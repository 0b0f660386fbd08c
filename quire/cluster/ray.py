"""Quire on a Ray cluster: the server's application and the engines as two deployments of Ray Serve.

The *front* has the whole server but the engine: HTTP reaches it through Serve's proxies, and it calls the
engines through a handle whose RequestRouter asks the front's own router. So a deployment answers as one
server does. Everything that knows Ray is in this file.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import ray
import yaml
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import (
    AutoscalingConfig,
    AutoscalingContext,
    AutoscalingPolicy,
    HTTPOptions,
    RequestRouterConfig,
)
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from quire.backends.device import device_for, named_gpus, without_gpu
from quire.cluster.autoscaling import Autoscaler, goal_of
from quire.cluster.called_replicas import CalledReplicas
from quire.cluster.deployment_failure import check_reachable, why_failed
from quire.cluster.engine_calls import EngineCalls
from quire.cluster.ray_environment import CLUSTER_ENV, SERVE_ENV
from quire.config import EngineConfig, ServerConfig, served
from quire.environment import api_keys, cache_folder, hand_down
from quire.errors import ConfigError, did_you_mean
from quire.routing.prefix_router import PrefixRouter
from quire.server import malloc_arenas
from quire.server.logs import setup
from quire.server.remote import RemoteEngine

UNBOUNDED = 1 << 20  # calls at once: the front bounds its queue, and the engine how many it runs
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 2.0, 30.0
DRAIN_POLL_S = 0.2
MAX_FRONTS = 1024
READY_AGAIN_S = 60.0  # in which an engine that is replaced is ready again, after the old one has ended
TELL_S = 2.0  # between two times that engines tell Serve how many there should be
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """The parts of a deployment. `address`: that of a cluster, None for one on this machine alone.

    With `keyed`, requests need an API key, which each host of the cluster must know; it is not sent there.
    `replicas` may be a range: see ServerConfig. Raises ConfigError.
    """

    server: ServerConfig
    engine: EngineConfig
    replicas: int | tuple[int, int] = 1
    fronts: int = 1
    name: str = "quire"
    address: str | None = None
    keyed: bool = False

    def __post_init__(self) -> None:
        ServerConfig(replicas=self.replicas)  # checks it
        if not 1 <= self.fronts <= MAX_FRONTS:
            raise ConfigError(f"fronts = {self.fronts:,} is out of range", f"give 1 to {MAX_FRONTS}")
        if self.range is not None:
            goal_of(self.server.ttft_goal, self.engine.itl_goal, self.range)
            if self.fronts > 1:
                hint = "leave out fronts, or give one number of replicas"
                raise ConfigError("the number of replicas follows the load that one front sees", hint)

    @property
    def range(self) -> tuple[int, int] | None:
        """The least and the most replicas, if their number follows the load."""
        return self.replicas if isinstance(self.replicas, tuple) else None


class EngineReplica:
    """An engine in a replica of Serve."""

    def __init__(self, config: EngineConfig) -> None:
        own = replace(config, device="cuda") if named_gpus(config) else config  # one that Ray gives it
        self._config = without_gpu(own)
        self._wanted = 0  # as the front told last

    async def reconfigure(self, options: dict[str, int]) -> None:
        """Start the engine, when Serve calls this first; "most" is how many there may be in the cluster.

        Those that have room on this host share their weights, and each plans with its part of the memory
        that is free; on GPUs each has its own.
        """
        if hasattr(self, "_engine"):
            return
        alone, threads = bool(named_gpus(self._config)), self._config.num_threads or 1
        num_sharing = 1 if alone else min(options["most"], _num_fitting(threads))
        async with _turn():
            share_bytes = None if alone else device_for(self._config).available_bytes() // num_sharing
            self._engine = RemoteEngine(
                self._config, measure=True, available_bytes=share_bytes, num_sharing=num_sharing
            )
            await self._engine.start()
        self._calls = EngineCalls(self._engine)

    async def generate(
        self, request_id: str, call: bytes, host: str, sent_s: float
    ) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self._calls.generate(call, host, sent_s)) as answer:
            async for frame in answer:
                yield frame

    async def abort(self, there: str, request_id: str, sequence: int | None) -> None:
        self._check_meant(there)
        self._calls.abort(request_id, sequence)

    async def poll(self, there: str, name: str, watches: bool, ready: bool, wanted: int) -> bytes:
        self._check_meant(there)
        self._wanted = wanted or self._wanted
        return await self._calls.poll(name, watches, ready)

    async def record_autoscaling_stats(self) -> dict[str, int]:
        """Return what Serve gives to `wanted_replicas` in its controller."""
        return {"wanted": self._wanted}

    @staticmethod
    def _check_meant(there: str) -> None:
        if serve.get_replica_context().replica_id.unique_id != there:
            raise RuntimeError(f"the replica {there} is gone")

    async def check_health(self) -> None:
        """Raise when the engine is not started again after a death: Serve then replaces the replica."""
        if self._engine.status.state == "stopped":
            raise RuntimeError("the engine died too often to be started again")

    async def __del__(self) -> None:
        if hasattr(self, "_engine"):
            await self._engine.close()


def _num_fitting(num_cpus: int) -> int:
    """Return how many actors with so many cores have room on this host of the cluster."""
    node = ray.get_runtime_context().get_node_id()
    cpus = next(one["Resources"].get("CPU", 0) for one in ray.nodes() if one["NodeID"] == node)
    return max(1, int(cpus // num_cpus))


@contextlib.asynccontextmanager
async def _turn() -> AsyncIterator[None]:
    """Wait while another engine of this host starts: the first one packs weights and measures for all."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".starting").open("a") as lock:
        await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
        yield


class FrontReplica:
    """The server's application in a replica of Serve, whose engines are those of another deployment."""

    async def __init__(  # type: ignore[misc]
        self,
        config: ServerConfig,
        engine: EngineConfig,
        keyed: bool,
        range: tuple[int, int] | None,
        engines: DeploymentHandle,
    ) -> None:
        from quire.server.app import make_app  # here, as they import much
        from quire.server.lifecycle import make_service

        setup(config.log_format)
        keys = api_keys(config.api_key_file)
        if keyed and not keys:
            raise ConfigError(
                "this host of the cluster knows no API key",
                "set QUIRE_API_KEY for 'ray start', or give an api_key_file that every host has",
            )
        malloc_arenas.share()
        scaler = range and Autoscaler(goal_of(config.ttft_goal, engine.itl_goal, range), engine, *range)
        patience_s = config.drain_timeout_s + READY_AGAIN_S
        self._replicas = CalledReplicas(_HandleCalls(engines), PrefixRouter(engine), scaler, patience_s)
        CalledReplicas.of_front = self._replicas
        await self._replicas.start()
        self._service = make_service(config, engine, self._replicas, bool(keys))
        self._service.take_several(self._replicas)
        self._app = make_app(self._service, keys, named_outside=True)  # by Serve

    def __serve_build_asgi_app__(self) -> Any:
        return self._app

    async def __del__(self) -> None:
        if hasattr(self, "_service"):
            self._service.close()
        if hasattr(self, "_replicas"):
            await self._replicas.close()


class _HandleCalls:
    """Calls through the handle of the engines' deployment. Its router sees their names and arguments."""

    def __init__(self, engines: DeploymentHandle) -> None:
        self._engines = engines
        self._streaming = engines.options(stream=True)

    async def generate(
        self, request_id: str, call: bytes, host: str, sent_s: float
    ) -> AsyncGenerator[bytes, None]:
        answer = self._streaming.generate.remote(request_id, call, host, sent_s)
        ended = False
        try:
            async for frame in answer:
                yield frame
            ended = True
        finally:
            if not ended:
                answer.cancel()

    async def abort(self, replica: str, request_id: str, sequence: int | None) -> None:
        await self._engines.abort.remote(replica, request_id, sequence)

    async def poll(self, replica: str, name: str, watches: bool, ready: bool, wanted: int) -> bytes:
        frames: bytes = await self._engines.poll.remote(replica, name, watches, ready, wanted)
        return frames


class BlockRouter(RequestRouter):
    """Routes the calls of a front to the replica that the front chooses, or that they are meant for.

    Serve copies this class by value to the processes that need it, so what it knows is not in this module.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the one replica for a call; all if it is gone or none is ready, to have the call refused.

        A call that gets no replica would keep others from being routed, so there is none that waits here.
        """
        replicas = CalledReplicas.of_front
        if replicas is None or pending_request is None:
            return [candidate_replicas]
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        subject: str = pending_request.args[0]
        is_routed = pending_request.metadata.call_method == "generate"
        chosen = replicas.choose(subject, by_name) if is_routed else subject
        return [[by_name[chosen]]] if chosen in by_name else [candidate_replicas]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        if (replicas := CalledReplicas.of_front) and pending_request.metadata.call_method == "generate":
            replicas.sent(pending_request.args[0], replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._tell()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._tell()

    def _tell(self) -> None:
        if (replicas := CalledReplicas.of_front) is not None:
            replicas.set_present([replica_id.unique_id for replica_id in self.curr_replicas])


def wanted_replicas(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return how many replicas the front wants: what any of them was told last.

    Serve copies this function by value to its controller and asks it there. Before the front knows, the
    number stays as it is.
    """
    told = [one for series in (context.raw_metrics or {}).get("wanted", {}).values() for one in series]
    wanted = [(one.timestamp, one.value) for one in told if one.value]
    return int(max(wanted)[1]) if wanted else context.target_num_replicas, {}


def _number(config: RayConfig) -> dict[str, Any]:
    """Return the options of a deployment that say how many replicas it has."""
    if config.range is None:
        return {"num_replicas": config.replicas}
    least, most = config.range
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the interval is to be an environment variable one day
        scaling = AutoscalingConfig(
            min_replicas=least,
            max_replicas=most,
            policy=AutoscalingPolicy(policy_function="quire.cluster.ray:wanted_replicas"),
            metrics_interval_s=TELL_S,
            look_back_period_s=5 * TELL_S,
            upscale_delay_s=0,
            downscale_delay_s=0,
        )
    return {"autoscaling_config": scaling}


def application(config: RayConfig) -> serve.Application:
    """Return the application that Serve runs."""
    drain_s = config.server.drain_timeout_s
    threads, actor = config.engine.num_threads, {"runtime_env": {"env_vars": SERVE_ENV}}
    shared: dict[str, Any] = {
        "graceful_shutdown_timeout_s": drain_s,
        "graceful_shutdown_wait_loop_s": DRAIN_POLL_S,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "max_ongoing_requests": UNBOUNDED,
        "max_constructor_retry_count": 1,
        "logging_config": {"enable_access_log": False, "log_level": "WARNING"},
    }
    engines = serve.deployment(EngineReplica).options(
        name="engines",
        **_number(config),
        user_config={"most": config.range[1] if config.range else config.replicas},
        ray_actor_options=actor | {"num_cpus": threads or 1, "num_gpus": len(named_gpus(config.engine))},
        request_router_config=RequestRouterConfig(request_router_class="quire.cluster.ray:BlockRouter"),
        **shared,
    )
    front = serve.deployment(serve.ingress(None)(FrontReplica)).options(
        name="front",
        num_replicas=config.fronts,
        max_surge_percent=100,  # the old ones go on until as many new ones are ready
        ray_actor_options=actor | {"num_cpus": 0},
        **shared,
    )
    bound = engines.bind(config.engine)
    return front.bind(config.server, config.engine, config.keyed, config.range, bound)


def app(options: dict[str, Any]) -> serve.Application:
    """Return the application for 'serve run quire.cluster.ray:app model=demo replicas=2' and the like.

    The options are the fields of RayConfig, ServerConfig and EngineConfig; a list is a tuple, as in
    replicas=[1,4]. Raises ConfigError for others.
    """
    # Of two that have a field, the last has it: replicas.
    kinds = {"server": ServerConfig, "engine": EngineConfig, "ray": RayConfig}
    owner = {field.name: kind for kind, made in kinds.items() for field in fields(made)}
    given: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    for key, value in options.items():
        name = key.replace("-", "_")
        if name not in owner or name in ("server", "engine", "address"):
            raise ConfigError(f"there is no option {key!r}", did_you_mean(name, owner))
        read = yaml.safe_load(value) if isinstance(value, str) else value
        given[owner[name]][name] = tuple(read) if isinstance(read, list) else read
    engine = EngineConfig(**{"model": "demo", **served(given["engine"])})
    return application(RayConfig(server=ServerConfig(**given["server"]), engine=engine, **given["ray"]))


def deploy(config: RayConfig, ready: Callable[[str], None]) -> Callable[[], None]:
    """Deploy, and return what ends it. `ready` is called with the URL once requests are accepted.

    Without an address, a cluster is started on this machine that ends with this process. Raises ConfigError
    when there is no such cluster, or an engine cannot start.
    """
    server = config.server
    if config.address is None:
        hand_down(CLUSTER_ENV)
    else:
        check_reachable(config.address)
    try:
        ray.init(
            address=config.address or "local",
            include_dashboard=False if config.address is None else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except (ConnectionError, ValueError) as error:
        raise ConfigError(f"there is no Ray cluster at {config.address}: {error}") from None
    try:
        with contextlib.suppress(TimeoutError):  # after a minute; run() waits for the proxies again
            serve.start(http_options=HTTPOptions(host=server.host, port=server.port))
        serve.run(application(config), name=config.name, route_prefix="/")
    except (RuntimeError, TimeoutError, RayError) as error:
        deployed = serve.status().applications.get(config.name)
        words = {part: one.message for part, one in deployed.deployments.items()} if deployed else {}
        raise why_failed(words, error) from None
    ready(f"http://{server.host}:{server.port}")

    def end() -> None:
        serve.delete(config.name)
        if config.address is None:
            serve.shutdown()
        ray.shutdown()

    return end
