"""Tokenization of text and back, for checkpoints with a tokenizer.json."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from quire.errors import ConfigError, RequestError, quoted, shortened
from quire.json_file import half_characters
from quire.text.characters import (
    ByteFallbackTokens,
    ByteLevelTokens,
    TextTokens,
    WholeCharacters,
    byte_of_token,
    bytes_of_spelling,
    regroup,
)
from quire.text.chat_template import ChatTemplate, PromptText
from quire.text.vocabulary import Vocabulary, is_of_library, load_vocabulary
from quire.weights.source import ModelSource, TokenizerData

LONG_TEXT = 1 << 14  # characters; encoding them takes some milliseconds
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A vocabulary with its special tokens. Stateless once built: any number of threads may share it.

    `special_tokens` maps the names of tokenizer_config.json (`bos_token`, `eos_token`, ...) to their text.
    `special_ids` are the tokens that `skip_special_tokens` hides. `control_ids` are all tokens that text is
    never encoded to, and `control_tokens` maps these to their names.
    """

    def __init__(self, vocabulary: Vocabulary, config: dict[str, Any] | None = None) -> None:
        self._library = vocabulary.library
        self._added = vocabulary.added
        self._decoder = vocabulary.library.decoder
        self._kind = _kind(vocabulary.decoder_types)
        self._strings: dict[int, str | None] = {}
        others = vocabulary.decoder_types - {"Sequence"}
        self.is_byte_stream = others == {"ByteLevel"}  # the decoder merely concatenates bytes
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}
        config = config or {}
        self.special_tokens = _special_tokens(config)
        self.special_ids = frozenset(t.token_id for t in self._added.values() if t.special)
        named = ((t.token_id, t.content) for t in self._added.values() if t.alias is not None)
        self.control_tokens = dict(sorted(named))
        self.control_ids = frozenset(self.control_tokens)
        self._ids = {token.content: token.token_id for token in self._added.values()}
        self._aliases = {t.content: t.alias for t in self._added.values() if t.alias is not None}
        self._control = _pattern(vocabulary)
        self._add_bos: bool | None = config.get("add_bos_token")
        if not isinstance(self._add_bos, bool | None):
            raise ConfigError(
                f"tokenizer_config.json: add_bos_token = {quoted(self._add_bos)} is neither true nor false"
            )
        self.chat_template: ChatTemplate | None = None  # set by the owner of the model's source

    @classmethod
    def from_data(cls, data: TokenizerData) -> Tokenizer:
        """Make a tokenizer of the files of a model's source. Raises ConfigError."""
        return cls(load_vocabulary(data.content, data.where, data.settings), dict(data.settings))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added ones. A model's embedding may have more rows."""
        return self._library.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        return self.token_id(self.special_tokens.get("bos_token"))

    @property
    def eos_token_id(self) -> int | None:
        return self.token_id(self.special_tokens.get("eos_token"))

    def token_id(self, token: str | None) -> int | None:
        """Return the id of a token, control tokens included, by its exact name; None if there is none."""
        if token is None:
            return None
        return self._ids[token] if token in self._ids else self._library.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Encode a text. The names of control tokens in it are text, unless `parse_special`.

        `add_special_tokens` adds the tokens that the tokenizer puts around every text (such as the
        beginning-of-text token). Raises RequestError for text that is not valid Unicode.
        """
        ids = self._encode(self._write_aliases(text) if parse_special else text, add_special_tokens)
        return self._with_bos(ids) if add_special_tokens else ids

    def _with_bos(self, ids: list[int]) -> list[int]:
        """Return ids with or without the token of the beginning, where tokenizer_config.json states that.

        It overrides the post-processor of tokenizer.json.
        """
        bos = self.bos_token_id
        if bos is None or self._add_bos is None or self._add_bos == (ids[:1] == [bos]):
            return ids
        return [bos, *ids] if self._add_bos else ids[1:]

    def encode_whole(self, text: str, other: str | None = None, limit: int | None = None) -> list[int]:
        """Encode a text, or two as a pair, with the tokens that the tokenizer puts around and between them.

        More than `limit` tokens are cut from the ends of the texts, of the longer one first.
        """
        encoding = self._encoding(text if other is None else (text, other), True)
        ids = encoding.ids if other is not None else self._with_bos(encoding.ids)
        if limit is None or len(ids) <= limit:
            return list(ids)
        of = encoding.sequence_ids  # None for a token that is of neither text
        num_first, num_second = of.count(0), of.count(1)
        room = max(0, limit - (len(ids) - num_first - num_second))
        shorter = min(num_first, num_second, room // 2)
        kept_first = min(num_first, shorter if num_first <= num_second else room - shorter)
        left = {0: kept_first, 1: room - kept_first}
        kept = []
        for token_id, sequence in zip(encoding.ids, of, strict=True):
            if sequence is None or left[sequence] > 0:
                kept.append(token_id)
            if sequence is not None:
                left[sequence] -= 1
        return kept if other is not None else self._with_bos(kept)

    def control_token_in(self, text: str) -> str | None:
        """Return the first name of a control token in a text, or None."""
        found = self._control.search(text) if self._control else None
        return found.group() if found else None

    def encode_segments(self, segments: Iterable[tuple[str, bool]]) -> list[int]:
        """Encode a rendered conversation: (text, trusted) pairs, as `ChatTemplate.render` returns them.

        Only trusted text becomes control tokens, and only if it holds the whole token. The text is encoded
        in one piece: boundaries between segments do not affect the tokens.
        """
        joined: list[tuple[str, bool]] = []
        for text, trusted in segments:
            if joined and joined[-1][1] == trusted:
                text = joined.pop()[0] + text
            joined.append((text, trusted))
        whole = "".join(self._write_aliases(text) if trusted else text for text, trusted in joined)
        return self._encode(whole, add_special_tokens=False)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **chat_template_kwargs: Any,
    ) -> list[int] | PromptText:
        """Render a conversation as token ids or, without `tokenize`, as text for LLM.generate.

        Named as in transformers. Raises RequestError if the model has no chat template.
        """
        if self.chat_template is None:
            raise RequestError("this tokenizer has no chat template", None, "messages")
        rendered = self.chat_template.render(conversation, tools, add_generation_prompt, chat_template_kwargs)
        return self.encode_segments(rendered.segments) if tokenize else PromptText(rendered.segments)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Encode a text as {"input_ids": ...}, like a tokenizer of transformers."""
        return {"input_ids": self.encode(text, add_special_tokens)}

    def __len__(self) -> int:
        return self.vocab_size

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode token ids. Ids outside the vocabulary (padding rows of a model) are skipped."""
        tokens = self.token_strings(ids, skip_special_tokens)
        return self.join(regroup(self.characters(), tokens) if self._kind is ByteFallbackTokens else tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds in the middle of a text, perhaps part of a character."""
        token = self._string(token_id)
        if token is None:
            return b""
        if self._kind is ByteLevelTokens:
            return bytes_of_spelling(token)
        byte = byte_of_token(token) if self._kind is ByteFallbackTokens else None
        if byte is not None:
            return bytes((byte,))
        return self.join(["a", token])[1:].encode()  # after another token, which keeps leading spaces

    def byte_strings(self, ids: Iterable[int], skip_special_tokens: bool = True) -> list[bytes]:
        """Return the bytes of each token that `token_strings` would return, for a byte stream."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        known = self._bytes
        return [known[i] if i in known else self._spelled(i) for i in ids if i not in hidden]

    def _spelled(self, token_id: int) -> bytes:
        token = self._string(token_id)
        if token is None:
            return b""
        self._bytes[token_id] = spelled = bytes_of_spelling(token)
        return spelled

    def token_text(self, token_id: int) -> str:
        """Return a token as readable text, with U+FFFD for parts of characters."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.token_bytes(token_id).decode(errors="replace")
        return text

    def token_strings(self, ids: Iterable[int], skip_special_tokens: bool = True) -> list[str]:
        """Return the vocabulary's spelling of each token, without unknown and, if asked, special ones."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        strings = (self._string(i) for i in ids if i not in hidden)
        return [token for token in strings if token is not None]

    def join(self, tokens: list[str]) -> str:
        """Join token strings into text by the rules of this tokenizer's decoder."""
        if self._decoder is None:
            return " ".join(tokens)
        text: str = self._decoder.decode(tokens)
        return text

    def characters(self) -> WholeCharacters:
        """Make a regrouping of this vocabulary's tokens into whole characters, for one stream."""
        return self._kind()

    def _string(self, token_id: int) -> str | None:
        try:
            return self._strings[token_id]
        except KeyError:
            pass
        if token_id in self._added:
            token: str | None = self._added[token_id].content
        elif 0 <= token_id < 1 << 32:
            token = self._library.id_to_token(token_id)
        else:
            token = None
        if token is not None:
            self._strings[token_id] = token
        return token

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._encoding(text, add_special_tokens).ids)

    def _encoding(self, text: str | tuple[str, str], add_special_tokens: bool) -> tokenizers.Encoding:
        try:
            if isinstance(text, tuple) or len(text) > LONG_TEXT:  # encoding a batch releases the GIL
                return self._library.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
            return self._library.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError):  # raised by the library for a lone surrogate
            raise RequestError("the text contains a lone surrogate, which is not a character") from None
        except BaseException as error:  # such as a character without a token, or a panic
            if not is_of_library(error):
                raise
            problem = f"the tokenizer cannot encode the text: {shortened(str(error), 200)}"
            raise RequestError(problem, None, "prompt") from None

    def _write_aliases(self, text: str) -> str:
        return self._control.sub(lambda match: self._aliases[match[0]], text) if self._control else text


def find_tokenizer(source: ModelSource) -> Tokenizer | None:
    """Return the tokenizer of a model, or None if it has none (it then takes and returns token ids)."""
    data = source.tokenizer()
    return None if data is None else Tokenizer.from_data(data)


def need_tokenizer(source: ModelSource) -> Tokenizer:
    """Return the tokenizer of a model. Raises ConfigError if it has none."""
    if (found := find_tokenizer(source)) is None:
        hint = "copy it from the model's page, or give the folder of a checkpoint that has one"
        raise ConfigError(f"{source.where} has no tokenizer.json", hint)
    return found


_Kind = type[TextTokens] | type[ByteLevelTokens] | type[ByteFallbackTokens]


def _kind(decoder_types: frozenset[str]) -> _Kind:
    if "ByteLevel" in decoder_types:
        return ByteLevelTokens
    return ByteFallbackTokens if "ByteFallback" in decoder_types else TextTokens


def _pattern(vocabulary: Vocabulary) -> re.Pattern[str] | None:
    """Make a pattern for control tokens in trusted text: leftmost, then longest, as in the library."""
    tokens = sorted((t for t in vocabulary.added.values() if t.alias), key=lambda t: -len(t.content))
    names = [(re.escape(token.content), token.single_word) for token in tokens]
    parts = [rf"(?<!\w){name}(?!\w)" if single_word else name for name, single_word in names]
    return re.compile("|".join(parts)) if parts else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the named special tokens, each given as its text or as {"content": text}."""
    texts = {}
    for name in _SPECIAL_NAMES:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if text is None:
            continue
        if not isinstance(text, str) or half_characters(text):
            raise ConfigError(f"tokenizer_config.json: {name} = {quoted(text)} is not a text")
        texts[name] = text
    return texts
