"""Consecutive user messages: kept if the template accepts them, merged otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import small_tokenizers as small

from quire.text.chat_template import ChatTemplate
from quire.text.renderer import TemplateRenderer

TURNS = "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no turns') }}{% endif %}"
ALTERNATING = f"{{% for m in messages %}}{TURNS}[{{{{ m.role }}}}] {{{{ m.content }}}}\n{{% endfor %}}"
EACH_PART = "{% for part in m.content %}[{{ m.role }}] {{ part['text'] }}{% endfor %}"
PARTS = f"{{% for m in messages %}}{TURNS}{EACH_PART}{{% endfor %}}"


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    with closing(TemplateRenderer()) as made:
        yield made


def written(renderer: TemplateRenderer, source: str, *messages: Any) -> str:
    return ChatTemplate({"default": source}, {}, renderer).render(messages).text


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_what_a_user_says_is_joined_where_roles_must_alternate(renderer: TemplateRenderer) -> None:
    found = written(
        renderer,
        ALTERNATING,
        user("a"),
        user("b"),
        {"role": "assistant", "content": "c"},
        user("d"),
        user("e"),
    )
    assert found.split("\n") == ["[user] a", "", "b", "[assistant] c", "[user] d", "", "e", ""]


def test_the_system_within_such_a_conversation_joins_the_user(renderer: TemplateRenderer) -> None:
    found = written(renderer, ALTERNATING, user("a"), {"role": "system", "content": "s"}, user("b"))
    assert found.split("\n\n") == ["[user] a", "<system>\ns\n</system>", "b\n"]


def test_a_template_that_takes_them_gets_them_apart(renderer: TemplateRenderer) -> None:
    assert written(renderer, small.CHATML, user("a"), user("b")).count("<|im_start|>user") == 2


def test_parts_are_joined_as_parts(renderer: TemplateRenderer) -> None:
    part = {"type": "text", "text": "a"}
    assert written(renderer, PARTS, user([part]), user([part])) == "[user] a" * 2
