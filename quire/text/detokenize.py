"""Incremental detokenization: token ids in, text out, never half a character.

The text of a generation is defined by the full decode of prompt and output together: what it has more than
the decode of the prompt alone, except that a character begun by the prompt's last bytes belongs to the
output that completes it. A first output token of a sentencepiece vocabulary keeps its leading space
when the prompt had any visible text, and loses it, as at the start of any text, when it had none.

`characters` regroups tokens so that every group ends on a character's border; a decoder of the library
is then asked for each group behind the group before it, so that the work is linear in the tokens. (The
library's own DecodeStream raises, or loses characters, on invalid bytes.) Where the decoder does nothing but
put bytes together, as in most vocabularies of today, the bytes are decoded here, many times faster.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from quire.text.characters import bytes_of_spelling
from quire.text.tokenizer import Tokenizer

# A character has at most four bytes: so many visible tokens of the prompt show where its last one began.
_TAIL = 8


class Detokenizer:
    """Turns the output tokens of one sequence into text. The pieces concatenate to the full decode."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._characters = tokenizer.characters()
        self._before: list[str] = []  # the group before the next one, and its text
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
        """The text that these tokens complete, perhaps none."""
        if self._stream is not None:
            decode = self._stream.decode
            spelled = self._tokenizer.byte_strings(token_ids, self._skip_special_tokens)
            return "".join([decode(token) for token in spelled])
        pieces = []
        for token in self._tokenizer.token_strings(token_ids, self._skip_special_tokens):
            pieces.append(self._release(self._characters.push(token)))
        return "".join(pieces)

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed."""
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
        """The last visible tokens of the prompt."""
        tail: list[str] = []
        for token_id in reversed(prompt_ids):
            tail = self._tokenizer.token_strings((token_id,), self._skip_special_tokens) + tail
            if len(tail) == _TAIL:
                break
        return tail
