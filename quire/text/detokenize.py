"""Incremental detokenization: token ids in, text out, never half a character.

The text of an output is defined by the full decode of prompt and output together, less the decode of the
prompt alone, except that a character begun by the prompt's last bytes belongs to the output that completes
it. The first output token of a sentencepiece vocabulary keeps its leading space if the prompt has visible
text, and loses it, as at the start of any text, if it has none.

`characters` regroups tokens so that every group ends on a character boundary; the library's decoder then
decodes each group together with the previous one, so that the work is linear in the tokens. (The library's
own DecodeStream raises, or loses characters, on invalid bytes.) Where the decoder merely concatenates bytes,
as in most vocabularies of today, the bytes are decoded here, many times faster.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from quire.text.characters import bytes_of_spelling
from quire.text.tokenizer import Tokenizer

# Visible tokens of the prompt that suffice to find where its last character, of four bytes at most, began.
_TAIL = 8


class Detokenizer:
    """Incremental decoder of one sequence's output. The pieces concatenate to the full decode."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._characters = tokenizer.characters()
        self._before: list[str] = []  # the last group, and its text
        self._before_text = ""
        self._stream = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.is_byte_stream else None
        tail = self._tail(prompt_ids)
        if self._stream is not None:
            for token in tail:
                self._stream.decode(bytes_of_spelling(token))
        else:
            for token in tail:
                self._release(self._characters.push(token))

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; return the text that they complete, perhaps none."""
        if self._stream is not None:
            decode = self._stream.decode
            spelled = self._tokenizer.byte_strings(token_ids, self._skip_special_tokens)
            return "".join([decode(token) for token in spelled])
        pieces = []
        for token in self._tokenizer.token_strings(token_ids, self._skip_special_tokens):
            pieces.append(self._release(self._characters.push(token)))
        return "".join(pieces)

    def finish(self) -> str:
        """Return the rest of the text: U+FFFD for a character that was never completed."""
        if self._stream is not None:
            return self._stream.decode(b"", final=True)
        return self._release(self._characters.finish())

    def _release(self, group: list[str]) -> str:
        if not group:
            return ""
        join = self._tokenizer.join
        text = join(self._before + group)[len(self._before_text) :]
        self._before, self._before_text = group, join(group)
        return text

    def _tail(self, prompt_ids: Sequence[int]) -> list[str]:
        """Return the last visible tokens of the prompt."""
        tail: list[str] = []
        for token_id in reversed(prompt_ids):
            tail = self._tokenizer.token_strings((token_id,), self._skip_special_tokens) + tail
            if len(tail) == _TAIL:
                break
        return tail
