"""`quire deploy`: serve a model on a cluster."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from quire.cli.arguments import add_words
from quire.cli.option_types import RANGE, TEXT, WHOLE
from quire.cli.options import add_engine_flags, add_server_flags, server_options
from quire.cli.serve import engine_fields
from quire.cli.terminal import bold, counted, note
from quire.config import SERVED_PREFILL_TOKENS, ServerConfig
from quire.errors import ConfigError, did_you_mean, escape, shortened

if TYPE_CHECKING:
    from quire.cluster.ray import RayConfig

DESCRIPTION = """Serve a model by several engines on a Ray cluster, behind one address.

  quire deploy ray demo --replicas 2              a cluster on this machine, which ends with Ctrl-C
  quire deploy ray path/to/checkpoint --address auto --replicas 8 --num-threads 16
  quire deploy ray demo --address auto --detach   leaves it running; 'serve status' shows it

Needs 'pip install quire[ray]'. Every host of a cluster needs Quire, the checkpoint at the same place and, for
requests that need a key, QUIRE_API_KEY or the same --api-key-file. Whoever can reach Ray's ports can run
programs on the cluster: let nobody but its hosts reach them. docs/scale.md tells how.
"""
WORDS = """ray      the kind of cluster
MODEL    checkpoint folder, Hub id such as Qwen/Qwen3-0.6B, or 'demo' (default), a small model
         included with Quire"""
KINDS = ("ray",)
# Serve's proxies take in connections, engines in other processes are not recorded, their adapters do not
# change, and there is one model; `replicas` are the cluster's.
NOT_HERE = (
    *("ssl_certfile", "ssl_keyfile", "record", "record_contents", "record_max_bytes", "record_max_age"),
    *("replicas", "role", "link", "link_key_file", "max_loaded_memory", "idle_unload", "load_wait"),
    "load_adapters",
)


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "deploy",
        help="serve a model by several engines on a Ray cluster",
        usage="quire deploy ray [MODEL] [flags]",
        description=DESCRIPTION,
    )
    add_words(parser, WORDS)
    group = parser.add_argument_group("cluster")
    group.add_argument(
        "--address",
        type=TEXT,
        metavar="HOST:PORT",
        help="address of the cluster, or 'auto' on one of its hosts (default: a cluster on this machine "
        "that ends with this command)",
    )
    group.add_argument(
        "--replicas",
        type=RANGE,
        metavar="N",
        help="number of engines (default: 1); MIN-MAX: as many as are predicted to keep --ttft-goal and "
        "--itl-goal",
    )
    group.add_argument(
        "--fronts",
        type=WHOLE,
        metavar="N",
        help="number of processes that answer HTTP requests, with tokenizers and a router each (default: 1)",
    )
    group.add_argument(
        "--name", type=TEXT, metavar="NAME", help="name of the application on the cluster (default: quire)"
    )
    group.add_argument(
        "--detach",
        action=argparse.BooleanOptionalAction,
        help="leave the application running on the cluster at --address and exit (default: off)",
    )
    add_server_flags(parser, [field.name for field in fields(ServerConfig) if field.name not in NOT_HERE])
    add_engine_flags(
        parser, unset={"max_num_prefill_tokens": f"{SERVED_PREFILL_TOKENS}; with --itl-goal, none"}
    )
    parser.set_defaults(function=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Deploy, and wait for Ctrl-C unless detached."""
    _check_words(args)
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("Ray is not installed", "pip install 'quire[ray]'")
    if args.detach and args.address is None:
        raise ConfigError("detach without address", "a cluster on this machine ends with this command")
    config = _configured(args)
    import signal
    import threading

    from quire.cluster.ray import deploy

    end = deploy(config, lambda url: _show_ready(config, url))
    if args.detach:
        return 0
    interrupted = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: interrupted.set())
    interrupted.wait()
    end()
    return 0


def _check_words(args: argparse.Namespace) -> None:
    kind, *model = args.words or [""]
    if kind not in KINDS:
        what = f"unknown cluster {shortened(kind)!r}" if kind else "the kind of cluster is missing"
        args.parser.refuse(what, did_you_mean(kind[:80], KINDS) or "give 'ray': quire deploy ray MODEL")
    if len(model) > 1:
        args.parser.refuse(f"unexpected {shortened(model[1])!r}", "give one MODEL")


def _configured(args: argparse.Namespace) -> RayConfig:
    """Return what the arguments ask for. Raises ConfigError."""
    model = args.words[1:]
    from quire.cluster.ray import RayConfig
    from quire.config import EngineConfig
    from quire.environment import api_keys

    server = ServerConfig(**server_options(args) | {"replicas": 1})
    if server.port == 0:
        raise ConfigError("port = 0: Ray Serve needs a port", "give one that is free, on every host")
    engine = EngineConfig(model=model[0] if model else args.model or "demo", **engine_fields(args))
    names = ("replicas", "fronts", "name", "address")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    return RayConfig(server=server, engine=engine, keyed=bool(api_keys(server.api_key_file)), **given)


def _show_ready(config: RayConfig, url: str) -> None:
    model = escape(config.engine.model)
    several = config.replicas
    engines = counted(several, "engine") if isinstance(several, int) else "{} to {} engines".format(*several)
    print(f"{bold('quire serves')} {model} {bold('by')} {engines} {bold('at')} {url}/v1", flush=True)
    if config.server.page:
        print(f"  a chat, and what the engines do, in a browser: {bold(f'{url}/')}", flush=True)
    if not config.keyed:
        note("anyone who can reach this address can use it; QUIRE_API_KEY or --api-key-file requires a key")
