"""Log-probabilities in the shapes of both endpoints, serialized to JSON position by position.

The JSON of a token in the chat's shape is cached: with top_logprobs a stream names some twenty tokens for
each that it generates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from msgspec.json import Encoder

from quire.errors import RequestError
from quire.frontend import Encoded
from quire.outputs import CompletionOutput, Logprob, Logprobs
from quire.sampling_params import SamplingParams
from quire.text.detokenize import Detokenizer
from quire.text.tokenizer import Tokenizer

LOWEST = -9999.0  # in place of minus infinity, which JSON does not have
MAX_NAMED = 1 << 16  # tokens of a tokenizer whose JSON is kept
MAX_PROMPT_ENTRIES = 1 << 18  # serialized at once with the first token, which delays other streams

Position = tuple[bytes, ...]  # JSON of one token, for each part of its shape

_encode = Encoder().encode
# Tokens in the chat's shape, up to their log-probabilities, by id and whether they are named by it. They go
# with their tokenizer: where several models are served, each load of one makes another.
_NAMED: WeakKeyDictionary[Tokenizer, dict[tuple[int, bool], bytes]] = WeakKeyDictionary()


class Shape(Protocol):
    """One of the two shapes, for one sequence. Calls of `positions` take consecutive tokens."""

    def positions(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs]) -> list[Position]:
        """Return the JSON of new tokens."""

    def join(self, positions: Iterable[Position]) -> bytes:
        """Return the value of `logprobs` for consecutive positions."""


class ChatLogprobs:
    """{"content": [{token, bytes, logprob, top_logprobs}]}: the k most likely, and the bytes of each."""

    def __init__(self, tokenizer: Tokenizer, k: int, as_ids: bool) -> None:
        self._tokenizer, self._k, self._as_ids = tokenizer, k, as_ids
        self._known = _NAMED.setdefault(tokenizer, {})

    def positions(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs]) -> list[Position]:
        return [(self._entry(one, p),) for one, p in zip(token_ids, logprobs, strict=True)]

    def join(self, positions: Iterable[Position]) -> bytes:
        return b'{"content":[%s],"refusal":null}' % b",".join(entry for (entry,) in positions)

    def _entry(self, token_id: int, position: Logprobs) -> bytes:
        top = b",".join(b"%s}" % self._named(one, entry) for one, entry in likeliest(position, self._k))
        return b'%s,"top_logprobs":[%s]}' % (self._named(token_id, position[token_id]), top)

    def _named(self, token_id: int, entry: Logprob) -> bytes:
        if (named := self._known.get((token_id, self._as_ids))) is None:
            named = _chat_token(self._tokenizer, token_id, self._as_ids)
            if len(self._known) >= MAX_NAMED:
                self._known.clear()
            self._known[token_id, self._as_ids] = named
        return b"%s%r" % (named, finite(entry))


class CompletionLogprobs:
    """{tokens, token_logprobs, top_logprobs, text_offset}, with the sampled token in every dictionary.

    Offsets count characters of the answer's text, `offset` of which come before the first token. `before`
    holds the token ids before it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        k: int,
        as_ids: bool,
        before: Sequence[int] = (),
        offset: int = 0,
    ) -> None:
        self._tokenizer, self._k, self._as_ids = tokenizer, k, as_ids
        self._text = Detokenizer(tokenizer, before, params.skip_special_tokens)
        self._offset = offset

    def positions(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs | None]) -> list[Position]:
        return [self._entry(one, p) for one, p in zip(token_ids, logprobs, strict=True)]

    def join(self, positions: Iterable[Position]) -> bytes:
        names = (b"tokens", b"token_logprobs", b"top_logprobs", b"text_offset")
        columns = [*zip(*positions, strict=True)] or [()] * len(names)
        named = zip(names, columns, strict=True)
        return b"{%s}" % b",".join(b'"%s":[%s]' % (name, b",".join(column)) for name, column in named)

    def _entry(self, token_id: int, position: Logprobs | None) -> Position:
        offset = self._offset
        self._offset += len(self._text.push((token_id,)))
        name, logprob, top = self._name(token_id), b"null", b"null"
        if position is not None:
            chosen = finite(position[token_id])
            named = {name: chosen}
            for other, entry in likeliest(position, self._k):
                if other != token_id:  # two tokens may have equal text: parts of characters are U+FFFD
                    text = self._name(other)
                    named[text if text not in named else f"token_id:{other}"] = finite(entry)
            logprob, top = b"%r" % chosen, _encode(named)
        return _encode(name), logprob, top, b"%d" % offset

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text(token_id)


class LogprobCursor:
    """Cursor over the tokens of one sequence that are not serialized yet."""

    def __init__(self, output: CompletionOutput, shape: Shape | None) -> None:
        self.output = output
        self.shape = shape
        self.num_tokens = 0
        self.kept: list[Position] = []

    def advance(self, with_end: bool = True) -> tuple[list[int], list[Position]]:
        """Return new token ids and, if there is a shape, their positions.

        Not `with_end`, the token that ended the answer, and has no text, is left for the next call.
        """
        output, begin = self.output, self.num_tokens
        held = not with_end and output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
        self.num_tokens = max(begin, len(output.token_ids) - held)
        new = slice(begin, self.num_tokens)
        if self.shape is None or output.logprobs is None:
            return output.token_ids[new], []
        return output.token_ids[new], self.shape.positions(output.token_ids[new], output.logprobs[new])


def num_new(cursors: Iterable[LogprobCursor]) -> int:
    """Return the number of log-probabilities of new tokens."""
    return sum(
        len(p)
        for cursor in cursors
        if cursor.shape
        for p in (cursor.output.logprobs or ())[cursor.num_tokens :]
    )


def keep(cursors: Iterable[LogprobCursor]) -> None:
    """Serialize new tokens, for a response that is sent as a whole."""
    for cursor in cursors:
        cursor.kept += cursor.advance()[1]


def likeliest(position: Logprobs, k: int) -> list[tuple[int, Logprob]]:
    """Return the k most likely tokens of a position, in order."""
    top = [item for item in position.items() if item[1].rank <= k]
    top.sort(key=lambda item: item[1].rank)
    return top


def finite(entry: Logprob) -> float:
    """Return a log-probability that JSON can represent."""
    return max(entry.logprob, LOWEST)


def prompt_logprobs(positions: Iterable[Logprobs | None], k: int) -> list[dict[str, Any] | None]:
    """Return vLLM's shape for prompts: entries by token id, the prompt's own first; k = -1: all."""
    return [None if p is None else _by_id(p, k) for p in positions]


def check_size(prompts: Iterable[Encoded], params: SamplingParams, vocab_size: int) -> None:
    """Raise RequestError when prompts have too many log-probabilities to be serialized at once."""
    k = params.prompt_logprobs
    if k is None:
        return
    count = sum(len(prompt.token_ids) for prompt in prompts) * (vocab_size if k == -1 else k + 1)
    if count > MAX_PROMPT_ENTRIES:
        problem = f"{count:,} log-probabilities of prompts are more than {MAX_PROMPT_ENTRIES:,}"
        raise RequestError(problem, "ask for fewer, or send the prompts one by one", "prompt_logprobs")


def _by_id(position: Logprobs, k: int) -> dict[str, Any]:
    chosen = next(iter(position))
    return {
        str(one): {"logprob": finite(entry), "rank": entry.rank, "decoded_token": entry.decoded_token}
        for one, entry in position.items()
        if one == chosen or k == -1 or entry.rank <= k
    }


def _chat_token(tokenizer: Tokenizer, token_id: int, as_id: bool) -> bytes:
    """Return a token in the chat's shape up to its log-probability."""
    text = f"token_id:{token_id}" if as_id else tokenizer.token_text(token_id)
    token_bytes = list(tokenizer.token_bytes(token_id))
    return b'{"token":%s,"bytes":%s,"logprob":' % (_encode(text), _encode(token_bytes))
