"""RequestReader: the outputs of one request become text."""

from __future__ import annotations

from quire.outputs import CompletionOutput, Logprob, Logprobs, RequestOutput
from quire.text.detokenize import Detokenizer
from quire.text.stop import StopStrings
from quire.text.tokenizer import Tokenizer
from quire.types import NewRequest, Output, PositionLogprobs


class RequestReader:
    """Accumulate the engine outputs of one request in a RequestOutput."""

    def __init__(self, request: NewRequest, prompt: str | None, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self._tokenizer = tokenizer
        self._sequences = [_SequenceReader(request, i, tokenizer) for i in range(request.params.n)]
        self._repeated = self._sequences[1:] if request.params.num_sequences < request.params.n else ()
        self.output = RequestOutput(
            request.request_id, prompt, list(request.prompt_token_ids), [c.output for c in self._sequences]
        )
        if request.params.prompt_logprobs is not None and len(request.prompt_token_ids) == 1:
            self.output.prompt_logprobs = [None]  # nothing precedes the first token

    def push(self, output: Output) -> bool:
        """Add an output. Return True if its text reached a stop string: abort the sequence then."""
        if output.prompt_logprobs and self.output.prompt_logprobs is None:
            named = (_named(position, self._tokenizer) for position in output.prompt_logprobs)
            self.output.prompt_logprobs = [None, *named]
        if output.num_cached_tokens > self.output.num_cached_tokens:
            self.output.num_cached_tokens = output.num_cached_tokens
        if output.vector:
            self.output.vector = output.vector
        stopped = self._sequences[output.sequence].push(output)
        for same in self._repeated:
            same.push(output)
        if output.metrics is not None:
            self.output.metrics = output.metrics
        if output.finish_reason is not None:
            self.output.finished = all(c.output.finish_reason for c in self._sequences)
        return stopped

    def take_deltas(self) -> None:
        """Set the delta of every sequence to the text added since the last call.

        Another thread may add more meanwhile.
        """
        for sequence in self._sequences:
            text = sequence.output.text
            sequence.output.delta, sequence.taken = text[sequence.taken :], len(text)


class _SequenceReader:
    """Turn the tokens of one sequence into text, up to a stop string. The engine's final output ends it."""

    def __init__(self, request: NewRequest, index: int, tokenizer: Tokenizer | None) -> None:
        self.params = request.params
        self.output = CompletionOutput(index)
        self.taken = 0  # characters already returned in deltas
        self._tokenizer = tokenizer
        self._text: Detokenizer | None = None
        if tokenizer is not None and self.params.detokenize:
            skip = self.params.skip_special_tokens
            self._text = Detokenizer(tokenizer, request.prompt_token_ids, skip)
        self._stops = StopStrings(self.params.stop, self.params.include_stop_str_in_output)
        if self.params.logprobs is not None:
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0

    def push(self, output: Output) -> bool:
        """Add an output, token by token if a stop string may truncate tokens along with the text."""
        if output.metrics is not None:
            self.output.metrics = output.metrics
        if output.drafting is not None:
            self.output.drafting.append((output.token_ids, output.drafting))
        if output.finish_reason is None and not self.params.stop and not output.logprobs:
            self.output.token_ids += output.token_ids
            if self._text is not None:
                self.output.text += self._text.push(output.token_ids)
            return False
        hidden = output.finish_reason == "stop" and not self.params.include_stop_str_in_output
        for number, token_id in enumerate(output.token_ids):
            if self._stops.matched is not None:
                break
            self.output.token_ids.append(token_id)
            if output.logprobs:
                self._take_logprobs(output.logprobs[number])
            if not (hidden and number == len(output.token_ids) - 1):
                self._show(self._text.push((token_id,)) if self._text else "")
        if output.finish_reason is not None:
            self._finish(output)
            return False
        return self._stops.matched is not None

    def _show(self, text: str) -> None:
        early = len(self.output.token_ids) <= self.params.min_tokens
        shown, _ = self._stops.push(text, ignore=early)
        self.output.text += shown

    def _finish(self, output: Output) -> None:
        if self._text is not None:
            self._show(self._text.finish())
        stop = self._stops.matched
        if stop is None:
            self.output.text += self._stops.flush()
        self.output.finish_reason = output.finish_reason if stop is None else "stop"
        self.output.stop_reason = output.stop_reason if stop is None else stop
        self.output.error = output.error and output.error.message

    def _take_logprobs(self, position: PositionLogprobs) -> None:
        if self.output.logprobs is not None and self.output.cumulative_logprob is not None:
            self.output.logprobs.append(_named(position, self._tokenizer))
            self.output.cumulative_logprob += position[0].logprob


def _named(position: PositionLogprobs, tokenizer: Tokenizer | None) -> Logprobs:
    """Return Logprob by token id, the sampled token first."""
    text = tokenizer.token_text if tokenizer else lambda token_id: None
    return {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id)) for entry in position}
