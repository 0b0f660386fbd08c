"""Endpoints about models for Ollama's clients: list, details, and clear refusals of model management."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct, structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.engine.status import ModelFacts
from quire.frontend import Frontend
from quire.memory import BITS_OF
from quire.models.purpose import Pooling
from quire.server.admin import Version, reply
from quire.server.errors import HTTPRefusal
from quire.server.ollama import answers
from quire.server.openapi import describes
from quire.server.request import read
from quire.server.service import LATEST, ServiceState
from quire.text.tools import OutputFormat

# Release of Ollama whose interface this follows: clients require a minimum.
API_VERSION = "0.12.11"
NEVER = datetime(9999, 1, 1, tzinfo=UTC)
_UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "K"))


class Details(Struct):
    """Format, family and size of a model."""

    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    context_length: int
    embedding_length: int
    format: str = "safetensors"
    parent_model: str = ""


class Tag(Struct):
    """One served name, of the model or an adapter. `size` is that of the model's weights, in bytes."""

    name: str
    model: str
    modified_at: datetime
    size: int
    digest: str
    details: Details
    capabilities: list[str]


class Tags(Struct):
    """All served model names."""

    models: list[Tag]


class Running(Struct):
    """One name of the loaded model, which never expires, or of an adapter of it."""

    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: datetime
    context_length: int
    size_vram: int = 0


class Processes(Struct):
    """All names of the loaded model and its adapters."""

    models: list[Running]


class ShowRequest(Struct, kw_only=True):
    """Name of a model."""

    model: str | None = None
    name: str | None = None


class Shown(Struct):
    """Description of the model. `template` is a Jinja template.

    Before it is, in Ollama's language, what a prompt and its suffix become, where clients look for that.
    """

    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: datetime


@describes("List the served model names, in Ollama's form", reply=Tags)
async def tags(request: Request) -> Response:
    service: ServiceState = request.app.state.service
    started, size = datetime.fromtimestamp(service.created_s, UTC), _size(service)
    can = _capabilities(service.frontend, service.output_format)
    return reply(Tags([Tag(own[0], own[0], started, size, *own[1:], can) for own in _listed(service)]))


@describes("List the loaded model, in Ollama's form", reply=Processes)
async def processes(request: Request) -> Response:
    service: ServiceState = request.app.state.service
    size, longest = _size(service), service.frontend.max_model_len
    return reply(
        Processes([Running(own[0], own[0], size, *own[1:], NEVER, longest) for own in _listed(service)])
    )


@describes("Describe a model, in Ollama's form", ShowRequest, Shown)
async def show(request: Request) -> Response:
    """Describe a model, without paths."""
    service: ServiceState = request.app.state.service
    asked, *_ = await read(request, ShowRequest, queued=False)
    name, adapter = service.check_name(asked.model or asked.name)
    own, frontend = service.names[0], service.frontend
    found = shown(own, frontend, service.output_format, _weights(service), service.created_s)
    return reply(named(found, name, own if adapter else None))


def shown(own: str, frontend: Frontend, output_format: OutputFormat, weights: str, created_s: int) -> Shown:
    """Describe a model, without paths; `named` adds the name under which it is asked for."""
    parameters = "\n".join(f"{name} {value}" for name, value in frontend.default_params.items())
    template = _insertion(frontend) + frontend.chat_template.templates.get("default", "")
    created = datetime.fromtimestamp(created_s, UTC)
    details, info = _details(frontend, weights), _info(own, frontend)
    return Shown("", parameters, template, details, info, _capabilities(frontend, output_format), created)


def named(found: Shown, name: str, model: str | None) -> Shown:
    """Return the description under a name, which is that of an adapter of `model` if it is given."""
    made = [f"FROM {name}"] if model is None else [f"FROM {model}", f"ADAPTER {name}"]
    made += [f"PARAMETER {line}" for line in found.parameters.splitlines()]
    details = found.details if model is None else adapted(found.details, model)
    return structs.replace(found, modelfile="\n".join(made), details=details)


@describes("Report the release of Ollama whose interface this server follows", reply=Version)
async def version(request: Request) -> Response:
    return reply(Version(API_VERSION))


@describes("Not supported: the server's models cannot be changed")
async def refuse(request: Request) -> Response:
    words = f"{request.method} {request.url.path[:200]} is not supported"
    raise HTTPRefusal(501, words, "models are chosen when the server starts")


def _listed(service: ServiceState) -> Iterator[tuple[str, str, Details]]:
    """Yield the names of the model and of its adapters, each with its digest and details."""
    own, details = service.names[0], _details(service.frontend, _weights(service))
    for name in service.names:
        yield tagged(name), digest_of(own, service.fingerprint), details
    for one in service.adapters.values():
        yield tagged(one.name), digest_of(one.adapter, service.fingerprint), adapted(details, own)


def tagged(name: str) -> str:
    """Return a name with a tag: Ollama's clients add one before they look for a name."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def adapted(details: Details, model: str) -> Details:
    """Return the details of an adapter of a model."""
    return structs.replace(details, parent_model=model)


def _family(frontend: Frontend) -> str:
    return frontend.model.architecture.removesuffix("ForCausalLM").lower()


def _num_parameters(frontend: Frontend) -> int:
    return sum(spec.size for spec in frontend.model.program.weights().values())


def _size(service: ServiceState) -> int:
    """Estimate the bytes of the weights: quantized ones with their scales, others as 16 bits."""
    bits = BITS_OF.get(_weights(service), 16)
    return round(_num_parameters(service.frontend) * bits / 8)


def _weights(service: ServiceState) -> str:
    return service.engine.status.facts.chosen.get("weights", "")


def digest_of(name: str, fingerprint: str) -> str:
    """Return what identifies a model."""
    return hashlib.sha256(f"{name} {fingerprint}".encode()).hexdigest()


def details_of(facts: ModelFacts) -> Details:
    """Return the details of a model that may not be loaded."""
    family = facts.architecture.removesuffix("ForCausalLM").lower()
    size, weights = _count(facts.num_parameters), facts.quantization or "as stored"
    return Details(family, [family], size, weights, facts.max_model_len, facts.hidden_size)


def _details(frontend: Frontend, weights: str) -> Details:
    family, size = _family(frontend), _count(_num_parameters(frontend))
    hidden_size = frontend.model.config.hidden_size
    return Details(family, [family], size, weights, frontend.max_model_len, hidden_size)


def _count(num_parameters: int) -> str:
    unit, letter = next(((unit, letter) for unit, letter in _UNITS if num_parameters >= unit), (1, ""))
    return f"{num_parameters / unit:.1f}{letter}"


def capabilities_of(pooling: Pooling | None, sees: bool) -> list[str]:
    """Return the uses of a model that may not be loaded."""
    if pooling is None:
        return ["completion", "vision"] if sees else ["completion"]
    return ["embedding"] if pooling.task == "embed" else []


def _capabilities(frontend: Frontend, output_format: OutputFormat) -> list[str]:
    can = {"tools": output_format.tools, "thinking": output_format.reasoning, "insert": frontend.infill}
    formats = [name for name, how in can.items() if how is not None]
    pooling = frontend.model.pooling
    return [*capabilities_of(pooling, frontend.sees), *(formats if pooling is None else ())]


def _insertion(frontend: Frontend) -> str:
    if (infill := frontend.infill) is None:
        return ""
    first, second = infill.prefix + "{{ .Prompt }}", infill.suffix + "{{ .Suffix }}"
    written = first + second + infill.middle if infill.middle else second + first
    return "{{- if .Suffix }}" + written + "{{- end }}"


def _info(name: str, frontend: Frontend) -> dict[str, Any]:
    """Return metadata under the keys of a GGUF file."""
    model, family, tokenizer = frontend.model, _family(frontend), frontend.tokenizer
    config = model.config
    return {
        "general.architecture": family,
        "general.basename": name,
        "general.parameter_count": _num_parameters(frontend),
        f"{family}.context_length": frontend.max_model_len,
        f"{family}.embedding_length": config.hidden_size,
        f"{family}.block_count": config.num_hidden_layers,
        f"{family}.feed_forward_length": config.intermediate_size,
        f"{family}.attention.head_count": config.num_attention_heads,
        f"{family}.attention.head_count_kv": model.num_kv_heads,
        f"{family}.vocab_size": config.vocab_size,
        "tokenizer.ggml.bos_token_id": tokenizer.bos_token_id if tokenizer else None,
        "tokenizer.ggml.eos_token_id": frontend.eos_token_ids[0] if frontend.eos_token_ids else None,
    }


ROUTES = [
    *answers.ROUTES,
    Route("/api/tags", tags),
    Route("/api/ps", processes),
    Route("/api/show", show, methods=["POST"]),
    Route("/api/version", version),
    *(Route(f"/api/{name}", refuse, methods=["POST"]) for name in ("pull", "push", "create", "copy")),
    Route("/api/delete", refuse, methods=["DELETE"]),
    Route("/api/blobs/{digest}", refuse, methods=["HEAD", "POST"]),
]
