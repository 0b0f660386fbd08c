"""Events of the stream of /v1/responses. Each is sent under the name that is its `type`."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from quire.server.openai.items import OutputItem, OutputText, ReasoningText, ResponseObject


class _Event(Struct):
    sequence_number: int


class _StateEvent(_Event):
    response: ResponseObject


class ResponseCreated(_StateEvent, tag="response.created"):
    """The first event."""


class ResponseInProgress(_StateEvent, tag="response.in_progress"):
    """The second event."""


class ResponseCompleted(_StateEvent, tag="response.completed"):
    """The last event, with the whole response."""


class ResponseIncomplete(_StateEvent, tag="response.incomplete"):
    """The last event if the token limit ended the response."""


class ResponseFailed(_StateEvent, tag="response.failed"):
    """The last event if an error ended the response."""


class _ItemEvent(_Event):
    output_index: int
    item: OutputItem


class OutputItemAdded(_ItemEvent, tag="response.output_item.added"):
    """A message, reasoning or a call starts."""


class OutputItemDone(_ItemEvent, tag="response.output_item.done"):
    """An item has ended."""


class _DeltaEvent(_Event):
    item_id: str
    output_index: int


class _TextEvent(_DeltaEvent):
    content_index: int


class _PartEvent(_TextEvent):
    part: OutputText | ReasoningText


class ContentPartAdded(_PartEvent, tag="response.content_part.added"):
    """The text of an item starts."""


class ContentPartDone(_PartEvent, tag="response.content_part.done"):
    """The text of an item has ended."""


class OutputTextDelta(_TextEvent, tag="response.output_text.delta"):
    """More text of a message."""

    delta: str
    logprobs: list[Any]


class OutputTextDone(_TextEvent, tag="response.output_text.done"):
    """The whole text of a message."""

    text: str
    logprobs: list[Any]


class ReasoningTextDelta(_TextEvent, tag="response.reasoning_text.delta"):
    """More of the model's reasoning."""

    delta: str


class ReasoningTextDone(_TextEvent, tag="response.reasoning_text.done"):
    """The whole reasoning."""

    text: str


class FunctionArgumentsDelta(_DeltaEvent, tag="response.function_call_arguments.delta"):
    """More of a function's arguments, as JSON text."""

    delta: str


class FunctionArgumentsDone(_DeltaEvent, tag="response.function_call_arguments.done"):
    """The whole arguments of a function."""

    name: str
    arguments: str


class CustomInputDelta(_DeltaEvent, tag="response.custom_tool_call_input.delta"):
    """More of a custom tool's input."""

    delta: str


class CustomInputDone(_DeltaEvent, tag="response.custom_tool_call_input.done"):
    """The whole input of a custom tool."""

    input: str


StateEvent = ResponseCreated | ResponseInProgress | ResponseCompleted | ResponseIncomplete | ResponseFailed
TextEvent = ContentPartAdded | ContentPartDone | OutputTextDelta | OutputTextDone
ReasoningEvent = ReasoningTextDelta | ReasoningTextDone
CallEvent = FunctionArgumentsDelta | FunctionArgumentsDone | CustomInputDelta | CustomInputDone
ResponseEvent = StateEvent | OutputItemAdded | OutputItemDone | TextEvent | ReasoningEvent | CallEvent
