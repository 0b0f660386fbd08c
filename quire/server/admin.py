"""Endpoints other than generation: models, tokenization, health, load, settings, metrics."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire import __version__
from quire.engine.status import ModelFacts
from quire.errors import RequestError
from quire.frontend import LONGEST_TEXT, Frontend
from quire.server import body
from quire.server.errors import NotFound
from quire.server.metrics import CONTENT_TYPE
from quire.server.openapi import describes, document
from quire.server.request import read
from quire.server.service import ServiceState

SHOWN = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_num_prefill_tokens",
    "itl_goal",
    "block_size",
    "enable_prefix_caching",
    "scheduling_policy",
)
_ENCODER = msgspec.json.Encoder()


class ModelCard(msgspec.Struct):
    """One served model name, with the fields of OpenAI's, vLLM's and Anthropic's interfaces."""

    id: str
    created: int
    max_model_len: int
    root: str
    display_name: str
    created_at: str
    max_input_tokens: int
    type: str = "model"
    object: str = "model"
    owned_by: str = "quire"
    parent: str | None = None
    permission: list[str] = []


class ModelList(msgspec.Struct):
    """All served model names."""

    data: list[ModelCard]
    object: str = "list"
    has_more: bool = False


class TokenizeRequest(msgspec.Struct):
    """A text, or a conversation to be rendered with the model's template first.

    `content` is the text as llama.cpp's clients send it, with three options of its own.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    content: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class Piece(msgspec.Struct):
    """A token with its text or, for part of a character, its bytes."""

    id: int
    piece: str | list[int]


class TokenizeReply(msgspec.Struct):
    """Token ids of a text or a conversation."""

    count: int
    max_model_len: int
    tokens: list[int | Piece]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct):
    """Token ids to decode."""

    tokens: list[int]
    model: str | None = None


class DetokenizeReply(msgspec.Struct):
    """Decoded text, under vLLM's name and llama.cpp's."""

    prompt: str
    content: str


class TokenizerInfo(msgspec.Struct):
    """Properties of the tokenizer, for clients that build prompts themselves."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


class Health(msgspec.Struct):
    """Health of the server, and the reason if it is unavailable."""

    status: str
    reason: str | None = None


class Version(msgspec.Struct):
    """Version number."""

    version: str


class ServerLoad(msgspec.Struct):
    """Load of the server. `server_load` counts open HTTP requests."""

    server_load: int
    num_requests_running: int
    num_requests_waiting: int
    num_requests_queued: int
    num_tokens_queued: int
    num_blocks: int
    num_free_blocks: int


class ServerInfo(msgspec.Struct):
    """Settings of the server; `chosen` has those it chose for the model and machine, `model` its sizes."""

    version: str
    system_fingerprint: str
    models: list[str]
    chosen: dict[str, str]
    engine: dict[str, Any]
    limits: dict[str, int]
    model: ModelFacts | None


class IncidentFile(msgspec.Struct):
    """An incident file that was written: its name in the folder of --record, and its size."""

    file: str
    bytes: int


def reply(content: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a Struct as a JSON response."""
    return Response(_ENCODER.encode(content), status, headers, "application/json")


def service_of(request: Request) -> ServiceState:
    """Return the state that all endpoints share."""
    service: ServiceState = request.app.state.service
    return service


def _card(service: ServiceState, name: str, adapter: str = "") -> ModelCard:
    created, max_model_len, own = service.created_s, service.frontend.max_model_len, service.names[0]
    created_at = datetime.fromtimestamp(created, UTC).isoformat()
    card = ModelCard(name, created, max_model_len, own, name, created_at, max_model_len)
    if adapter:  # named by its content
        card.root, card.parent = adapter, own
    return card


@describes("Confirm that a server is there, for clients that probe it first")
async def root(request: Request) -> Response:
    return Response("Quire is running", media_type="text/plain")


@describes("List the served model names", reply=ModelList)
async def models(request: Request) -> Response:
    service = service_of(request)
    cards = [_card(service, name) for name in service.names]
    cards += [_card(service, own.name, own.adapter) for own in service.adapters.values()]
    return reply(ModelList(cards))


@describes("Describe one model", reply=ModelCard)
async def model(request: Request) -> Response:
    service = service_of(request)
    return reply(_card(service, *service.check_name(request.path_params["model"])))


@describes("Tokenize a text or a conversation", TokenizeRequest, TokenizeReply)
async def tokenize(request: Request) -> Response:
    service = service_of(request)
    asked, *_ = await read(request, TokenizeRequest, timely=False)
    service.check_name(asked.model)
    return reply(await service.in_thread_for(asked.messages or (), _tokenize, service.frontend, asked))


def _tokenize(frontend: Frontend, asked: TokenizeRequest) -> TokenizeReply:
    if [asked.prompt, asked.messages, asked.content].count(None) != 2:
        raise RequestError("send exactly one of prompt, messages and content", None, "prompt")
    tokenizer = frontend.need_tokenizer()
    for name, text in (("prompt", asked.prompt), ("content", asked.content)):
        if text is not None and len(text) > LONGEST_TEXT:
            frontend.check_length(text, name)
    if asked.messages is not None:
        kwargs = asked.chat_template_kwargs
        encoded = frontend.encode_chat(asked.messages, asked.tools, asked.add_generation_prompt, kwargs)
        ids = list(encoded.token_ids)
    elif asked.content is not None:
        ids = tokenizer.encode(asked.content, asked.add_special, asked.parse_special)
    else:
        # Clients look up the id of a control token by sending its name, as /tokenizer_info reports it, alone.
        named = tokenizer.control_token_in(prompt := asked.prompt or "") == prompt != ""
        ids = tokenizer.encode(prompt, asked.add_special_tokens is not False, parse_special=named)
    strings = [tokenizer.token_text(i) for i in ids] if asked.return_token_strs else None
    tokens = [Piece(i, _piece(tokenizer.token_bytes(i))) if asked.with_pieces else i for i in ids]
    return TokenizeReply(len(ids), frontend.max_model_len, tokens, strings)


def _piece(token: bytes) -> str | list[int]:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return list(token)


@describes("Decode token ids", DetokenizeRequest, DetokenizeReply)
async def detokenize(request: Request) -> Response:
    service = service_of(request)
    asked, *_ = await read(request, DetokenizeRequest, timely=False)
    service.check_name(asked.model)
    return reply(await service.in_thread(_detokenize, service.frontend, asked.tokens))


def _detokenize(frontend: Frontend, ids: list[int]) -> DetokenizeReply:
    vocab_size = frontend.model.config.vocab_size
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise RequestError(f"token ids must be from 0 to {vocab_size - 1:,}", None, "tokens")
    text = frontend.need_tokenizer().decode(ids, skip_special_tokens=False)
    return DetokenizeReply(text, text)


@describes("Describe the tokenizer, for clients that build prompts themselves", reply=TokenizerInfo)
async def tokenizer_info(request: Request) -> Response:
    """Describe the tokenizer in the names of a Hugging Face tokenizer's configuration."""
    frontend = service_of(request).frontend
    tokens = frontend.need_tokenizer().special_tokens
    named = {f"{name}_token": tokens.get(f"{name}_token") for name in ("bos", "eos", "pad", "unk")}
    if named["eos_token"] is None and frontend.eos_token_ids:
        named["eos_token"] = frontend.need_tokenizer().token_text(frontend.eos_token_ids[0])
    templates = frontend.chat_template.templates
    info = TokenizerInfo(
        "PreTrainedTokenizerFast",
        frontend.model.config.vocab_size,
        frontend.max_model_len,
        chat_template=templates.get("default"),
        **named,
    )
    return reply(info)


@describes("Report that the process responds", reply=Health)
async def live(request: Request) -> Response:
    return reply(Health("ok"))


@describes("Report readiness: 503 if requests cannot be served now", reply=Health)
async def ready(request: Request) -> Response:
    problem = service_of(request).problem()
    if problem is None:
        return reply(Health("ok"))
    return reply(Health("unavailable", problem), 503, {"Retry-After": "1"})


@describes("Report the version of Quire", reply=Version)
async def version(request: Request) -> Response:
    return reply(Version(__version__))


@describes("Report running and waiting requests, and free KV cache blocks", reply=ServerLoad)
async def load(request: Request) -> Response:
    """Report the requests by state, and the blocks of the KV cache."""
    return reply(load_of(service_of(request)))


def load_of(service: ServiceState) -> ServerLoad:
    """Return the load of a model's server."""
    status = service.engine.status
    return ServerLoad(
        len(service.requests),
        status.num_running,
        status.num_waiting,
        service.num_queued_requests,
        service.num_queued_tokens,
        status.num_blocks,
        status.num_free_blocks,
    )


@describes("Report the settings chosen for this model on this machine", reply=ServerInfo)
async def server_info(request: Request) -> Response:
    """Report settings, without secrets or paths."""
    return reply(info_of(service_of(request)))


def info_of(service: ServiceState) -> ServerInfo:
    """Return the settings of a server."""
    config, engine = service.config, service.engine_config
    limits = {
        "max_queued_requests": config.max_queued_requests,
        "max_queued_tokens": config.max_queued_tokens,
        "max_body_bytes": body.MAX_BODY_BYTES,
        "max_model_len": service.frontend.max_model_len,
    }
    options = {name: getattr(engine, name) for name in SHOWN}
    output_format = service.output_format
    chosen = {
        **service.engine.status.facts.chosen,
        "model": service.names[0],  # the one in `chosen` may be a path
        "tool_calls": output_format.tools.name if output_format.tools else "none",
        "reasoning": output_format.reasoning.name if output_format.reasoning else "none",
    }
    names, model = list(service.names), service.engine.status.facts.model
    return ServerInfo(__version__, service.fingerprint, names, chosen, options, limits, model)


@describes("Write an incident file of what was recorded, see --record", reply=IncidentFile)
async def incidents(request: Request) -> Response:
    recorder = service_of(request).recorder
    if recorder is None:
        raise NotFound("nothing is recorded", "start the server with --record DIR")
    written = await recorder.write("on request")
    return reply(IncidentFile(written.path.name, written.num_bytes), 201)


@describes("Prometheus metrics, under vLLM's names")
async def metrics(request: Request) -> Response:
    text = await asyncio.to_thread(service_of(request).metrics.render)
    return Response(text, media_type=CONTENT_TYPE)


@describes("This document")
async def openapi(request: Request) -> Response:
    content = document(request.app.routes, keys=service_of(request).keyed)
    return Response(_ENCODER.encode(content), media_type="application/json")


ROUTES = [
    Route("/", root),
    Route("/v1/models", models),
    Route("/v1/models/{model:path}", model),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/tokenizer_info", tokenizer_info),
    Route("/health", ready),
    Route("/health/ready", ready),
    Route("/health/live", live),
    Route("/ping", ready, methods=["GET", "POST"]),
    Route("/version", version),
    Route("/load", load),
    Route("/server_info", server_info),
    Route("/metrics", metrics),
    Route("/incidents", incidents, methods=["POST"]),
    Route("/openapi.json", openapi),
]
