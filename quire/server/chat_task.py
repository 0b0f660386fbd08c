"""Conversations, whatever interface they come by: a task in, events out.

Nothing here knows the JSON of an interface. Those of chat completions, responses and messages each make a
ChatTask of what they are sent and write the events of a ChatRun in their own words.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from quire.errors import ContextOverflow, RequestError
from quire.frontend import Encoded, Frontend
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import SamplingParams, StructuredOutputsParams
from quire.server.generation import Generation
from quire.server.logprob_json import check_size
from quire.server.service import ServiceState
from quire.text.answer import AnswerParser, Event, Reasoning
from quire.text.tools.functions import Function, read_functions, warnings_of, widened


class Finish(NamedTuple):
    """A choice has ended: "stop", "length" or "tool_calls". `stop_reason` is what was met, if asked for."""

    reason: str
    stop_reason: str | int | None


ChatEvent = Event | Finish


class Usage(NamedTuple):
    """Tokens of a request. A prompt counts once, all its choices count."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class ChatTask:
    """What a caller asks of a conversation.

    `messages` and `tools` are in the form that chat templates read. `tool_choice` is None, "auto", "none",
    "required" or {"name": ...}. `sampling` holds fields of SamplingParams by name; where max_tokens is not
    given, an answer has all the room that the context leaves. `warnings` says what of the request is left out
    or done otherwise; whoever prepares the task may add to it.
    """

    messages: Sequence[Mapping[str, Any]]
    sampling: dict[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    include_reasoning: bool = True
    priority: int = 0
    cache_salt: str = ""
    warnings: list[str] = field(default_factory=list)


async def start_chat(serving: ServiceState, task: ChatTask, *, request_id: str) -> ChatRun:
    """Render, encode and hand in. Raises RequestError, Overloaded or EngineDead, and nothing runs then."""
    params = SamplingParams.from_dict(task.sampling, {"max_tokens": None, **serving.frontend.default_params})
    prompt, params, parsers = await serving.in_thread(_prepare, serving, task, params)
    generation = await serving.generate([prompt], [params], request_id=request_id)
    return ChatRun(serving, task, generation, parsers)


def _prepare(
    serving: ServiceState, task: ChatTask, params: SamplingParams
) -> tuple[Encoded, SamplingParams, list[AnswerParser]]:
    """The prompt, what its continuation must be, and what takes each choice apart."""
    if task.add_generation_prompt and task.continue_final_message:
        problem = "add_generation_prompt and continue_final_message contradict each other"
        raise RequestError(problem, "set one of them to false", "continue_final_message")
    frontend, output_format = serving.frontend, serving.output_format
    functions = read_functions(task.tools)  # what is refused is not rendered first
    prompt = encoded(frontend, task)
    text = prompt.text or ""
    content = None
    if params.structured_outputs is not None and (task.tools or output_format.reasoning):
        content = frontend.grammars.compile(params.structured_outputs)
    structured, functions = _structured(serving, task, functions, text, content)
    params = params if structured is None else replace(params, structured_outputs=structured)
    task.warnings += warnings_of(functions) if task.tool_choice != "none" else ()
    if output_format.needs_special_tokens and (task.tools or output_format.reasoning):
        params = replace(params, skip_special_tokens=False)
    limit, side = task.truncate_prompt_tokens, task.truncation_side
    prompt = fitted(prompt, limit, params, frontend, side=side, what="messages")
    check_size([prompt], params, frontend.model.config.vocab_size)
    prompt = replace(prompt, priority=task.priority, cache_salt=task.cache_salt)
    parsers = [output_format.answer_parser(functions, task.tool_choice, text) for _ in range(params.n)]
    return prompt, params, parsers


def _structured(
    serving: ServiceState, task: ChatTask, functions: tuple[Function, ...], prompt: str, content: str | None
) -> tuple[StructuredOutputsParams | None, tuple[Function, ...]]:
    """A grammar for the answer that compiles, if it needs one, and the functions as far as it follows them.

    Raises RequestError, which names the tool whose schema cannot be followed.
    """
    choice, parallel = task.tool_choice, task.parallel_tool_calls
    grammar = serving.output_format.grammar(functions, choice, parallel, prompt, content)
    if grammar is None:
        return None, functions
    structured, check = StructuredOutputsParams(grammar=grammar), serving.frontend.grammars.compile
    try:
        check(structured)
        return structured, functions
    except RequestError as error:
        if not functions:
            raise

        def check_alone(function: Function) -> None:
            check(StructuredOutputsParams(json=function.schema))  # its errors say more
            alone = serving.output_format.grammar((function,), "required")
            check(StructuredOutputsParams(grammar=alone))

        wider = widened(functions, check_alone)
        if wider == functions:
            problem = error.message.removeprefix("structured_outputs.grammar: ")
            raise RequestError(
                f"tools: their grammar as a whole: {problem}", "offer fewer", "tools"
            ) from None
    return _structured(serving, task, wider, prompt, content)


def encoded(frontend: Frontend, task: ChatTask) -> Encoded:
    """The conversation as token ids."""
    return frontend.encode_chat(
        task.messages,
        task.tools if task.tool_choice != "none" else None,
        task.add_generation_prompt,
        task.chat_template_kwargs,
        task.continue_final_message,
    )


def fitted(
    prompt: Encoded,
    limit: int | None,
    params: SamplingParams,
    frontend: Frontend,
    *,
    side: str | None = None,
    what: str = "prompt",
) -> Encoded:
    """The last `limit` tokens of a prompt; -1: as many as leave room for the answer; None: all.

    With "right" as `side`, the first ones are kept in place of the last. Raises ContextOverflow when they
    exceed the context, before they are weighed against the queue. `what` is what the caller can shorten.
    """
    num_tokens, room = len(prompt.token_ids), frontend.max_model_len
    if limit == -1:
        limit = max(room - (params.max_tokens or 1), 1)
    if limit is not None and num_tokens > limit:
        kept = slice(limit) if side == "right" else slice(num_tokens - limit, None)
        prompt = replace(prompt, token_ids=prompt.token_ids[kept], text=None)
    if len(prompt.token_ids) >= room:
        raise ContextOverflow(room, f"{len(prompt.token_ids)} tokens", what)
    return prompt


def count_tokens(outputs: Sequence[RequestOutput]) -> Usage:
    """What has been read and written so far."""
    return Usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(output.num_cached_tokens for output in outputs),
        sum(len(choice.token_ids) for output in outputs for choice in output.outputs),
    )


class ChatRun:
    """A conversation that runs. Iterate over it for (choice, event), or over `batches()`.

    The last event of a choice is its Finish. `output` is what came of it so far, as tokens and text.
    """

    def __init__(
        self, serving: ServiceState, task: ChatTask, generation: Generation, parsers: Sequence[AnswerParser]
    ) -> None:
        self.generation = generation
        self.output = generation.readers[0].output
        self.tokenizer = serving.frontend.need_tokenizer()
        self._output_format = serving.output_format
        self._with_reasoning = task.include_reasoning
        self._parsers = dict(enumerate(parsers))  # of the choices that run
        self._thoughts: list[list[str]] = [[] for _ in parsers]
        self._num_reasoning_tokens = 0

    async def __aiter__(self) -> AsyncIterator[tuple[int, ChatEvent]]:
        async for batch in self.batches():
            for item in batch:
                yield item

    async def batches(self) -> AsyncIterator[list[tuple[int, ChatEvent]]]:
        """Events that are there together, choice by choice. Raises what following a Generation does."""
        async for _, output in self.generation:
            running = [output.outputs[index] for index in self._parsers]
            batch = [(choice.index, event) for choice in running for event in self._news(choice)]
            if batch:
                yield batch

    def abort(self) -> None:
        """End what still runs."""
        self.generation.abort()

    def usage(self) -> Usage:
        """Tokens so far. Those of reasoning are counted when a choice ends."""
        return count_tokens([self.output])._replace(reasoning_tokens=self._num_reasoning_tokens)

    def _news(self, choice: CompletionOutput) -> list[ChatEvent]:
        """The events of one choice since the last call."""
        parser, thoughts = self._parsers[choice.index], self._thoughts[choice.index]
        events: list[ChatEvent] = [*parser.push(choice.delta)] if choice.delta else []
        if choice.finish_reason is not None:
            del self._parsers[choice.index]
            events += parser.finish()
        if self._output_format.reasoning is not None:
            thoughts += [event.text for event in events if isinstance(event, Reasoning)]
            if not self._with_reasoning:
                events = [event for event in events if not isinstance(event, Reasoning)]
        if choice.finish_reason is not None:
            self._num_reasoning_tokens += self._count(choice, "".join(thoughts))
            called = parser.has_calls and choice.finish_reason == "stop"
            events.append(Finish("tool_calls" if called else choice.finish_reason, choice.stop_reason))
        return events

    def _count(self, choice: CompletionOutput, thoughts: str) -> int:
        """How many tokens were reasoning: those up to the mark that ends it, or what its text takes."""
        if not thoughts or self._output_format.reasoning is None:
            return 0
        end = self._output_format.token_ids.get(self._output_format.reasoning.end)
        if end in choice.token_ids:
            return choice.token_ids.index(end) + 1
        return min(len(self.tokenizer.encode(thoughts, add_special_tokens=False)), len(choice.token_ids))
