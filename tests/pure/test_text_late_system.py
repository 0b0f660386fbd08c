"""System messages within a conversation reach every template, if necessary in a user message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import small_tokenizers as small

from quire.text.chat_template import ChatTemplate
from quire.text.late_system import folded, is_late
from quire.text.renderer import TemplateRenderer

FIRST_ONLY = """
{%- for message in messages -%}
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('too late') }}{% endif -%}
[{{ message.role }}: {{ message.content }}]
{%- endfor -%}"""
SILENT = "{% for message in messages if message.role != 'system' %}[{{ message.content }}]{% endfor %}"


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    with closing(TemplateRenderer()) as made:
        yield made


def said(*pairs: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in pairs]


def test_a_template_that_takes_it_is_given_it(renderer: TemplateRenderer) -> None:
    chatml = ChatTemplate({"default": small.CHATML}, {"eos_token": "<|im_end|>"}, renderer)
    text = chatml.render(said(("user", "Hi"), ("system", "Be kind."))).text
    assert "<|im_start|>system\nBe kind.<|im_end|>" in text


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (said(("system", "a"), ("user", "b")), "[system: a][user: b]"),
        (said(("user", "b"), ("system", "c")), "[user: b\n\n<system>\nc\n</system>]"),
        (said(("system", "a"), ("system", "c"), ("user", "b")), "[system: a\n\nc][user: b]"),
    ],
)
def test_a_template_that_refuses_it_is_given_it_within_a_users_message(
    renderer: TemplateRenderer, messages: Any, expected: str
) -> None:
    template = ChatTemplate({"default": FIRST_ONLY}, {}, renderer)
    assert template.render(messages, add_generation_prompt=False).text == expected


def test_nor_does_a_template_drop_it(renderer: TemplateRenderer) -> None:
    template = ChatTemplate({"default": SILENT}, {}, renderer)
    text = template.render(said(("user", "b"), ("system", "c")), add_generation_prompt=False).text
    assert text == "[b\n\n<system>\nc\n</system>]"


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (said(("developer", "a"), ("user", "b")), "[system: a][user: b]"),
        (said(("system", "a"), ("developer", "c"), ("user", "b")), "[system: a\n\nc][user: b]"),
        (said(("user", "b"), ("developer", "c")), "[user: b\n\n<system>\nc\n</system>]"),
    ],
)
def test_a_developers_message_is_the_systems_unless_the_template_names_it(
    renderer: TemplateRenderer, messages: Any, expected: str
) -> None:
    template = ChatTemplate({"default": FIRST_ONLY}, {}, renderer)
    assert template.render(messages, add_generation_prompt=False).text == expected
    own = ChatTemplate(
        {"default": "{# developer #}{{ messages | map(attribute='role') | join }}"}, {}, renderer
    )
    assert own.render(messages).text == "".join(message["role"] for message in messages)


def test_roles_take_turns_as_before() -> None:
    messages = said(
        ("user", "a"),
        ("assistant", "b"),
        ("system", "c"),
        ("system", "d"),
        ("user", "e"),
        ("user", "f"),
        ("tool", "g"),
        ("system", "h"),
        ("assistant", "i"),
        ("system", "j"),
        ("assistant", "k"),
    )
    assert folded(messages) == said(
        ("user", "a"),
        ("assistant", "b"),
        ("user", "<system>\nc\n</system>\n\n<system>\nd\n</system>\n\ne"),
        ("user", "f"),
        ("tool", "g\n\n<system>\nh\n</system>"),
        ("assistant", "i"),
        ("user", "<system>\nj\n</system>"),
        ("assistant", "k"),
    )
    assert messages[2]["content"] == "c"  # left as it was


def test_content_of_parts_stays_in_parts() -> None:
    part = {"type": "text", "text": "b"}
    (message,) = folded(said(("user", [part]), ("system", "c")))
    assert message["content"] == [part, {"type": "text", "text": "<system>\nc\n</system>"}]
    (message,) = folded(said(("user", "b"), ("system", [part])))
    assert [one["text"] for one in message["content"]] == ["b", "<system>", "b", "</system>"]


def test_a_role_of_the_template_may_come_first() -> None:
    """As in the conversations of firefunction, where tools precede the system message."""
    assert not is_late(said(("functions", "[]"), ("system", "a"), ("user", "b")))
    assert is_late(said(("functions", "[]"), ("user", "a"), ("system", "b")))
    assert is_late(said(("system", "a"), ("system", "b")))
