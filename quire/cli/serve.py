"""`quire serve`: serve a model over HTTP."""

from __future__ import annotations

import argparse
import logging
import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.cli.arguments import add_words
from quire.cli.chosen import in_words
from quire.cli.option_types import MODELS
from quire.cli.options import add_engine_flags, add_server_flags, engine_options, server_options
from quire.cli.terminal import bold, note
from quire.config import SERVED_PREFILL_TOKENS, ServerConfig, served
from quire.errors import escape

if TYPE_CHECKING:
    from quire.models.purpose import Pooling
    from quire.server.hosted.budget import ModelSpec
    from quire.server.hosted.host import Host
    from quire.server.service import ServiceState

DESCRIPTION = """Serve a model over HTTP to clients of the OpenAI, Anthropic, llama.cpp and Ollama APIs.

  quire serve                              the embedded demo model, at http://127.0.0.1:8000/v1
  quire serve Qwen/Qwen3-0.6B --quantization int8 --port 9000
  QUIRE_API_KEY=... quire serve path/to/checkpoint --host 0.0.0.0
  quire serve Qwen/Qwen3-0.6B path/to/other --max-loaded-memory 12G    several, each loaded when asked for

Clients need OPENAI_BASE_URL=http://127.0.0.1:8000/v1 and, unless keys are required, any
OPENAI_API_KEY. The first SIGTERM or Ctrl-C waits for open requests; the second one ends them.
"""
WORDS = """MODEL    checkpoint folder, Hub id such as Qwen/Qwen3-0.6B, or 'demo' (default), a small model
         included with Quire; several are loaded when first asked for, and unloaded after --idle-unload or
         for memory"""
CURL = """  curl {url}{path} -H 'Content-Type: application/json'{key} \\
    -d '{{"model": "{model}", {asked}}}'"""
# The path of a first request to a model by its task, and what it asks.
FIRST = {
    "generate": ("/v1/chat/completions", '"messages": [{"role": "user", "content": "Tell me a story."}]'),
    "embed": ("/v1/embeddings", '"input": "A story about a fox."'),
    "score": ("/rerank", '"query": "animals", "documents": ["a fox", "a lantern"]'),
}
KEY = """ \\
    -H "Authorization: Bearer $QUIRE_API_KEY\""""
WIDTH = 100

PARSERS = ("tool_call_parser", "reasoning_parser")

_LOG = logging.getLogger(__name__)


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "serve",
        help="serve a model to OpenAI and Anthropic API clients",
        usage="quire serve [MODEL ...] [flags]",
        description=DESCRIPTION,
    )
    add_words(parser, WORDS)
    add_server_flags(parser)
    add_engine_flags(
        parser, unset={"max_num_prefill_tokens": f"{SERVED_PREFILL_TOKENS}; with --itl-goal, none"}
    )
    text = "in a --config file: several models by name, each with `model` and flags of its own"
    parser.add_argument("--models", type=MODELS, metavar="MODELS", help=text)
    parser.set_defaults(function=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal arrives."""
    import asyncio  # here, as every command imports this file and asyncio is slow to import

    from quire.config import EngineConfig
    from quire.server.lifecycle import serve
    from quire.server.logs import setup

    config = ServerConfig(**server_options(args))
    setup(config.log_format)
    if is_for_several(args):
        from quire.server.hosted.serving import open_models
        from quire.server.lifecycle import loaded, serve_opened

        opened = open_models(config, model_specs(args, config), loaded, _show_models)
        return asyncio.run(serve_opened(config, opened))
    model = args.words[0] if args.words else args.model or "demo"
    engine_config = EngineConfig(model=model, **engine_fields(args))
    if config.role != "both":
        from quire.cluster.roles import in_role

        return asyncio.run(serve(config, engine_config, _show_ready, in_role=in_role))
    if config.replicas == 1:
        return asyncio.run(serve(config, engine_config, _show_ready))
    from quire.cluster.local import local_replicas

    return asyncio.run(serve(config, engine_config, _show_ready, local_replicas))


def engine_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of EngineConfig: as given, with the default of this command for chunks of prompts."""
    return served(engine_options(args))


def is_for_several(args: argparse.Namespace) -> bool:
    """Return True if models are to be loaded when they are asked for."""
    asked = (args.models, args.max_loaded_memory, args.idle_unload)
    return len(args.words) > 1 or any(value is not None for value in asked)


def model_specs(args: argparse.Namespace, config: ServerConfig) -> list[ModelSpec]:
    """Return the models to serve, with the flags of the command line and those of their own in the file."""
    from quire.config import EngineConfig
    from quire.server.hosted.budget import ModelSpec
    from quire.server.service import served_names

    common, named = engine_fields(args), args.models or {}
    if args.models is not None and args.words:
        args.parser.refuse("MODEL as well as `models` of the --config file", "leave one of them out")
    if not named:
        words = args.words or [args.model or "demo"]
        if len(words) > 1 and config.served_model_name:
            hint = "name each in `models` of a --config file"
            args.parser.refuse("--served-model-name with several models", hint)
        named = {served_names(config, word)[0]: {"model": word} for word in words}
        if len(named) < len(words):
            hint = "name each in `models` of a --config file"
            args.parser.refuse(f"{len(words)} models with {len(named)} names: {', '.join(named)}", hint)
    found = []
    for name, own in named.items():
        own = {"model": name, **own}
        names = (name, *own.pop("served_model_name", config.served_model_name))
        parsers = {key: own.pop(key) for key in PARSERS if key in own}
        served_as = replace(config, served_model_name=tuple(dict.fromkeys(names)), **parsers)
        found.append(ModelSpec(name, served_as, EngineConfig(**common | own)))
    return found


def _show_models(host: Host, url: str, keyed: bool) -> None:
    """Print the address, the models with the memory they need, and a first request to copy."""
    from quire.memory import gigabytes
    from quire.server.auth import is_loopback

    needs = {name: gigabytes(one.budget.need.total_bytes) for name, one in host.models.items()}
    if host.config.log_format == "json":
        fields = {"url": f"{url}/v1", "models": list(needs), "memory": gigabytes(host.limit_bytes)}
        _LOG.info("ready", extra={"fields": fields})
        return
    print(f"{bold('quire serves')} {len(needs)} models {bold('at')} {url}/v1, each loaded when asked for")
    for name, need in needs.items():
        print(f"  {escape(name)}: {need}")
    print(f"  all together at most {gigabytes(host.limit_bytes)}; their states: {url}/v1/models")
    if host.config.page:
        print(f"  a chat, and what the engines do, in a browser: {bold(f'{url}/')}")
    name, first = next(iter(host.models.items()))
    print(_first_request(url, name, first.budget.pooling, keyed), flush=True)
    if not (keyed or is_loopback(host.config.host)):
        note("anyone who can reach this machine can use it; QUIRE_API_KEY or --api-key-file requires a key")


def _show_ready(service: ServiceState, url: str) -> None:
    """Print the address, the settings chosen for the model, and a first request to copy."""
    from quire.server.auth import is_loopback

    chosen = service.engine.status.facts.chosen
    if service.config.log_format == "json":
        fields = {**chosen, "url": f"{url}/v1", "models": service.names}
        _LOG.info("ready", extra={"fields": fields})
        return
    settings = in_words({name: value for name, value in chosen.items() if name != "model"})
    names = escape(", ".join((*service.names, *service.patterns)))
    print(f"{bold('quire serves')} {names} {bold('at')} {url}/v1")
    print(textwrap.fill(" · ".join(settings), WIDTH, initial_indent="  ", subsequent_indent="  "))
    if service.config.page:
        print(f"  a chat, and what the engine does, in a browser: {bold(f'{url}/')}")
    pooling = service.frontend.model.pooling
    print(_first_request(url, service.names[0], pooling, service.keyed), flush=True)
    if service.config.record is not None:
        what = "with prompts and answers" if service.config.record_contents else "without prompts and answers"
        note(f"steps are recorded, {what}; incident files go to {escape(service.config.record)}")
    if not (service.keyed or is_loopback(service.config.host)):
        note("anyone who can reach this machine can use it; QUIRE_API_KEY or --api-key-file requires a key")


def _first_request(url: str, model: str, pooling: Pooling | None, keyed: bool) -> str:
    path, asked = FIRST["generate" if pooling is None else pooling.task]
    return CURL.format(url=url, path=path, model=model, asked=asked, key=KEY if keyed else "")
