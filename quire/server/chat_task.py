"""Conversations in neutral terms: a ChatTask in, events out of a ChatRun.

Nothing here knows the JSON of an API. Chat completions, responses, messages and Ollama's chat each convert
their requests to a ChatTask, and the events of the ChatRun to their own JSON.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from quire.errors import ContextOverflow, RequestError
from quire.frontend import Encoded, Frontend
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import SamplingParams, StructuredOutputsParams
from quire.server.logprob_json import check_size
from quire.server.request import ServerRequest
from quire.server.service import ServiceState
from quire.text.answer import AnswerParser, Event, Reasoning
from quire.text.tools.functions import Function, read_functions, warnings_of, widened


class Finish(NamedTuple):
    """The end of a sequence: "stop", "length" or "tool_calls"; and the stop string or token id, if any."""

    reason: str
    stop_reason: str | int | None


ChatEvent = Event | Finish
PREDICTED_RUN = 4


class TokenUsage(NamedTuple):
    """Token counts of a request. A prompt counts once, however many sequences continue it.

    `accepted_tokens` and `rejected_tokens` are those of a predicted answer, as `count_predicted` counts them.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    accepted_tokens: int = 0
    rejected_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class ChatTask:
    """A request for the next turn of a conversation.

    `messages` and `tools` are in the form that chat templates read. `tool_choice` is None, "auto", "none",
    "required" or {"name": ...}. `sampling` holds fields of SamplingParams by name; without max_tokens, an
    answer may fill the context. `warnings` lists parts of the request that are left out or handled
    differently; preparing the task may add to it.
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
    report_drafting: bool = False
    prediction: str = ""  # what the client expects of the answer
    warnings: list[str] = field(default_factory=list)


async def start_chat(handle: ServerRequest, task: ChatTask) -> ChatRun:
    """Render, encode and submit. Raises RequestError, Overloaded or EngineDead; then nothing runs."""
    service = handle.service
    params = SamplingParams.from_dict(task.sampling, {"max_tokens": None, **service.frontend.default_params})
    prompt, params, parsers = await service.in_thread_for(task.messages, _prepare, service, task, params)
    await handle.submit([prompt], [params])
    return ChatRun(handle, parsers, include_reasoning=task.include_reasoning)


def _prepare(
    service: ServiceState, task: ChatTask, params: SamplingParams
) -> tuple[Encoded, SamplingParams, list[AnswerParser]]:
    """Return the prompt, its parameters with a grammar, and a parser for each sequence."""
    if task.add_generation_prompt and task.continue_final_message:
        problem = "add_generation_prompt and continue_final_message contradict each other"
        raise RequestError(problem, "set one of them to false", "continue_final_message")
    frontend, output_format = service.frontend, service.output_format
    functions = read_functions(task.tools)  # before rendering, which is expensive
    prompt = encoded(frontend, task)
    text = prompt.text or ""
    content = None
    if params.structured_outputs is not None and (task.tools or output_format.reasoning):
        content = frontend.grammars.compile(params.structured_outputs)
    structured, functions = _structured(service, task, functions, text, content)
    params = params if structured is None else replace(params, structured_outputs=structured)
    task.warnings += warnings_of(functions) if task.tool_choice != "none" else ()
    if output_format.needs_special_tokens and (task.tools or output_format.reasoning):
        params = replace(params, skip_special_tokens=False)
    limit, side = task.truncate_prompt_tokens, task.truncation_side
    prompt = fitted(prompt, limit, params, frontend, side=side, what="messages")
    check_size([prompt], params, frontend.model.config.vocab_size)
    prompt = replace(
        prompt,
        priority=task.priority,
        cache_salt=task.cache_salt,
        report_drafting=task.report_drafting,
        predicted_token_ids=frontend.encode_prediction(task.prediction) if task.prediction else (),
    )
    parsers = [output_format.answer_parser(functions, task.tool_choice, text) for _ in range(params.n)]
    return prompt, params, parsers


def _structured(
    service: ServiceState, task: ChatTask, functions: tuple[Function, ...], prompt: str, content: str | None
) -> tuple[StructuredOutputsParams | None, tuple[Function, ...]]:
    """Return a grammar for the answer that compiles, if it needs one, and the functions as it enforces them.

    Raises RequestError, which names the tool whose schema cannot be enforced.
    """
    choice, parallel = task.tool_choice, task.parallel_tool_calls
    grammar = service.output_format.grammar(functions, choice, parallel, prompt, content)
    if grammar is None:
        return None, functions
    structured, check = StructuredOutputsParams(grammar=grammar), service.frontend.grammars.compile
    try:
        check(structured)
        return structured, functions
    except RequestError as error:
        if not functions:
            raise

        def check_alone(function: Function) -> None:
            check(StructuredOutputsParams(json=function.schema))  # its errors say more
            alone = service.output_format.grammar((function,), "required")
            check(StructuredOutputsParams(grammar=alone))

        wider = widened(functions, check_alone)
        if wider == functions:
            problem = error.message.removeprefix("structured_outputs.grammar: ")
            raise RequestError(
                f"tools: their grammar as a whole: {problem}", "offer fewer", "tools"
            ) from None
    return _structured(service, task, wider, prompt, content)


def encoded(frontend: Frontend, task: ChatTask) -> Encoded:
    """Return the conversation as token ids."""
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
    """Return the last `limit` tokens of a prompt; -1: as many as leave room for the answer; None: all.

    With `side` "right" the first ones are kept instead. Raises ContextOverflow when they exceed the context,
    RequestError where images would be cut or the answer leaves no room; `what` names the field that the
    caller can shorten.
    """
    num_tokens, room = len(prompt.token_ids), frontend.max_model_len
    if limit == -1 and (limit := room - (params.max_tokens or 1)) < 1:
        problem = f"max_tokens = {params.max_tokens:,} leaves no room for a prompt: the context has {room:,}"
        hint = "lower it, or give truncate_prompt_tokens the number of tokens to keep"
        raise RequestError(problem, hint, "max_tokens")
    if limit is not None and num_tokens > limit:
        if prompt.images:
            problem = f"a prompt with images cannot be cut, and this one has {num_tokens:,} tokens"
            raise RequestError(problem, "send fewer messages, or smaller images", "truncate_prompt_tokens")
        kept = slice(limit) if side == "right" else slice(num_tokens - limit, None)
        prompt = replace(prompt, token_ids=prompt.token_ids[kept], text=None)
    if len(prompt.token_ids) >= room:
        raise ContextOverflow(room, f"{len(prompt.token_ids)} tokens", what)
    return prompt


def count_tokens(outputs: Sequence[RequestOutput]) -> TokenUsage:
    """Return the token counts of prompts and their sequences so far."""
    return TokenUsage(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(output.num_cached_tokens for output in outputs),
        sum(len(choice.token_ids) for output in outputs for choice in output.outputs),
    )


def count_predicted(predicted: Sequence[int], answers: Sequence[Sequence[int]]) -> int:
    """Return how many predicted tokens appear in answers: in runs of PREDICTED_RUN, or all of fewer.

    They are no more than the tokens of the answers. Single tokens would appear in any text.
    """
    length = min(PREDICTED_RUN, len(predicted))
    runs = {run for ids in answers for run in zip(*(ids[i:] for i in range(length)), strict=False)}
    count = end = 0
    for start, run in enumerate(zip(*(predicted[i:] for i in range(length)), strict=False)):
        if run in runs:
            count += start + length - max(start, end)
            end = start + length
    return min(count, sum(map(len, answers)))


class ChatRun:
    """A running conversation. Iterate over `batches()`, which end with the Finish of each sequence.

    `output` is the result so far, as tokens and text.
    """

    def __init__(
        self, handle: ServerRequest, parsers: Sequence[AnswerParser], *, include_reasoning: bool = True
    ) -> None:
        service = handle.service
        self.handle = handle
        self.output = handle.prompts[0].output
        self.params = handle.prompts[0].request.params
        self.timings = handle.timings
        self.tokenizer = service.frontend.need_tokenizer()
        self._format = service.output_format
        self._include_reasoning = include_reasoning
        self._parsers = dict(enumerate(parsers))  # of the sequences that run
        self._thoughts: list[list[str]] = [[] for _ in parsers]
        self._num_reasoning_tokens = 0

    async def batches(self) -> AsyncIterator[list[tuple[int, ChatEvent]]]:
        """Yield the (sequence, event) pairs of each delivery. Raises like iterating over a ServerRequest."""
        async for _, output in self.handle:
            running = [output.outputs[index] for index in self._parsers]
            batch = [(sequence.index, event) for sequence in running for event in self._new_events(sequence)]
            if batch:
                yield batch

    def usage(self) -> TokenUsage:
        """Return token counts so far. Reasoning is counted when a sequence ends, a prediction at the end."""
        usage = count_tokens([self.output])._replace(reasoning_tokens=self._num_reasoning_tokens)
        predicted = self.handle.prompts[0].request.predicted_token_ids
        if not predicted or not self.output.finished:
            return usage
        accepted = count_predicted(predicted, [one.token_ids for one in self.output.outputs])
        return usage._replace(accepted_tokens=accepted, rejected_tokens=len(predicted) - accepted)

    def _new_events(self, sequence: CompletionOutput) -> list[ChatEvent]:
        parser, thoughts = self._parsers[sequence.index], self._thoughts[sequence.index]
        events: list[ChatEvent] = [*parser.push(sequence.delta)] if sequence.delta else []
        if sequence.finish_reason is not None:
            del self._parsers[sequence.index]
            events += parser.finish()
        if self._format.reasoning is not None:
            thoughts += [event.text for event in events if isinstance(event, Reasoning)]
            if not self._include_reasoning:
                events = [event for event in events if not isinstance(event, Reasoning)]
        if sequence.finish_reason is not None:
            self._num_reasoning_tokens += self._count_reasoning(sequence, "".join(thoughts))
            called = sequence.finish_reason == "stop" and parser.has_calls and not parser.is_within_call
            events.append(Finish("tool_calls" if called else sequence.finish_reason, sequence.stop_reason))
        return events

    def _count_reasoning(self, sequence: CompletionOutput, thoughts: str) -> int:
        """Return the number of reasoning tokens: up to the end mark, or as many as the text encodes to."""
        if not thoughts or self._format.reasoning is None:
            return 0
        end = self._format.token_ids.get(self._format.reasoning.end)
        if end in sequence.token_ids:
            return sequence.token_ids.index(end) + 1
        return min(len(self.tokenizer.encode(thoughts, add_special_tokens=False)), len(sequence.token_ids))
