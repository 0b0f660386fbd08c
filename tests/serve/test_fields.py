"""Every field that clients may send, on every interface: done, refused by name, warned about, or harmless.

The fields of OpenAI's and Anthropic's interfaces are those of their packages as installed, so that a new one
is noticed; those of vLLM, SGLang and llama.cpp are from their sources. What becomes of a field is found by
giving it a value that asks for something.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Set
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params

from quire.errors import RequestError
from quire.sampling_params import StructuredOutputsParams
from quire.server.anthropic import protocol as anthropic
from quire.server.anthropic.protocol import MessagesRequest
from quire.server.body import parse
from quire.server.chat_task import ChatTask
from quire.server.openai import items
from quire.server.openai.chat import task_of
from quire.server.openai.completions import params_of
from quire.server.openai.items import ResponseRequest
from quire.server.openai.protocol import ChatRequest, CompletionRequest
from quire.server.unsupported_fields import IGNORED, NEUTRAL, OF_PENALTIES, OFF_FROM, OFF_UP_TO, REFUSED

VLLM = """
add_generation_prompt add_special_tokens allowed_token_ids bad_words best_of cache_salt chat_template
chat_template_kwargs continue_final_message documents ec_transfer_params echo frequency_penalty
guided_choice guided_decoding_backend guided_grammar guided_json guided_regex guided_whitespace_pattern
ignore_eos include_reasoning include_stop_str_in_output kv_transfer_params length_penalty logit_bias
logits_processors logprob_token_ids logprobs max_completion_tokens max_tokens media_io_kwargs messages
min_p min_tokens mm_processor_kwargs model n parallel_tool_calls presence_penalty priority prompt
prompt_embeds prompt_logprobs reasoning_effort repetition_detection repetition_penalty request_id
response_format return_mm_kwargs return_prompt_text return_token_ids return_token_offsets
return_tokens_as_token_ids routed_experts_prompt_start seed session_id skip_special_tokens
spaces_between_special_tokens stop stop_token_ids stream stream_interval stream_options structural_tag
structured_outputs suffix temperature thinking_token_budget tool_choice tools top_k top_logprobs top_p
truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermarking
"""
SGLANG = """
bootstrap_host bootstrap_port bootstrap_room cache_salt custom_labels custom_logit_processor custom_params
data_parallel_rank disagg_prefill_dp_rank ebnf extra_key ignore_eos images_config input_ids json_schema
lora_path max_dynamic_patch min_dynamic_patch min_p min_tokens ngram_corpus_id no_stop_trim priority regex
repetition_penalty return_cached_tokens_details return_hidden_states return_meta_info
return_prompt_token_ids return_routed_experts return_token_ids rid routed_dp_rank routed_experts_start_len
separate_reasoning session_id session_params skip_special_tokens stop_regex stop_token_ids
stream_reasoning task top_k use_audio_in_video
"""
LLAMA_CPP = """
adaptive_decay adaptive_target backend_sampling cache_prompt chat_format chat_parser dry_allowed_length
dry_base dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp_exponent dynatemp_range
frequency_penalty generation_prompt grammar grammar_lazy grammar_triggers id_slot ignore_eos json_schema
lora min_keep min_p mirostat mirostat_eta mirostat_tau n_cache_reuse n_cmpl n_discard n_indent n_keep
n_predict n_probs parse_tool_calls penalize_nl post_sampling_probs presence_penalty preserved_tokens
reasoning_budget_end_tag reasoning_budget_end_tags reasoning_budget_message reasoning_budget_start_tag
reasoning_budget_tokens reasoning_control reasoning_format repeat_last_n repeat_penalty response_fields
return_progress return_tokens samplers seed sse_ping_interval stop stream stream_options t_max_predict_ms
t_max_prompt_ms temperature tfs_z thinking_budget_tokens timings_per_token top_k top_n_sigma top_p
typical_p verbose xtc_probability xtc_threshold
"""
EXTENSIONS = set(f"{VLLM} {SGLANG} {LLAMA_CPP}".split())

# Values that ask for something, of fields that have a type here. All others get OTHER.
OTHER = "something"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
VALUES: dict[str, Any] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty", "temperature"), 0.7),
    **dict.fromkeys(("top_p", "min_p"), 0.3),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "top_k"), 7),
    **dict.fromkeys(("n", "priority", "prompt_logprobs", "seed", "truncate_prompt_tokens"), 3),
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "return_token_ids", "stream"), True),
    **dict.fromkeys(("return_tokens_as_token_ids", "echo", "continue_final_message", "background"), True),
    **dict.fromkeys(("skip_special_tokens", "include_reasoning", "parallel_tool_calls"), False),
    **dict.fromkeys(("add_generation_prompt", "add_special_tokens", "store"), False),
    "allowed_token_ids": [5],
    "bad_words": ["x"],
    "chat_template_kwargs": {"mood": "good"},
    "context_management": {"edits": [{"type": "compact_20260112"}]},
    "include": ["message.output_text.logprobs"],
    "input": "Hello",
    "inference_geo": "eu",
    "instructions": "Be brief.",
    "logit_bias": {"5": 1.5},
    "max_tool_calls": 3,
    "mcp_servers": [{"type": "url"}],
    "metadata": {},
    "messages": [{"role": "user", "content": "Hello"}],
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    "output_format": {"type": "json_schema", "schema": {"type": "object"}},
    "parse_tool_calls": False,
    "prediction": {"type": "content", "content": "x"},
    "prompt": "Hello",
    "reasoning": {"effort": "low"},
    "reasoning_effort": "low",
    "response_format": {"type": "json_object"},
    "separate_reasoning": False,
    "speed": "fast",
    "stop_sequences": ["x"],
    "stop_token_ids": [5],
    "stream_options": {},
    "structured_outputs": {"regex": "a+"},
    "system": "Be brief.",
    "text": {"format": {"type": "json_object"}},
    "thinking": {"type": "disabled"},
    "tool_choice": "none",
    "tools": [TOOL],
    "top_logprobs": 2,
    "truncation": "auto",
    "truncation_side": "right",
}
# What has to be there as well for a field to say anything.
NEEDED: dict[str, Any] = {
    **{name: {"presence_penalty": 0.5} for name in OF_PENALTIES},
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
}
# That packages or servers had, or that agents send, and that are in no list here.
OLDER = {"client_metadata", "function_call", "functions", "images", "lora_request"}
# Acts where the response is written, and not in the task.
TOLD = {"model", "stream", "stream_options", "return_token_ids", "return_tokens_as_token_ids", "user"}


class Interface:
    """One interface: its request, how that becomes a task, what its package sends, and where it differs.

    `more` are its own values; `refused`, `warned` and `harmless` are fields beside those of the two tables,
    `done` those of the tables that it does have.
    """

    def __init__(
        self,
        type_: type[msgspec.Struct],
        task: Callable[[Any], Any],
        base: dict[str, Any],
        sdk: set[str],
        *,
        more: dict[str, Any],
        refused: Set[str] = frozenset(),
        warned: Set[str] = frozenset(),
        harmless: Set[str] = frozenset(),
        done: Set[str] = frozenset(),
        idle: Callable[[Any], list[str]] = lambda asked: [],
    ) -> None:
        self.type, self.task, self.base, self.sdk, self.more = type_, task, base, sdk, more
        self.refused, self.warned, self.harmless, self.idle = refused, warned, harmless, idle
        self.done = done

    def value(self, name: str) -> Any:
        return self.more.get(name, VALUES.get(name, OTHER))

    def verdict(self, name: str) -> str:
        """What becomes of a field, by what it does."""
        base = {**self.base, **NEEDED.get(name, {})} if name in self.type.__struct_fields__ else self.base
        plain = self.task_for(base)[0]
        try:
            task, warnings = self.task_for({**base, name: self.value(name)})
        except RequestError as error:
            return "refused" if error.param == name and name in error.message else f"error: {error.message}"
        if task != plain:
            return "done"
        if any(re.search(rf"\b{name}\b", warning) for warning in warnings):
            return "warned"
        return "done" if name in TOLD and name in self.type.__struct_fields__ else "harmless"

    def expected(self, name: str) -> str:
        if name in self.done:
            return "done"
        if name in self.harmless:
            return "harmless"
        if name in self.warned:
            return "warned"
        if name in REFUSED or name in self.refused:
            return "refused"
        return "harmless" if name in IGNORED else "done"

    def task_for(self, body: dict[str, Any]) -> tuple[Any, list[str]]:
        """What a body asks to be computed, without the warnings; and these."""
        asked, unknown = parse(json.dumps(body).encode(), self.type)
        task = self.task(asked)
        warnings = [*unknown, *self.idle(asked)]
        if isinstance(task, ChatTask):
            warnings += task.warnings
            task = replace(task, warnings=[])
        return task, warnings


def fields_of(*types: Any) -> set[str]:
    return {name for type_ in types for name in type_.__annotations__}


def completion_task(asked: CompletionRequest) -> Any:
    """All that decides the tokens."""
    params = params_of(asked, SimpleNamespace(default_params={}, infill=None))  # type: ignore[arg-type]
    names = ("prompt", "echo", "add_special_tokens", "truncate_prompt_tokens", "truncation_side", "priority")
    return params, [getattr(asked, name) for name in (*names, "cache_salt")], asked.suffix or None


TURNS = [{"role": "user", "content": "Hi"}]
ANTHROPIC_TOOL = {"name": "f", "input_schema": {"type": "object"}}
INTERFACES = {
    "chat": Interface(
        ChatRequest,
        task_of,
        {"messages": TURNS},
        fields_of(chat_params.CompletionCreateParamsBase, chat_params.CompletionCreateParamsStreaming),
        more={"logprobs": True, "add_special_tokens": True},
        refused={"echo", "add_special_tokens"},
        warned={"verbosity", "prompt"},
        done={"prediction"},
    ),
    "completions": Interface(
        CompletionRequest,
        completion_task,
        {"prompt": "Hi"},
        fields_of(
            completion_create_params.CompletionCreateParamsBase,
            completion_create_params.CompletionCreateParamsStreaming,
        ),
        more={"logprobs": 2, "prompt": ["Hello"]},
        warned={
            *("add_generation_prompt", "chat_template_kwargs", "continue_final_message", "include_reasoning"),
            *("max_completion_tokens", "messages", "parallel_tool_calls", "reasoning_effort", "tool_choice"),
            *("tools", "top_logprobs"),
        },
        done={"suffix"},
    ),
    "responses": Interface(
        ResponseRequest,
        lambda asked: items.task_of(asked)[0],
        {"input": "Hi"},
        fields_of(
            response_create_params.ResponseCreateParamsBase,
            response_create_params.ResponseCreateParamsStreaming,
        ),
        more={"tools": [TOOL["function"] | {"type": "function"}], "n": 2, "store": True},  # type: ignore[operator]
        refused=set(items.REFUSED_HERE),
        warned={"store", "max_tool_calls"},
        idle=lambda asked: items.without_effect(asked, False),
    ),
}
INTERFACES["messages"] = Interface(
    MessagesRequest,
    anthropic.task_of,
    {"messages": TURNS, "max_tokens": 9},
    fields_of(
        message_create_params.MessageCreateParamsBase,
        message_create_params.MessageCreateParamsStreaming,
        message_count_tokens_params.MessageCountTokensParams,
        beta_params.MessageCreateParamsBase,
    ),
    more={
        "tools": [ANTHROPIC_TOOL],
        "tool_choice": {"type": "any"},
        "thread": {"type": "create"},
    },
    refused={*anthropic.REFUSED_HERE, "thread"},
    # Anthropic's own affairs, and how the beginnings of prompts are cached.
    harmless={"billing_policy", "cache_control", "diagnostics", "fallback_credit_token", "fallbacks"},
    # The last three are sent as headers.
    warned={"context_management", "inference_geo", "speed", "betas", "user_profile_id", "workspace_id"},
    idle=lambda asked: anthropic.without_effect(asked, False),
)


@pytest.mark.parametrize("interface", INTERFACES)
def test_what_becomes_of_the_fields_of_an_interface(interface: str) -> None:
    """A name that is new here was added by a package or to a request: say what becomes of it."""
    one = INTERFACES[interface]
    names = one.sdk.union(one.type.__struct_fields__)
    found = {name: (one.verdict(name), one.expected(name)) for name in sorted(names)}
    assert {name: pair for name, pair in found.items() if pair[0] != pair[1]} == {}


@pytest.mark.parametrize("interface", INTERFACES)
def test_what_becomes_of_the_fields_of_other_servers(interface: str) -> None:
    one = INTERFACES[interface]
    expected = {name: one.expected(name) for name in EXTENSIONS}
    if interface in ("responses", "messages"):  # they need not do all that the others do
        expected |= dict.fromkeys(EXTENSIONS.difference(one.type.__struct_fields__), "warned")
    found = {name: (one.verdict(name), expected[name]) for name in sorted(EXTENSIONS)}
    assert {name: pair for name, pair in found.items() if pair[0] != pair[1]} == {}


@pytest.mark.parametrize("interface", INTERFACES)
def test_values_that_ask_for_nothing(interface: str) -> None:
    """As clients send them that know every parameter and give each its default."""
    one = INTERFACES[interface]
    plain = one.task_for(one.base)
    for name in REFUSED:
        off = {**OFF_UP_TO, **OFF_FROM}.get(name)
        for value in (None, *NEUTRAL.get(name, (False, [])), off):
            assert one.task_for({**one.base, name: value}) == plain, (name, value)
    for name, value in {"mirostat": 0, "dynatemp_range": 0.0, "typical_p": 1.0, "top_n_sigma": -1}.items():
        assert one.task_for({**one.base, name: value}) == plain
    for name in OF_PENALTIES:
        assert one.task_for({**one.base, name: 5}) == plain


def test_the_tables_are_of_what_is_not_done() -> None:
    assert not set(REFUSED).intersection(IGNORED)
    assert set(NEUTRAL) <= {*REFUSED, "n", "truncation"}
    assert set(OF_PENALTIES) <= set(REFUSED)
    known = EXTENSIONS.union(*(one.sdk for one in INTERFACES.values()))
    assert not set(REFUSED).union(IGNORED) - known - OLDER


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_object", "json_schema": {"schema": SCHEMA}},
        {"type": "json_object", "value": SCHEMA},
        {"type": "json", "value": SCHEMA},
        {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}},
    ],
)
def test_a_schema_is_applied_wherever_it_lies(form: Any) -> None:
    """OpenAI's form, llama.cpp's and TGI's."""
    structure = StructuredOutputsParams(json=SCHEMA)
    for name in ("chat", "completions"):
        task = INTERFACES[name].task_for({**INTERFACES[name].base, "response_format": form})[0]
        found = task.sampling["structured_outputs"] if name == "chat" else task[0].structured_outputs
        assert found == structure
    if form.keys() == {"type", "schema"}:
        task = INTERFACES["responses"].task_for({"input": "Hi", "text": {"format": form}})[0]
        assert task.sampling["structured_outputs"] == structure


def test_json_without_a_schema() -> None:
    chat = INTERFACES["chat"]
    for form in ({"type": "json_object"}, {"type": "json_object", "schema": {}}):
        task = chat.task_for({**chat.base, "response_format": form})[0]
        assert task.sampling["structured_outputs"] == StructuredOutputsParams(json_object=True)
    task = chat.task_for({**chat.base, "response_format": {"type": "text"}})[0]
    assert "structured_outputs" not in task.sampling


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"type": "json_object", "schema": SCHEMA, "value": SCHEMA}, "more than one schema"),
        ({"type": "json_object", "grammar": "x"}, "unknown field grammar"),
        ({"type": "structural_tag", "triggers": ["x"]}, "unknown field triggers"),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA, "schemas": 1}}, "unknown field schemas"),
        ({"type": "regex", "value": "a+"}, "response_format of type 'regex' is not supported"),
        ({"type": "json", "value": "{}"}, "response_format lacks its schema"),
        ({"type": "json"}, "response_format lacks its schema"),
        ({"type": "json_schema"}, "response_format lacks its schema"),
        ({"type": "json_object", "schema": "x"}, "response_format.schema: expected object"),
    ],
)
def test_what_a_format_says_is_done_or_refused(form: Any, words: str) -> None:
    for name in ("chat", "completions"):
        with pytest.raises(RequestError) as caught:
            INTERFACES[name].task_for({**INTERFACES[name].base, "response_format": form})
        assert caught.value.param == "response_format"
        assert words in caught.value.message
