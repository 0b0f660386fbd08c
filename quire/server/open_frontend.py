"""The text side of a model as the server has it, of which no weights are read."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

from quire.config import EngineConfig, ServerConfig
from quire.frontend import Frontend
from quire.models import FAMILIES, read_model
from quire.task import read_for
from quire.text.tokenizer import Tokenizer
from quire.text.tools import OutputFormat, output_format_of
from quire.weights.hub import open_model

_LOG = logging.getLogger(__name__)


def open_frontend(
    config: ServerConfig, own: EngineConfig, *, max_model_len: int, longest_context: int, sees: bool
) -> tuple[Frontend, OutputFormat]:
    """Return the frontend of a model, and how it writes tool calls and reasoning. Raises ConfigError."""
    source = open_model(own.model, own.revision, weights=False, overrides=own.overrides)
    processor = source.image_processor() if sees else None
    model = read_for(source, own.task, partial(read_model, processor=processor), FAMILIES)
    frontend = Frontend(
        source,
        model.seeing(own.max_image_tokens),
        max_model_len=max_model_len,
        longest_context=longest_context,
        seed=own.seed,
        max_images=own.max_images,
        media=own.allowed_local_media_path,
    )
    frontend.chat_template.check()
    output_format = find_output_format(config, frontend.chat_template.templates, frontend.tokenizer)
    if (problem := output_format.self_check(frontend.chat_template)) is not None:
        _LOG.warning("tool calls: %s", problem)
    return frontend, output_format


def find_output_format(
    config: ServerConfig, templates: Mapping[str, str], tokenizer: Tokenizer | None = None
) -> OutputFormat:
    """Return the model's format of tool calls and reasoning. Raises ConfigError for an unknown name."""
    return output_format_of(templates, tokenizer, config.tool_call_parser, config.reasoning_parser)
