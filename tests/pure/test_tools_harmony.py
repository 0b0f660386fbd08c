"""Answers of gpt-oss, which consist of messages: parsing in any chunks, and the grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing

import pytest
from answer_grammars import Bytes

from quire.text.answer import CallArguments, CallStart, Content, Event, Reasoning
from quire.text.chat_template import ChatTemplate
from quire.text.reasoning import FORMATS as REASONING
from quire.text.renderer import TemplateRenderer
from quire.text.tools import SAMPLE_TOOL, OutputFormat, output_format_of, sample_call
from quire.text.tools.harmony import Harmony

(HARMONY,) = (known for known in REASONING if known.name == "harmony")
THOUGHT = "<|channel|>analysis<|message|>Hm, {so}.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
PREAMBLE = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city":"Oslo"}'
AS_TOLD = ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Oslo"}'
PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
TOLD_CALL = [CallStart(0, "", "get_weather"), CallArguments(0, '{"city":"Oslo"}')]

# The messages of an assistant and the prompt for one, written as the template of gpt-oss writes them.
TEMPLATE = """{% for m in messages %}{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}\
{% if m.thinking and m.content %}{{ raise_exception("both") }}{% endif %}\
{{ "<|start|>assistant to=functions." + f.name + "<|channel|>commentary json<|message|>" }}\
{{ f.arguments | tojson + "<|call|>" }}{% elif m.role == "assistant" %}\
{{ "<|start|>assistant<|channel|>analysis<|message|>" + m.thinking + "<|end|>" if m.thinking }}\
{{ "<|start|>assistant<|channel|>final<|message|>" + m.content + "<|return|>" }}{% else %}\
{{ "<|start|>" + m.role + "<|message|>" + m.content + "<|end|>" }}{% endif %}{% endfor %}\
{{ "<|start|>assistant" if add_generation_prompt }}"""


def told(text: str, step: int, prompt: str = PROMPT, choice: str = "auto") -> list[Event]:
    """Parse a text in pieces; return the events without ids, with adjacent ones of a kind joined."""
    parser = OutputFormat(Harmony(""), HARMONY, {}).answer_parser([SAMPLE_TOOL], choice, prompt)
    pieces = (text[at : at + step] for at in range(0, len(text), step))
    joined: list[Event] = []
    for event in [*(event for piece in pieces for event in parser.push(piece)), *parser.finish()]:
        last = joined[-1] if joined else None
        if isinstance(event, CallStart):
            joined.append(event._replace(id=""))
        elif type(last) is type(event) and not isinstance(last, CallStart):
            joined[-1] = last._replace(text=last.text + event.text)  # type: ignore[union-attr]
        else:
            joined.append(event)
    assert parser.has_calls == any(isinstance(event, CallStart) for event in joined)
    return joined


@pytest.mark.parametrize("step", [1, 5, 1000])
@pytest.mark.parametrize(
    ("text", "events"),
    [
        (THOUGHT + FINAL + "Yes <b>.", [Reasoning("Hm, {so}."), Content("Yes <b>.")]),
        (f"{FINAL}Yes.<|return|>", [Content("Yes.")]),
        (f"{THOUGHT}{THOUGHT}{FINAL}Yes.", [Reasoning("Hm, {so}.\n\nHm, {so}."), Content("Yes.")]),
        (f"{THOUGHT}{CALL}<|call|>", [Reasoning("Hm, {so}."), *TOLD_CALL]),
        (f"{PREAMBLE}{CALL}", [Content("Let me see."), *TOLD_CALL]),
        (AS_TOLD, [TOLD_CALL[0], CallArguments(0, '{"city": "Oslo"}')]),
        (CALL.split("{")[0] + "<|call|>", [TOLD_CALL[0], CallArguments(0, "{}")]),
        (CALL[:-4], [TOLD_CALL[0], CallArguments(0, '{"city":"Os')]),
        (f"{FINAL}Yes <|en", [Content("Yes <|en")]),
        (THOUGHT.replace("<|end|><|start|>assistant", ""), [Reasoning("Hm, {so}.")]),
        (f"{THOUGHT}<|channel|>fin", [Reasoning("Hm, {so}.")]),
        ("<No> header", [Content("<No> header")]),
        (" \n", [Content(" \n")]),
        ("to=" + "x" * 600, [Content("to=" + "x" * 600)]),
        (CALL.replace("get_weather", "other"), [Content(CALL.replace("get_weather", "other"))]),
    ],
)
def test_messages_become_reasoning_text_and_calls(text: str, events: list[Event], step: int) -> None:
    assert told(text, step) == events


def test_a_prompt_that_has_begun_a_message_is_continued() -> None:
    assert told(f"{FINAL}Yes.", 2, "User: Hi\nAssistant:") == [Content("Yes.")]
    assert told("es.<|return|>", 2, f"{PROMPT}{FINAL}Y") == [Content("es.")]
    assert told(f"m.<|end|><|start|>assistant{FINAL}Yes.", 2, f"{PROMPT}<|channel|>analysis<|message|>H") == [
        Reasoning("m."),
        Content("Yes."),
    ]


def test_a_call_is_text_where_none_is_to_be() -> None:
    assert told(CALL, 4, choice="none") == [Content(CALL)]


@pytest.mark.parametrize("vocabulary", [Bytes(), Bytes(Harmony("").tokens)], ids=["text", "tokens"])
def test_the_grammar_of_messages(vocabulary: Bytes) -> None:
    output_format = OutputFormat(Harmony(""), HARMONY, vocabulary.ids)

    def allowed(
        texts: list[str], choice: str, prompt: str = PROMPT, content: str | None = None
    ) -> list[bool]:
        made = output_format.grammar([SAMPLE_TOOL], choice, prompt=prompt, content=content)
        assert made is not None
        return [vocabulary.allows(made, text) for text in texts]

    answers = [f"{THOUGHT}{FINAL}Yes.", f"{FINAL}Yes.", f"{PREAMBLE}{FINAL}Yes."]
    calls = [f"{THOUGHT}{CALL}", CALL, f"{THOUGHT}{AS_TOLD}", CALL.replace("<|constrain|>json", "")]
    wrong = ["", "Yes.", THOUGHT, f"{CALL}{CALL}", CALL.replace('"Oslo"', "1"), CALL.replace("get_w", "w")]
    assert allowed(answers + calls + wrong, "auto") == [True] * 7 + [False] * 6
    assert allowed(answers + calls + wrong, "required") == [False] * 3 + [True] * 4 + [False] * 6
    assert allowed(answers + calls, "none") == [True] * 3 + [False] * 4
    assert allowed(["es.", "es.<|end|>"], "auto", f"{PROMPT}{FINAL}Y") == [True, False]
    inside = f"{PROMPT}<|channel|>analysis<|message|>H"
    assert allowed([f"m.<|end|><|start|>assistant{CALL}", CALL], "required", inside) == [True, False]
    yes = [f"{THOUGHT}{FINAL}yes", f"{FINAL}no", CALL, f"{FINAL}perhaps", f"{PREAMBLE}{FINAL}yes", "yes"]
    content = 'start: "yes" | "no"'
    assert allowed(yes, "auto", content=content) == [True] * 3 + [False] * 3
    assert allowed(yes, "required", content=content) == [False, False, True, False, False, False]
    for text in json.dumps({"grammars": [{"json_schema": {"enum": [1]}}]}), "start: /1/":
        made = OutputFormat(None, HARMONY, vocabulary.ids).grammar(None, content=text)
        assert made is not None
        assert vocabulary.allows(made, f"{THOUGHT}{FINAL}1")


@pytest.fixture(scope="module")
def chat() -> Iterator[ChatTemplate]:
    with closing(TemplateRenderer()) as renderer:
        yield ChatTemplate({"default": TEMPLATE}, {}, renderer)


def test_the_format_is_found_and_agrees_with_its_template(chat: ChatTemplate) -> None:
    found = output_format_of(chat.templates, None)
    assert (found.tools and found.tools.name, found.reasoning) == ("harmony", HARMONY)
    assert found.self_check(chat) is None
    assert output_format_of(chat.templates, None, "none").marks == Harmony("").tokens
    prompt, written = sample_call(chat, "0")
    grammar = found.grammar([SAMPLE_TOOL], prompt=prompt)
    assert grammar is not None
    assert Bytes().allows(grammar, written.removesuffix("<|call|>"))
    named = output_format_of({}, None, "openai", "openai_gptoss")
    assert (named.tools and named.tools.name, named.reasoning) == ("harmony", HARMONY)
    phi = "<|user|>{{ messages[0].content }}<|end|><|assistant|>"
    assert output_format_of({"default": phi}, None) == OutputFormat(None, None, {})
