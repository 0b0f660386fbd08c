"""One prompt of an HTTP request in the engine."""

from __future__ import annotations

from quire.engine.client import Stream
from quire.errors import EngineDead, RequestError
from quire.frontend import Encoded
from quire.request_reader import RequestReader
from quire.server.engine_metrics import EngineMetrics
from quire.server.errors import GenerationFailed
from quire.server.timings import Deliveries
from quire.text.tokenizer import Tokenizer
from quire.types import Failure, NewRequest, Output


class PromptRun(RequestReader):
    """One prompt of a request in the engine: its stream, its text so far, and its deliveries."""

    def __init__(self, request: NewRequest, prompt: Encoded, tokenizer: Tokenizer | None, stream: Stream):
        super().__init__(request, prompt.text, tokenizer)
        self.stream = stream
        self.is_queued = True  # no output has come
        self.deliveries = Deliveries()

    @property
    def finished(self) -> bool:
        return self.output.finished

    def end(self) -> None:
        """End its only sequence here, as at its limit; what the engine still sends of it is dropped."""
        self.output.outputs[0].finish_reason, self.output.finished = "length", True
        self.stream.abort()

    def take(self, outputs: list[Output], now: float, metrics: EngineMetrics) -> None:
        """Read outputs of the engine.

        Raises GenerationFailed for a sequence that failed, RequestError where its parameters caused that.
        """
        num_tokens = sum(len(output.token_ids) for output in outputs)
        gap_s = self.deliveries.add(now)
        if gap_s is None:
            metrics.first_tokens(self.request, num_tokens, outputs[0].num_cached_tokens)
        else:
            metrics.next_tokens(num_tokens, gap_s)
        for output in outputs:
            if self.push(output):
                self.stream.abort(output.sequence)
            if output.finish_reason is not None:
                reason = self.output.outputs[output.sequence].finish_reason
                if reason == "error":
                    failure = output.error or Failure("the request failed")
                    kind = RequestError if failure.by_request else GenerationFailed
                    raise kind(failure.message)
                if reason == "abort":
                    raise EngineDead("the request was ended")
        self.take_deltas()
