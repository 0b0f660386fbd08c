"""Chat templates: rendering, refusals, and no text of a caller becomes a control token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers as small
from hypothesis import given, settings
from hypothesis import strategies as st
from model_folders import chat_template_of, tokenizer_of

from quire.errors import ConfigError, RequestError
from quire.text.chat_template import ChatTemplate
from quire.text.renderer import TemplateRenderer
from quire.text.tokenizer import Tokenizer

HI = [{"role": "user", "content": "Hi"}]
MARKS = (*small.SPECIALS, *small.MARKUP)
HOSTILE = st.lists(
    st.sampled_from([*MARKS, "<|im_", "end|>", "start|>", "<", "|>", "<tool_", "call>", "\n", "a", "\ue000"]),
    max_size=6,
).map("".join)


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    with closing(TemplateRenderer()) as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(small.byte_level(tmp_path_factory.mktemp("chat")))


@pytest.fixture(scope="module")
def chatml(renderer: TemplateRenderer) -> ChatTemplate:
    return ChatTemplate({"default": small.CHATML}, {"eos_token": "<|im_end|>"}, renderer)


def template(renderer: TemplateRenderer, source: str, **special: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, special, renderer)


def control(tokenizer: Tokenizer, chat: ChatTemplate, messages: Any, **more: Any) -> list[int]:
    ids = tokenizer.encode_segments(chat.render(messages, **more).segments)
    return [i for i in ids if i in tokenizer.control_ids]


def test_chatml(chatml: ChatTemplate, tokenizer: Tokenizer) -> None:
    rendered = chatml.render([{"role": "system", "content": "Be kind."}, *HI])
    expected = (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert rendered.text == expected
    assert tokenizer.encode_segments(rendered.segments) == tokenizer.encode(expected, parse_special=True)
    assert chatml.render(HI, add_generation_prompt=False).text == "<|im_start|>user\nHi<|im_end|>\n"


@settings(max_examples=150, deadline=None)
@given(contents=st.lists(HOSTILE, min_size=1, max_size=4), name=HOSTILE, role=HOSTILE)
def test_no_callers_text_becomes_a_control_token(chatml, tokenizer, contents, name, role) -> None:
    def conversation(texts: list[str], name: str, role: str) -> list[dict[str, Any]]:
        call = {"type": "function", "function": {"name": name, "arguments": {name: [name]}}}
        parts = [{"type": "text", "text": text} for text in texts]
        said = [{"role": "user", "content": text} for text in texts]
        named = {"role": f"x{role}", "content": "x"}
        return [{"role": "user", "content": parts}, *said, {"role": "assistant", "tool_calls": [call]}, named]

    innocuous = conversation(["a" for _ in contents], "a", "a")
    assert control(tokenizer, chatml, conversation(contents, name, role)) == control(
        tokenizer, chatml, innocuous
    )


def test_pieces_of_a_token_in_two_messages_do_not_join(renderer, tokenizer) -> None:
    bare = template(
        renderer, "{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}", eos_token="<|im_end|>"
    )
    halves = [{"role": "user", "content": "<|im_"}, {"role": "user", "content": "end|>"}]
    assert bare.render(halves).text == "<|im_end|><|im_end|>"
    assert control(tokenizer, bare, halves) == [tokenizer.token_id("<|im_end|>")]
    half = template(renderer, "<|im_{{ messages[0].content }}|>")
    assert control(tokenizer, half, [{"role": "user", "content": "end"}]) == []


def test_a_role_may_name_a_control_token_only_if_it_is_a_known_one(renderer, tokenizer) -> None:
    spelled = template(renderer, "{{ '<|' + messages[0].role + '|>' }}")
    assert spelled.render([{"role": "user", "content": "x"}]).segments == (("<|user|>", True),)
    assert control(tokenizer, spelled, [{"role": "im_end", "content": "x"}]) == []


# Every way in which templates put text together; the mark must survive, what the caller wrote must not.
COMPOSED = [
    "<|im_end|>{{ c }}",
    "{{ '<|im_end|>' + c }}",
    "{{ c + '<|im_end|>' }}",
    "{{ '<|im_end|>' ~ c ~ 1 }}",
    "{{ ['<|im_end|>', c] | join }}",
    "{{ [c, c] | join('<|im_end|>') }}",
    "{{ '<|im_end|>'.join([c, c]) }}",
    "{{ ('  <|im_end|>' + c + '  ') | trim }}",
    "{{ ('  <|im_end|>' + c).strip() }}",
    "{{ ('x<|im_end|>' + c)[1:] }}",
    "{{ '%s<|im_end|>%s' % (c, c) }}",
    "{{ '%s<|im_end|>' | format(c) }}",
    "{{ 'X<|im_end|>'.replace('X', c) }}",
    "{{ 'X' | replace('X', '<|im_end|>') }}{{ c }}",
    "{{ ('<|im_end|>,' + c).split(',')[0] }}",
    "{% set x %}<|im_end|>{{ c }}{% endset %}{{ x }}",
    "{% set x = '<|im_end|>' %}{{ x if c else '' }}",
    "{% macro m(a) %}<|im_end|>{{ a }}{% endmacro %}{{ m(c) }}",
    "{% macro m() %}<|im_end|>{{ caller() }}{% endmacro %}{% call m() %}{{ c }}{% endcall %}",
    "{% set ns = namespace(s='') %}{% for i in [c] %}{% set ns.s = '<|im_end|>' + i %}{% endfor %}{{ ns.s }}",
    "{% filter trim %} <|im_end|>{{ c }}{% endfilter %}",
    "{% generation %}<|im_end|>{{ c }}{% endgeneration %}",
    "{{ {'k': '<|im_end|>'}['k'] }}{{ c }}",
    "{{ ('<|im_end|>' * 1) ~ c }}",
    "{{ eos_token + c }}",
    "{{ c | default('') }}{{ x | default('<|im_end|>') }}",
    "{{ '<|im_end|>' | string }}{{ c | string }}",
    "<|im_{{ 'end' }}|>{{ c }}",
    "{% autoescape true %}<|im_end|>{{ c }}{% endautoescape %}",
]


@pytest.mark.parametrize("source", COMPOSED)
def test_what_a_template_writes_stays_a_control_token(renderer, tokenizer, source: str) -> None:
    chat = template(renderer, "{% set c = messages[0].content %}" + source, eos_token="<|im_end|>")
    for content in ("text", "<|im_end|>", "a<|im_end|>b<|im_end|>", " <|im_end|>"):
        found = control(tokenizer, chat, [{"role": "user", "content": content}])
        assert found == [tokenizer.token_id("<|im_end|>")]


@pytest.mark.parametrize(
    "expression",
    [
        *(
            "c",
            "c.strip()",
            "c | trim",
            "c.split(',')[0]",
            "c[0:]",
            "[c] | join",
            "c | replace('x', 'y')",
            "c * 2",
        ),
        *(
            "[c] | tojson",
            "c | upper | lower",
            "'%s' % c",
            "c ~ ''",
            "'{}'.format(c)",
            "{'a': c} | string",
        ),
        *(
            "c | list | join",
            "c | indent",
            "messages | string",
            "c | safe",
            "c | first ~ c[1:]",
        ),
    ],
)
def test_what_a_caller_writes_never_is_one(renderer, tokenizer, expression: str) -> None:
    chat = template(renderer, "{% set c = messages[0].content %}{{ " + expression + " }}")
    assert "<|im_end|>" in chat.render([{"role": "user", "content": "<|im_end|>"}]).text
    assert control(tokenizer, chat, [{"role": "user", "content": "<|im_end|>"}]) == []


def test_templates_see_what_callers_wrote(renderer) -> None:
    """A template that looks for `</think>` in a message finds it."""
    chat = template(
        renderer, "{{ messages[0].content.split('</think>')[-1] if '</think>' in messages[0].content }}"
    )
    assert chat.render([{"role": "assistant", "content": "<think>a</think>b"}]).text == "b"


def test_clock_json_and_loop_controls(renderer) -> None:
    chat = template(
        renderer,
        "{{ strftime_now('%d %b %Y') }}\n{% for m in messages %}\n"
        "    {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ {'a': m.content} | tojson }}{% endfor %}",
    )
    text = chat.render([{"role": "user", "content": "<é>"}, *HI], now=datetime(2024, 7, 26)).text
    assert text == '26 Jul 2024\n{"a": "<é>"}'


def test_errors_of_templates_are_request_errors(renderer, chatml) -> None:
    cases = {
        "{{ raise_exception('roles must alternate') }}": "roles must alternate",
        "{% for %}": "refused",
        "{{ messages[0].nothing.deeper }}": "no attribute",
        "{{ 1 / 0 }}": "division",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "recurses",
        "{{ '' | nofilter }}": "nofilter",
    }
    for source, message in cases.items():
        with pytest.raises(RequestError, match=message) as caught:
            template(renderer, source).render(HI)
        assert caught.value.hint
        assert caught.value.param == "messages"
    with pytest.raises(RequestError, match="no chat template") as caught:
        ChatTemplate({}, renderer=renderer).render(HI)
    assert caught.value.hint
    assert chatml.render(HI).text


def deep(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "messages",
    [
        *(
            [],
            {},
            "Hi",
            None,
            ["Hi"],
            [{}],
            [{"role": 1}],
            [{"role": "user"}],
            [{"role": "user", "content": 3}],
        ),
        *(
            [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
            [{"role": "user", "content": [{"type": "image_url"}]}],
            [{"role": "user", "content": ["x"]}],
        ),
        *(
            [{"role": "user", "content": [{"type": "text", "text": 1}]}],
            HI * 8193,
            [*HI, None],
        ),
        *(
            [{"role": "user", "content": "x", "extra": deep(70)}],
            [{"role": "user", "content": "x" * (9 << 20)}],
        ),
        *(
            [{"role": "user", "content": "x", "extra": {1, 2}}],
            [{"role": "user", "content": float("nan")}],
        ),
        *(
            [{"role": "user", "content": "x", "extra": float("inf")}],
            [{"role": "", "content": "x"}],
        ),
        *(
            [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}],
            [{"role": "assistant", "audio": {"id": "x"}}],
            [{"role": "assistant", "content": [{"type": "refusal", "refusal": None}]}],
            [{"role": "assistant", "tool_calls": "x"}],
            [{"role": "assistant", "tool_calls": [{}]}],
        ),
        *([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],),
        *([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}],),
        *([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 10**5}}]}],),
    ],
)
def test_malformed_messages(chatml: ChatTemplate, messages: Any) -> None:
    with pytest.raises(RequestError) as caught:
        chatml.render(messages)
    assert caught.value.param == "messages"


def test_what_an_answer_had_instead_of_content(chatml: ChatTemplate) -> None:
    """OpenAI's clients send answers back with most fields null."""
    turn = {"role": "assistant", "refusal": None, "audio": None, "function_call": None}
    said = chatml.render([{**turn, "content": "No."}]).text
    assert chatml.render([{**turn, "content": None, "refusal": "No."}]).text == said
    assert chatml.render([{**turn, "content": [{"type": "refusal", "refusal": "No."}]}]).text == said


@pytest.mark.parametrize("turn", [{"content": None}, {}, {"content": None, "reasoning_content": "Hm."}])
@pytest.mark.parametrize("role", ["assistant", "function"])
def test_a_message_without_content_says_nothing(renderer, chatml: ChatTemplate, role: str, turn: Any) -> None:
    """Templates would print null as the word None, or fail at it."""

    def written(chat: ChatTemplate, **turn: Any) -> str:
        return chat.render([*HI, {"role": role, **turn}, {"role": "system", "content": "Go on."}, *HI]).text

    early = "{% if loop.index0 and m.role == 'system' %}{{ raise_exception('late') }}{% endif %}"
    added = "{% for m in messages %}" + early + "{{ m.role + ': ' + m.content }}\n{% endfor %}"
    for chat in (chatml, template(renderer, added)):
        assert written(chat, **turn) == written(chat, content="")


def test_malformed_tools_and_variables(chatml: ChatTemplate) -> None:
    for tools in ("x", ["x"], [{"a": deep(70)}]):
        with pytest.raises(RequestError) as caught:
            chatml.render(HI, tools=tools)  # type: ignore[arg-type]
        assert caught.value.param == "tools"
    names = ["messages", "tools", "chat_template", "tokenize", "return_dict", "eos_token", "strftime_now", 3]
    for kwargs in (*({name: "x"} for name in names), [], {"a": deep(70)}):
        with pytest.raises(RequestError) as caught:
            chatml.render(HI, chat_template_kwargs=kwargs)  # type: ignore[arg-type]
        assert caught.value.param == "chat_template_kwargs"


def test_variables_and_tools_reach_the_template(renderer) -> None:
    chat = template(renderer, "{{ enable_thinking }} {{ tools[0].name }} {{ documents is none }}")
    rendered = chat.render(HI, tools=[{"name": "f"}], chat_template_kwargs={"enable_thinking": False})
    assert rendered.text == "False f True"
    assert template(renderer, "{{ tools is none }}").render(HI, tools=[]).text == "True"


def test_parts_are_joined_unless_the_template_wants_them(renderer, chatml) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert "user\na\nb<|im_end|>" in chatml.render(parts).text
    lists = "{% for m in messages %}{% for p in m.content %}{{ p.text }};{% endfor %}{% endfor %}"
    assert template(renderer, lists).render(parts).text == "a;b;"


def test_a_template_that_reads_parts_alone_gets_texts_as_parts(renderer) -> None:
    """As those of Idefics3 and SmolVLM do, which print nothing of a text."""
    each = "{{ m.role }}:{% for p in m.content or () %}{{ p.text }};{% endfor %}"
    lists = f"{{% for m in messages %}}{each}{{% endfor %}}"
    messages = [
        *({"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}),
        *({"role": "assistant", "content": "c"}, {"role": "user", "content": ""}),
    ]
    chat = template(renderer, lists)
    assert chat.render(messages).text == "system:a;user:b;assistant:c;user:;"
    assert chat.render(messages[:3], continue_final_message=True).text == "system:a;user:b;assistant:c"


CALLED = """{% for m in messages %}{{ '<|im_start|>' + m.role + ':' + (m.content or '') }}\
{% for c in m.tool_calls or [] %}{{ '\n<|call|>' + c.function.name + '\n' + c.function.arguments }}\
{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"""


@pytest.mark.parametrize("num_good", range(3))
def test_a_probe_that_broke_a_limit_says_nothing_of_the_template(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch, num_good: int
) -> None:
    """The request of that moment fails, and later ones are rendered as ever."""
    calls = "{% for c in m.tool_calls or () %}{{ c | tojson }}{% endfor %}"
    source = "{% for m in messages %}{{ m.content }}" + calls + "{% endfor %}"
    call = {"type": "function", "function": {"name": "find", "arguments": '{"x": 1}'}}
    parts = [{"type": "text", "text": "Hi"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    expected = template(renderer, source).render(turns).text
    assert re.fullmatch(r'Hi\{.*"arguments": \{"x": 1\}.*', expected)
    chat, asked, ask = template(renderer, source), list[bytes](), renderer.ask

    def busy(line: bytes) -> dict[str, Any]:
        asked.append(line)
        return {"kind": "time"} if len(asked) == num_good + 1 else ask(line)

    monkeypatch.setattr(renderer, "ask", busy)
    with pytest.raises(RequestError, match="did not finish"):
        chat.render(turns)
    assert chat.render(turns).text == expected


def test_images_keep_their_places_between_texts(renderer) -> None:
    listing = (
        "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
        "{% for part in message.content %}{{ part.text if part.type == 'text' else '<img>' }}{% endfor %}"
        "{% endif %};{% endfor %}"
    )
    texts = [{"type": "text", "text": text} for text in "abc"]
    seen = [*texts[:2], {"type": "image"}, texts[2], {"type": "image"}]
    messages = [{"role": "user", "content": texts}, {"role": "user", "content": seen}]
    assert template(renderer, listing).render(messages).text == "a\nb\nc;a\nb<img>c<img>;"


def test_a_template_that_puts_arguments_together_gets_their_text(renderer) -> None:
    """Text is kept as the model wrote it, in any form of call; an object is written as JSON."""
    said = '{"b" : 1,  "a": "é<|im_end|>"}'
    chat = template(renderer, CALLED)

    def written(arguments: Any) -> str:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [*HI, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "ok"}]
        rendered = chat.render(messages)
        assert messages[-2]["tool_calls"] == [call]  # the caller's own stays as it is
        trusted = "".join(segment.text for segment in rendered.segments if segment.trusted)
        assert "é<|im_end|>" not in trusted
        return rendered.text.split("<|call|>f\n")[1].split("<|im_end|>\n<|im_start|>tool")[0]

    assert written(said) == said
    assert written(json.loads(said)) == '{"b": 1, "a": "é<|im_end|>"}'
    assert [written(nothing) for nothing in ("", None, {})] == ["{}"] * 3
    flat = template(renderer, CALLED.replace("c.function", "(c.function or c)"))
    call = {"name": "f", "arguments": {"a": 1}}
    assert 'f\n{"a": 1}' in flat.render([*HI, {"role": "assistant", "tool_calls": [call]}]).text
    with pytest.raises(RequestError, match="not a JSON object"):
        written("{")


def test_a_template_that_fails_at_both_forms_of_arguments_gets_the_object(renderer) -> None:
    """A template that refuses the probe does not reveal which form it expects."""
    source = "{% if messages[0].content == 'Hi' %}{{ raise_exception('no') }}{% endif %}" + CALLED
    chat = template(renderer, source.replace("+ c.function.arguments", "~ c.function.arguments.a"))
    call = {"function": {"name": "f", "arguments": '{"a": 7}'}}
    text = chat.render([{"role": "user", "content": "Go"}, {"role": "assistant", "tool_calls": [call]}]).text
    assert "f\n7" in text


@pytest.mark.parametrize(
    ("condition", "form"),
    [
        ("true", ""),
        ("m.content is none", None),
        ("m.content[0].text is defined", [{"type": "text", "text": ""}]),
        ("false", ""),
    ],
)
def test_calls_without_text_come_with_the_content_that_a_template_wants(renderer, condition, form) -> None:
    source = "{% for m in messages %}{% if m.tool_calls and " + condition + " %}{{ m.content | tojson }}"
    source += "{{ m.tool_calls[0].function.arguments.a }}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    for content in ("", None):
        messages = [{"role": "assistant", "content": content, "tool_calls": [call]}]
        written = template(renderer, source).render(messages).text
        assert written == ("" if condition == "false" else f"{json.dumps(form)}1{json.dumps([call])}")


@pytest.mark.parametrize(("both", "written"), [(True, "A. B. "), (False, "A.\n\nB. ")])
def test_thoughts_have_the_name_that_a_template_reads(renderer, both: bool, written: str) -> None:
    refuse = "" if both else "{% if m.thinking and m.content %}{{ raise_exception('both') }}{% endif %}"
    source = "{% for m in messages if m.tool_calls %}" + refuse
    source += "{% if m.thinking %}{{ m.thinking }} {% endif %}{% if m.content %}{{ m.content }} {% endif %}"
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    message = {"role": "assistant", "reasoning_content": "A.", "content": "B.", "tool_calls": [call]}
    assert template(renderer, source + "{% endfor %}").render([message]).text == written


def test_arguments_given_as_json_text_become_objects(chatml) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": "é"}'}}
    text = chatml.render([*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]).text
    assert '<tool_call>\n{"name": "f", "arguments": {"b": 1, "a": "é"}}\n</tool_call>' in text


@pytest.mark.parametrize("given", [{}, {"arguments": None}, {"arguments": ""}])
def test_a_call_without_arguments_has_none(chatml, given: dict[str, Any]) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", **given}}
    text = chatml.render([*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]).text
    assert '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>' in text


def test_where_templates_are_found(tmp_path: Path, renderer) -> None:
    assert chat_template_of(tmp_path, renderer=renderer).templates == {}
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "plain"}))
    assert chat_template_of(tmp_path, renderer=renderer).render(HI).text == "plain"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    config.write_text(json.dumps({"chat_template": named}))
    chat = chat_template_of(tmp_path, renderer=renderer)
    assert (chat.render(HI).text, chat.render(HI, tools=[{"name": "f"}]).text) == ("plain", "tools")
    (tmp_path / "chat_template.jinja").write_text("file\n")
    assert chat_template_of(tmp_path, renderer=renderer).render(HI).text == "file"
    config.write_text(json.dumps({"chat_template": named[1:]}))
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(RequestError, match="only tool_use"):
        chat_template_of(tmp_path, renderer=renderer).render(HI)
    for broken in ({"default": 3}, [{"name": "default"}], 0, False, "\ud800"):
        config.write_text(json.dumps({"chat_template": broken}))
        with pytest.raises(ConfigError):
            chat_template_of(tmp_path, renderer=renderer)
    (tmp_path / "chat_template.jinja").write_text("x" * (2 << 20))
    with pytest.raises(ConfigError, match="too many"):
        chat_template_of(tmp_path, renderer=renderer)


def test_the_last_message_is_continued(chatml: ChatTemplate, tokenizer: Tokenizer) -> None:
    begun = [*HI, {"role": "assistant", "content": "Once <|im_end|> "}]
    rendered = chatml.render(begun, continue_final_message=True)
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nOnce <|im_end|> "
    assert rendered.text == expected
    assert [i for i in tokenizer.encode_segments(rendered.segments) if i in tokenizer.control_ids] == [
        tokenizer.token_id(mark) for mark in ("<|im_start|>", "<|im_end|>", "<|im_start|>")
    ]
    assert begun[-1]["content"] == "Once <|im_end|> "


def test_a_last_message_of_parts_is_continued(chatml: ChatTemplate) -> None:
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]
    rendered = chatml.render([*HI, {"role": "assistant", "content": parts}], continue_final_message=True)
    assert rendered.text.endswith("assistant\nOne\ntwo")


@pytest.mark.parametrize(
    "last", [HI[0], *({"role": "assistant", "content": one} for one in (None, "", [], [{"type": "image"}]))]
)
def test_what_cannot_be_continued_is_refused(chatml: ChatTemplate, last: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="continue_final_message") as error:
        chatml.render([*HI, last], continue_final_message=True)
    assert error.value.param == "continue_final_message"


def test_a_template_that_hides_the_last_message_cannot_continue_it(renderer: TemplateRenderer) -> None:
    chat = template(renderer, "{{ messages[0].content }}")
    with pytest.raises(RequestError, match="does not print the text of the last message"):
        chat.render([*HI, {"role": "assistant", "content": "So"}], continue_final_message=True)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{{", "unexpected 'end of template'"),
        ("{% if 1 %}" * 20_000, "recurses without end"),
        ("{{ " + "(" * 100_000, "recurses without end"),
        ("{% \x1b[2J %}", r"\\u001b\[2J|unexpected"),
    ],
    ids=["unfinished", "ifs", "parentheses", "steering"],
)
def test_a_template_that_does_not_compile_is_found_before_a_conversation(
    renderer, source: str, problem: str
) -> None:
    with pytest.raises(
        ConfigError, match=f"the chat template 'tool_use' does not compile: .*({problem})"
    ) as caught:
        ChatTemplate({"default": small.CHATML, "tool_use": source}, {}, renderer).check()
    assert caught.value.message.isprintable()
    ChatTemplate({"default": small.CHATML, "other": "{{ raise_exception('no') }}"}, {}, renderer).check()


def test_templates_of_a_folder_are_few_and_not_empty(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: not UTF-8 \(byte 0\)"):
        chat_template_of(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: the file is empty"):
        chat_template_of(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    config = tmp_path / "tokenizer_config.json"
    for number, message in ((100, "100 chat templates are more than 64"), (2, "two .* have one name")):
        named = [{"name": str(i) if number > 64 else "a", "template": "x"} for i in range(number)]
        config.write_text(json.dumps({"chat_template": named}))
        with pytest.raises(ConfigError, match=message):
            chat_template_of(tmp_path)
