"""`quire serve`: serve a model over HTTP."""

from __future__ import annotations

import argparse
import logging
import textwrap
from typing import TYPE_CHECKING, Any

from quire.cli.arguments import add_words
from quire.cli.chosen import in_words
from quire.cli.options import add_engine_flags, add_server_flags, engine_options, server_options
from quire.cli.terminal import bold, note
from quire.errors import escape, shortened

if TYPE_CHECKING:
    from quire.server.service import ServiceState

DESCRIPTION = """Serve a model over HTTP to clients of the OpenAI, Anthropic, llama.cpp and Ollama APIs.

  quire serve                              the embedded demo model, at http://127.0.0.1:8000/v1
  quire serve Qwen/Qwen3-0.6B --quantization int8 --port 9000
  QUIRE_API_KEY=... quire serve path/to/checkpoint --host 0.0.0.0

Clients need OPENAI_BASE_URL=http://127.0.0.1:8000/v1 and, unless keys are required, any
OPENAI_API_KEY. The first SIGTERM or Ctrl-C waits for open requests; the second one ends them.
"""
WORDS = """MODEL    checkpoint folder, Hub id such as Qwen/Qwen3-0.6B, or 'demo' (default), a small model
         included with Quire"""
CURL = """  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Tell me a story."}}]}}'"""
KEY = """ \\
    -H "Authorization: Bearer $QUIRE_API_KEY\""""
WIDTH = 100
# Streams wait while a prompt is computed, so a chunk of it should not take much longer than their own tokens.
MAX_NUM_PREFILL_TOKENS = 48

_LOG = logging.getLogger(__name__)


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "serve",
        help="serve a model to OpenAI and Anthropic API clients",
        usage="quire serve [MODEL] [flags]",
        description=DESCRIPTION,
    )
    add_words(parser, WORDS)
    add_server_flags(parser)
    add_engine_flags(
        parser, unset={"max_num_prefill_tokens": f"{MAX_NUM_PREFILL_TOKENS}; with --itl-goal, none"}
    )
    parser.set_defaults(function=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal arrives."""
    if len(args.words) > 1:
        args.parser.refuse(f"unexpected {shortened(args.words[1])!r}", "give one MODEL")
    import asyncio  # here, as every command imports this file and asyncio is slow to import

    from quire.config import EngineConfig, ServerConfig
    from quire.server.lifecycle import serve
    from quire.server.logs import setup

    model = args.words[0] if args.words else args.model or "demo"
    config = ServerConfig(**server_options(args))
    engine_config = EngineConfig(model=model, **engine_fields(args))
    setup(config.log_format)
    return asyncio.run(serve(config, engine_config, _show_ready))


def engine_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of EngineConfig: as given, with the default of this command for chunks of prompts."""
    given = engine_options(args)
    if "itl_goal" not in given:
        given.setdefault("max_num_prefill_tokens", MAX_NUM_PREFILL_TOKENS)
    return given


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
    print(CURL.format(url=url, model=service.names[0], key=KEY if service.keyed else ""), flush=True)
    if service.config.record is not None:
        what = "with prompts and answers" if service.config.record_contents else "without prompts and answers"
        note(f"steps are recorded, {what}; incident files go to {escape(service.config.record)}")
    if not (service.keyed or is_loopback(service.config.host)):
        note("anyone who can reach this machine can use it; QUIRE_API_KEY or --api-key-file requires a key")
