"""Formats detected in published chat templates; agreement of template, parser and grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers as small
from answer_grammars import Bytes
from model_folders import chat_template_of, tokenizer_of

from quire.errors import ConfigError
from quire.text.answer import CallArguments, CallStart, Content, Reasoning
from quire.text.chat_template import ChatTemplate
from quire.text.renderer import TemplateRenderer
from quire.text.tools import FORMATS, SAMPLE_TOOL, OutputFormat, output_format_of, sample_call

# case -> format of tool calls, format of reasoning; the others have neither
SPOKEN = {
    "CISCai_Mistral-7B-Instruct-v0.3-SOTA-GGUF": ("mistral", None),
    "CohereForAI_c4ai-command-r-v01_JSON_Schema": ("command_r", None),
    "CohereLabs_command-a-reasoning-08-2025": ("cohere_command3", "cohere"),
    "LiquidAI_LFM2.5-VL-450M": ("lfm2", "think"),
    "NousResearch_Hermes-2-Pro-Llama-3-8B_JSON_Schema": ("hermes", None),
    "Qwen_Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen_Qwen3-0.6B": ("hermes", "think"),
    "deepseek-ai_DeepSeek-R1": ("deepseek_v3", "think"),
    "meta-llama_Llama-3.1-8B-Instruct": ("llama3_json", None),
    "mistralai_Mistral-Nemo-Instruct-2407": ("mistral", None),
    "moonshotai_Kimi-K2-Thinking": ("kimi_k2", "think"),
    "zai-org_GLM-5.1": ("glm45", "think"),
}
WITH_TOOLS = [name for name, (tools, _) in SPOKEN.items() if tools]
ENDS = re.compile(
    r"(?s)\s*(<\|im_end\|>|<\|eot_id\|>|</s>|<｜end▁of▁sentence｜>|<\|(END|START)_OF_TURN_TOKEN\|>).*"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Where"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    with closing(TemplateRenderer()) as made:
        yield made


def case(shared_data: Path, name: str, renderer: TemplateRenderer) -> ChatTemplate:
    data = json.loads((shared_data / "chat_templates" / "cases" / f"{name}.json").read_text())
    tokens = {key: value for key, value in data["context"].items() if key.endswith("_token")}
    return ChatTemplate(
        {"default": data["template"]}, {"bos_token": "<s>", "eos_token": "</s>"} | tokens, renderer
    )


def names(output_format: OutputFormat) -> tuple[str | None, str | None]:
    return (
        output_format.tools.name if output_format.tools else None,
        output_format.reasoning.name if output_format.reasoning else None,
    )


def test_formats_of_published_templates(shared_data: Path, renderer: TemplateRenderer) -> None:
    cases = sorted(path.stem for path in (shared_data / "chat_templates" / "cases").glob("*.json"))
    templates = {name: case(shared_data, name, renderer).templates for name in cases}
    found = {name: names(output_format_of(each, None)) for name, each in templates.items()}
    assert {name: pair for name, pair in found.items() if any(pair)} == SPOKEN


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_published_templates_pass_the_check(shared_data: Path, renderer: TemplateRenderer, name: str) -> None:
    chat = case(shared_data, name, renderer)
    assert output_format_of(chat.templates, None).self_check(chat) is None


@pytest.mark.parametrize("name", [*WITH_TOOLS, "demo"])
def test_what_a_template_writes_the_grammar_allows(
    shared_data: Path, demo_folder: Path, renderer: TemplateRenderer, name: str
) -> None:
    """The grammar allows the calls that a template writes, which models are trained on."""
    chat = (
        case(shared_data, name, renderer) if name != "demo" else chat_template_of(demo_folder, {}, renderer)
    )
    output_format = output_format_of(chat.templates, None)
    assert output_format.tools is not None
    prompt, written = sample_call(chat, output_format.tools.new_id("get_weather"))
    written = ENDS.sub("", written).replace(' "Nowa"', " Nowa")  # LFM2's templates do not escape quotes
    written = re.sub(r', "id": "\w+"|"id": "\w+", ', "", written)  # given by whoever serves, not by the model
    written = written.replace('{ "arguments"', '{"arguments"')  # as Hermes 2 is told, not as it is shown
    grammar = output_format.grammar([SAMPLE_TOOL], prompt=prompt)
    assert grammar is not None
    assert Bytes().allows(grammar, written), written


@pytest.mark.parametrize(
    "source",
    [
        "<tool_call>\n<function={{ call.name }}>{% for name, value in call.arguments|items %}",
        "<tool_call>{{ call.name }}<arg>",
        '{"name": "{{ call.name }}"}',
        "",
    ],
)
def test_similar_formats_are_not_taken_for_those_known(source: str) -> None:
    assert names(output_format_of({"default": source}, None)) == (None, None)


MISTRAL = """{% for m in messages %}{% if m.role == "user" %}[INST]{{ m.content }}[/INST]{% else %}\
{{ m.content }}{% for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}%s[ARGS]\
{{ call.function.arguments | tojson }}{% endfor %}</s>{% endif %}{% endfor %}"""


@pytest.mark.parametrize("call_id", ["", "[CALL_ID]{{ call.id }}"])
def test_newer_templates_of_mistral(renderer: TemplateRenderer, call_id: str) -> None:
    chat = ChatTemplate({"default": MISTRAL.replace("%s", call_id)}, {}, renderer)
    output_format = output_format_of(chat.templates, None)
    assert names(output_format) == ("mistral_args", None)
    assert names(output_format_of(chat.templates, None, "mistral")) == ("mistral_args", None)
    assert output_format.self_check(chat) is None
    grammar = output_format.grammar([TOOL])
    assert grammar is not None
    written = f"[TOOL_CALLS]get_weather{call_id and '[CALL_ID]abcDEF123'}[ARGS]"
    assert Bytes().allows(grammar, f'So. {written}{{"city": "Łódź"}}')
    assert not Bytes().begins(grammar, f"{written}x")


QWEN = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}\
{% for call in m.tool_calls or () %}\
{{ '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}\
{% for key, value in call.function.arguments | items %}{{ '<parameter=' + key + '>\\n' }}\
{{ value if value is string else value | tojson }}{{ '\\n</parameter>\\n' }}{% endfor %}\
{{ '</function>\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def test_templates_with_a_tag_for_each_parameter(renderer: TemplateRenderer) -> None:
    chat = ChatTemplate({"default": QWEN}, {}, renderer)
    output_format = output_format_of(chat.templates, None)
    assert names(output_format) == ("qwen_xml", None)
    assert output_format.self_check(chat) is None
    grammar = output_format.grammar([TOOL])
    assert grammar is not None
    written = (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n%s\n</parameter>\n</function>\n</tool_call>"
    )
    assert Bytes().allows(grammar, "Let me see.\n" + written % 'Łódź\n</p> "x"')
    assert not Bytes().begins(grammar, "<tool_call>\n<function=get_weather>\n</function>")
    assert not Bytes().begins(grammar, "<tool_call>\n<function=other>")


GEMMA = """{% macro value(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is sequence %}[\
{% for one in v %}{{ value(one) }}{{ "," if not loop.last }}{% endfor %}]\
{% else %}{{ v }}{% endif %}{% endmacro %}\
{% for m in messages %}{{ "<|turn>" + ("model" if m.role == "assistant" else m.role) + "\n" }}\
{% for call in m.tool_calls or () %}{{ "<|tool_call>call:" + call.function.name + "{" }}\
{% for key, v in call.function.arguments | dictsort %}{{ key }}:{{ value(v) }}\
{{ "," if not loop.last }}{% endfor %}\
}<tool_call|>{% endfor %}{{ m.content + "<turn|>\n" }}{% endfor %}\
{% if add_generation_prompt %}{{ "<|turn>model\n" }}\
{{ "<|channel>thought\n<channel|>" if not enable_thinking }}{% endif %}"""


def test_templates_of_gemma_4(renderer: TemplateRenderer) -> None:
    chat = ChatTemplate({"default": GEMMA}, {}, renderer)
    output_format = output_format_of(chat.templates, None)
    assert names(output_format) == ("gemma4", "gemma4")
    assert output_format.self_check(chat) is None
    written = '<|tool_call>call:get_weather{city:<|"|>Łódź<|"|>}<tool_call|>'
    thought = "<|channel>thought\nHm.\n<channel|>"
    ids = {mark: 300 + place for place, mark in enumerate(output_format.marks)}
    assert ids.keys() == {"<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"}
    tokens = Bytes(tuple(ids))
    for thinking, vocabulary in ((True, Bytes()), (True, tokens), (False, tokens)):
        prompt = chat.render(
            [{"role": "user", "content": "Hi"}], [TOOL], chat_template_kwargs={"enable_thinking": thinking}
        )
        known = replace(output_format, token_ids=vocabulary.ids)
        grammar = known.grammar([TOOL], prompt=prompt.text)
        assert grammar is not None
        assert vocabulary.allows(grammar, f"So. {written}")
        assert vocabulary.allows(grammar, f"{thought}{written}{written}") == thinking
        if thinking:
            events = known.answer_parser([TOOL], prompt=prompt.text).push(f"{thought}{written}")
            assert events[0] == Reasoning("Hm.")
            assert events[-1] == CallArguments(0, '{"city": "Łódź"}')


HUNYUAN_A13B = """{% for m in messages %}{% if m.role == "user" %}\
{{ "Answer, or call <tool_calls>[{...}]</tool_calls>." if tools }}{{ m.content + "<|extra_0|>" }}\
{% elif m.tool_calls %}{{ "<tool_calls>[" }}{% for call in m.tool_calls %}\
{{ '{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}}\
{{ ", " if not loop.last }}{% endfor %}{{ "]</tool_calls><|eos|>" }}\
{% else %}{{ m.content + "<|eos|>" }}{% endif %}{% endfor %}\
{{ "<think>\\n\\n</think>\\n" if enable_thinking is false }}"""
HUNYUAN = """{{ "Write <tool_calls><tool_call>name\\n```json\\n{}\\n```</tool_call></tool_calls>" if tools }}\
{% for m in messages %}{% if m.role == "user" %}{{ "<｜hy_User｜>" + m.content + "<｜hy_Assistant｜>" }}\
{% elif m.tool_calls %}{{ "<tool_calls>" }}{% for call in m.tool_calls %}\
{{ "<tool_call>" + call.function.name + "\\n```json\\n" }}{{ call.function.arguments | tojson }}\
{{ "\\n```</tool_call>" }}{{ "\\n" if not loop.last }}{% endfor %}{{ "</tool_calls></s>" }}\
{% else %}{{ m.content.split("<answer>")[-1] }}{% endif %}{% endfor %}\
{{ "<think>\\n\\n</think>\\n" if enable_thinking is false }}"""


@pytest.mark.parametrize(
    ("source", "name", "written"),
    [
        (
            HUNYUAN_A13B,
            "hunyuan_a13b",
            '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Łódź"}}]</tool_calls>',
        ),
        (
            HUNYUAN,
            "hunyuan",
            '<tool_calls><tool_call>get_weather\n```json\n{"city": "Łódź"}\n```</tool_call></tool_calls>',
        ),
    ],
)
def test_templates_of_hunyuan(renderer: TemplateRenderer, source: str, name: str, written: str) -> None:
    chat = ChatTemplate({"default": source}, {}, renderer)
    output_format = output_format_of(chat.templates, None)
    assert names(output_format) == (name, "hunyuan_a13b")
    assert output_format.self_check(chat) is None
    thought = "<think>\nHm.\n</think>\n"
    grammar = output_format.grammar([TOOL])
    required = output_format.grammar([TOOL], "required")
    assert grammar is not None
    assert required is not None
    assert Bytes().allows(grammar, f"{thought}<answer>\n{written}")
    assert Bytes().allows(grammar, f"{thought}<answer>\nYes.\n</answer>")
    assert Bytes().allows(required, f"{thought}{written}")
    assert not Bytes().allows(required, f"{thought}<answer>\nYes.\n</answer>")
    parser = output_format.answer_parser([TOOL])
    events = parser.push(f"{thought}<answer>\n{written}\n</answer>") + parser.finish()
    assert events[0] == Reasoning("Hm.")
    assert events[2:] == [CallArguments(0, '{"city": "Łódź"}')]


ERNIE = """{% for m in messages %}{{ "<|im_start|>" + m.role + "\\n" }}\
{% if m.role == "user" %}{{ m.content }}\
{% elif m.content %}{{ "<response>\\n" + m.content + "\\n</response>\\n" }}{% endif %}\
{% for call in m.tool_calls or () %}\
{{ '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}\
{{ call.function.arguments | tojson }}{{ "}\\n</tool_call>\\n" }}{% endfor %}\
{{ "<|im_end|>\\n\\n" }}{% endfor %}\
{{ "<|im_start|>assistant\\n<think>\\n" if add_generation_prompt }}{# </think> #}"""


def test_templates_of_ernie(renderer: TemplateRenderer) -> None:
    chat = ChatTemplate({"default": ERNIE}, {}, renderer)
    output_format = output_format_of(chat.templates, None)
    assert names(output_format) == ("hermes", "ernie45")
    assert names(output_format_of({}, None, "ernie45", "ernie45")) == ("hermes", "ernie45")
    assert output_format.self_check(chat) is None
    prompt = chat.render([{"role": "user", "content": "Hi"}], [TOOL]).text
    thought, call = "Hm.\n</think>\n\n", '{"name": "get_weather", "arguments": {"city": "Łódź"}}'
    ids = {mark: 300 + place for place, mark in enumerate(output_format.marks)}
    assert ids.keys() == {"<tool_call>", "</tool_call>", "<think>", "</think>", "<response>", "</response>"}
    for vocabulary in (Bytes(), Bytes(tuple(ids))):
        known = replace(output_format, token_ids=vocabulary.ids)
        grammar = known.grammar([TOOL], prompt=prompt)
        assert grammar is not None
        assert vocabulary.allows(grammar, f"{thought}<response>\nYes.\n</response>")
        assert vocabulary.allows(grammar, f"{thought}<tool_call>\n{call}\n</tool_call>")
        limited = known.grammar([TOOL], prompt=prompt, content='start: "yes"')
        assert limited is not None
        assert vocabulary.allows(limited, f"{thought}<response>\nyes\n</response>")
        assert not vocabulary.begins(limited, f"{thought}<response>\nno")
    parser = output_format.answer_parser([TOOL], prompt=prompt)
    events = parser.push(f"{thought}<response>\nYes.\n</response>\n") + parser.finish()
    assert events == [Reasoning("Hm."), Content("Yes.")]
    parser = output_format.answer_parser([TOOL], prompt=prompt)
    events = parser.push(f"{thought}<tool_call>\n{call}\n</tool_call>\n") + parser.finish()
    assert events[0] == Reasoning("Hm.")
    assert events[2:] == [CallArguments(0, '{"city": "Łódź"}')]


LLAMA_4 = """{% for m in messages %}{{ "<|header_start|>" + m.role + "<|header_end|>\\n\\n" }}\
{% if tools and loop.first %}{{ "Call by [func_name1(param1=value1), func_name2()]\\n" }}{% endif %}\
{{ m.content }}{% if m.tool_calls %}[{% for call in m.tool_calls %}{{ call.function.name }}(\
{% for name in call.function.arguments %}{{ name }}="{{ call.function.arguments[name] }}"\
{{ ", " if not loop.last }}{% endfor %}){{ ", " if not loop.last }}{% endfor %}]{% endif %}<|eot|>\
{% endfor %}{{ "<|header_start|>assistant<|header_end|>\\n\\n" if add_generation_prompt }}"""
LLAMA_3 = LLAMA_4.replace("header_start", "start_header_id").replace("header_end", "end_header_id")


@pytest.mark.parametrize(
    ("source", "marks"),
    [(LLAMA_4, ("<|python_start|>", "<|python_end|>")), (LLAMA_3, ("<|python_tag|>",))],
)
def test_templates_of_llama_with_calls_as_in_python(
    renderer: TemplateRenderer, source: str, marks: tuple[str, ...]
) -> None:
    chat = ChatTemplate({"default": source}, {}, renderer)
    output_format = output_format_of(chat.templates, None)
    assert names(output_format) == ("pythonic", None)
    assert names(output_format_of({}, None, "llama4_pythonic")) == ("pythonic", None)
    assert output_format.marks == marks
    prompt = chat.render([{"role": "user", "content": "Hi"}], [TOOL]).text
    called = {"function": {"name": "get_weather", "arguments": {"city": 'Łódź "x"'}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [called, called]}
    written = chat.render([{"role": "user", "content": "Hi"}, turn], [TOOL], add_generation_prompt=False).text
    answer = written.removeprefix(prompt).removesuffix("<|eot|>")
    before, after = (*marks, "")[:2]
    for text in (answer, before + answer, before + answer + after):
        events = (parser := output_format.answer_parser([TOOL])).push(text) + parser.finish()
        assert [event.text for event in events if isinstance(event, CallArguments)] == [
            '{"city": "Łódź \\"x\\""}'
        ] * 2
        assert not any(isinstance(event, Content) for event in events)
    for vocabulary in (Bytes(), Bytes(marks)):
        grammar = replace(output_format, token_ids=vocabulary.ids).grammar([TOOL], "required")
        assert grammar is not None
        allowed = answer.replace(' "x"', "")
        assert vocabulary.allows(grammar, allowed)
        assert vocabulary.allows(grammar, before + allowed + after)
        assert not vocabulary.begins(grammar, "So: ")
    assert "writes calls in another format" in (output_format.self_check(chat) or "")  # a list as a text


PHI = """{% for m in messages %}{{ "<|" + m.role + "|>" }}\
{% if tools and loop.first %}{{ "Call with <|tool_call|>EXAMPLE<|/tool_call|>. " }}{% endif %}{{ m.content }}\
CALLS<|end|>{% endfor %}{{ "<|assistant|>" if add_generation_prompt }}"""
PHI_EACH = PHI.replace("EXAMPLE", "{...}").replace(
    "CALLS",
    "{% for call in m.tool_calls or () %}<|tool_call|>{{ call.function | tojson }}<|/tool_call|>{% endfor %}",
)
PHI_LIST = PHI.replace("EXAMPLE", "[{...}]").replace(
    "CALLS",
    "{% if m.tool_calls %}<|tool_call|>[{% for call in m.tool_calls %}{{ call.function | tojson }}"
    '{{ ", " if not loop.last }}{% endfor %}]<|/tool_call|>{% endif %}',
)
PHI_FUNCTOOLS = PHI_LIST.replace("<|tool_call|>", "functools").replace("<|/tool_call|>", "")
GRANITE = """{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>\
{% if tools and loop.first %}{{ "Respond only with <|tool_call|> and a list. " }}{% endif %}{{ m.content }}\
{% if m.tool_calls %}<|tool_call|>{{ m.tool_calls | map(attribute="function") | list | tojson }}{% endif %}\
<|end_of_text|>{% endfor %}\
{{ "<|start_of_role|>assistant<|end_of_role|>" if add_generation_prompt }}"""


@pytest.mark.parametrize(
    ("source", "name", "begin", "between", "end"),
    [
        (PHI_EACH, "phi4_mini", "<|tool_call|>", "<|/tool_call|><|tool_call|>", "<|/tool_call|>"),
        (PHI_LIST, "phi4_mini", "<|tool_call|>[", ", ", "]<|/tool_call|>"),
        (PHI_FUNCTOOLS, "phi4_mini_json", "functools[", ", ", "]"),
        (GRANITE, "granite", "<|tool_call|>[", ", ", "]"),
    ],
)
def test_templates_of_phi_and_granite(
    renderer: TemplateRenderer, source: str, name: str, begin: str, between: str, end: str
) -> None:
    chat = ChatTemplate({"default": source}, {}, renderer)
    output_format = output_format_of(chat.templates, None)
    assert names(output_format) == (name, None)
    assert output_format.self_check(chat) is None
    call = '{"name": "get_weather", "arguments": {"city": "Łódź"}}'
    for vocabulary in (Bytes(), Bytes(output_format.marks)):
        grammar = replace(output_format, token_ids=vocabulary.ids).grammar([TOOL])
        assert grammar is not None
        assert vocabulary.allows(grammar, f"So. {begin}{call}{end}")
        assert vocabulary.allows(grammar, f"{begin}{call}{between}{call}{end}")
        assert not vocabulary.begins(grammar, f"{begin}{call}.")


def test_a_mismatch_is_reported(renderer: TemplateRenderer) -> None:
    wrong = ChatTemplate(
        {"default": "<tool_call>{{ '\"arguments\"' }}{{ messages[0].content }}"}, {}, renderer
    )
    output_format = output_format_of(wrong.templates, None)
    assert names(output_format) == ("hermes", None)
    assert "writes calls in another format" in (output_format.self_check(wrong) or "")
    refusing = ChatTemplate({"default": "{{ raise_exception('no tools here') }}"}, {}, renderer)
    problem = output_format_of(refusing.templates, None, "mistral").self_check(refusing)
    assert problem is not None
    assert "no tools here" in problem
    assert output_format_of(refusing.templates, None).self_check(refusing) is None


@pytest.mark.parametrize("known", [known.name for known in FORMATS])
def test_a_format_is_chosen_by_name(known: str) -> None:
    assert names(output_format_of({}, None, known, "cohere")) == (known, "cohere")


def test_a_format_can_be_switched_off(shared_data: Path, renderer: TemplateRenderer) -> None:
    templates = case(shared_data, "Qwen_Qwen3-0.6B", renderer).templates
    assert names(output_format_of(templates, None, "none", "none")) == (None, None)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"hermes, .*, qwen3_json, qwen_xml, .*, llama3_json"):
        output_format_of({}, None, "herems")
    with pytest.raises(ConfigError, match=r"think, deepseek_r1, .*, mistral, cohere"):
        output_format_of({}, None, "auto", "thought")


def test_marks_that_are_tokens(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(small.byte_level(tmp_path))
    output_format = output_format_of({}, tokenizer, "hermes", "think")
    assert output_format.token_ids == {mark: tokenizer.token_id(mark) for mark in small.MARKUP}
    assert not output_format.needs_special_tokens  # in this vocabulary they are visible
    assert output_format_of({}, tokenizer, "mistral").token_ids == {}


def test_marks_that_are_special_tokens_must_be_shown(tmp_path: Path) -> None:
    folder = small.byte_level(tmp_path)
    data: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    for token in data["added_tokens"]:
        token["special"] = True
    (folder / "tokenizer.json").write_text(json.dumps(data))
    assert output_format_of({}, tokenizer_of(folder), "hermes").needs_special_tokens


def test_a_call_read_back_from_the_demo_model(demo_folder: Path, renderer: TemplateRenderer) -> None:
    chat = chat_template_of(demo_folder, {}, renderer)
    output_format = output_format_of(chat.templates, tokenizer_of(demo_folder))
    assert names(output_format) == ("hermes", None)
    assert output_format.token_ids == {"<tool_call>": 3, "</tool_call>": 4}
    assert output_format.self_check(chat) is None
    parser = output_format.answer_parser([TOOL])
    events = parser.push('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>')
    assert isinstance(events[0], CallStart)
    assert events[1] == CallArguments(0, '{"city": "Oslo"}')
