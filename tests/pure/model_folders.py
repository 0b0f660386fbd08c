"""Tokenizers and chat templates of model folders, as the engine finds them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from quire.text.chat_template import ChatTemplate
from quire.text.renderer import TemplateRenderer
from quire.text.tokenizer import Tokenizer, need_tokenizer
from quire.weights.folder import ModelFolder


def tokenizer_of(folder: str | Path) -> Tokenizer:
    return need_tokenizer(ModelFolder.at(Path(folder)))


def chat_template_of(
    folder: str | Path,
    special_tokens: Mapping[str, str] | None = None,
    renderer: TemplateRenderer | None = None,
) -> ChatTemplate:
    return ChatTemplate(ModelFolder.at(Path(folder)).chat_templates(), special_tokens, renderer)
