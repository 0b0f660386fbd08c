"""llama.cpp's endpoints other than /completion and /infill: properties, slots, chat templates."""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire import __version__
from quire.frontend import Frontend
from quire.sampling_params import SamplingParams
from quire.server import admin
from quire.server.errors import HTTPRefusal
from quire.server.event_stream import encode
from quire.server.llamacpp.completion import completion, infill
from quire.server.llamacpp.protocol import settings_of
from quire.server.openapi import describes
from quire.server.prompt_run import PromptRun
from quire.server.request import read
from quire.server.service import ServiceState


class TemplateRequest(Struct, kw_only=True):
    """A conversation to render."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    model: str | None = None


class RenderedPrompt(Struct):
    """A conversation as rendered by the model's template."""

    prompt: str


class NextToken(Struct):
    """Progress of a continuation; -1 where there is no limit."""

    has_next_token: bool
    n_remain: int
    n_decoded: int


class SlotInfo(Struct, kw_only=True):
    """State of a slot. Lengths of the prompt are known once it has its first token."""

    id: int
    n_ctx: int
    id_task: int = -1
    is_processing: bool = False
    speculative: bool = False
    n_prompt_tokens: int = 0
    n_prompt_tokens_cache: int = 0
    next_token: NextToken


class Defaults(Struct):
    """Parameters of a request that sets none."""

    params: dict[str, Any]
    n_ctx: int


class Props(Struct):
    """Properties of the server. `model_path` is the model's name."""

    default_generation_settings: Defaults
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    chat_template_caps: dict[str, bool]
    bos_token: str
    eos_token: str
    modalities: dict[str, bool]
    build_info: str
    endpoint_slots: bool = True
    endpoint_props: bool = False
    endpoint_metrics: bool = True
    is_sleeping: bool = False


@describes("Report the server's properties in llama.cpp's form", reply=Props)
async def props(request: Request) -> Response:
    """Report properties, without paths."""
    service: ServiceState = request.app.state.service
    frontend, name, output_format = service.frontend, service.names[0], service.output_format
    params = SamplingParams.from_dict({}, {"max_tokens": None, **frontend.default_params})
    tokens = frontend.tokenizer.special_tokens if frontend.tokenizer else {}
    eos = tokens.get("eos_token", "")
    if not eos and frontend.tokenizer and frontend.eos_token_ids:
        eos = frontend.tokenizer.token_text(frontend.eos_token_ids[0])
    caps = dict.fromkeys(("supports_tools", "supports_tool_calls"), output_format.tools is not None)
    return admin.reply(
        Props(
            Defaults(settings_of(params, frontend.max_model_len), frontend.max_model_len),
            service.num_slots,
            model_alias=name,
            model_path=name,
            chat_template=frontend.chat_template.templates.get("default", ""),
            chat_template_caps=caps,
            bos_token=tokens.get("bos_token", ""),
            eos_token=eos,
            modalities={"vision": frontend.sees, "audio": False},
            build_info=f"quire-{__version__}",
        )
    )


@describes("Report states and lengths of the slots, no text", reply=list[SlotInfo])
async def slots(request: Request) -> Response:
    """Report the slots; with ?fail_on_no_slot=1, return 503 if none is idle."""
    service: ServiceState = request.app.state.service
    n_ctx, total = service.frontend.max_model_len, service.num_slots
    prompts = [prompt for handle in service.requests for prompt in handle.prompts if not prompt.is_queued]
    prompts.sort(key=lambda prompt: int(prompt.request.request_id))
    found = [slot for prompt in prompts for slot in _running(prompt, n_ctx)][:total]
    num_begun, num_busy = len(found), min(max(service.engine.status.num_running, len(found)), total)
    for number in range(num_begun, total):  # those computing their prompts, then the idle ones
        nothing = NextToken(False, -1, 0)
        found.append(SlotInfo(id=0, n_ctx=n_ctx, is_processing=number < num_busy, next_token=nothing))
    for number, slot in enumerate(found):
        slot.id, slot.speculative = number, service.engine_config.speculative != "off"
    if request.query_params.get("fail_on_no_slot") and num_busy == total:
        raise HTTPRefusal(503, "no slot is available", "ask again in a moment")
    return Response(encode(found), media_type="application/json")


def _running(prompt: PromptRun, n_ctx: int) -> list[SlotInfo]:
    """Return a slot for each choice of a prompt that is being generated."""
    output, limit = prompt.output, prompt.request.params.max_tokens
    return [
        SlotInfo(
            id=0,
            n_ctx=n_ctx,
            id_task=int(prompt.request.request_id),
            is_processing=True,
            n_prompt_tokens=len(output.prompt_token_ids),
            n_prompt_tokens_cache=output.num_cached_tokens,
            next_token=NextToken(
                True, -1 if limit is None else limit - len(choice.token_ids), len(choice.token_ids)
            ),
        )
        for choice in output.outputs
        if choice.finish_reason is None
    ]


@describes("Render a conversation with the model's template", TemplateRequest, RenderedPrompt)
async def apply_template(request: Request) -> Response:
    """Render a conversation as a prompt that /completion takes verbatim."""
    service: ServiceState = request.app.state.service
    asked, *_ = await read(request, TemplateRequest, timely=False)
    service.check_name(asked.model)
    text = await service.in_thread_for(asked.messages, _rendered, service.frontend, asked)
    return admin.reply(RenderedPrompt(text))


def _rendered(frontend: Frontend, asked: TemplateRequest) -> str:
    prompt = frontend.encode_chat(
        asked.messages, asked.tools, asked.add_generation_prompt, asked.chat_template_kwargs
    )
    return prompt.text or ""


@describes("Not supported: the server's properties cannot be changed")
async def change_props(request: Request) -> Response:
    raise HTTPRefusal(501, "the properties of this server cannot be changed", "start it with other flags")


@describes("Not supported: the cache of a slot cannot be saved or erased")
async def change_slot(request: Request) -> Response:
    raise HTTPRefusal(
        501, "slots cannot be saved, restored or erased", "prompts that begin alike share the cache"
    )


ROUTES = [
    Route("/completion", completion, methods=["POST"]),
    Route("/completions", completion, methods=["POST"]),
    Route("/props", props),
    Route("/props", change_props, methods=["POST"]),
    Route("/slots", slots),
    Route("/slots/{slot}", change_slot, methods=["POST"]),
    Route("/apply-template", apply_template, methods=["POST"]),
    Route("/infill", infill, methods=["POST"]),
    Route("/v1/health", admin.ready),
]
