"""Loading of tokenizer.json such that text cannot become a control token.

The `tokenizers` library looks for added tokens (`<s>`, `<|im_end|>`, `<tool_call>`) in any text that it
encodes. Here each of them is renamed to a secret alias, random in every process, before the library reads the
file: encoding a text then never yields a control token, and code that may write one (for the chat template)
writes its alias. One tokenizer serves both, in one pass over the text, so that the tokens at boundaries are
those of the unmodified library.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import tokenizers

from quire.errors import ConfigError, quoted, shortened
from quire.json_file import check_size, parse_object

MAX_VALUES = 1 << 22  # the largest published vocabularies have two million entries, merges included
MAX_IDS = 1 << 24
MAX_ADDED = 80_000  # models with tokens for audio have some 66,000
MAX_NAME = 1024  # characters of an added token

# What entries of added_tokens need, where tokenizer_config.json leaves it out
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_PLAIN_TOKEN = dict.fromkeys(_FLAGS, False)
_LOG = logging.getLogger(__name__)
_STDERR = threading.Lock()

# Normalizers that do not change an alias (lower-case hexadecimal) in any context.
_HARMLESS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Sequence"}


@dataclass(frozen=True, slots=True)
class AddedToken:
    """An entry of `added_tokens`: matched as a whole, before the text is split."""

    token_id: int
    content: str
    special: bool
    single_word: bool
    alias: str | None  # None for ordinary text, such as a run of spaces, which is matched in any text


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The library's tokenizer with control tokens renamed, and these tokens with their real names."""

    library: tokenizers.Tokenizer
    added: dict[int, AddedToken]
    decoder_types: frozenset[str]


def load_vocabulary(
    content: bytes | Mapping[str, Any], where: str, settings: Mapping[str, Any] | None = None
) -> Vocabulary:
    """Load the text of a tokenizer.json, or what it holds. Raises ConfigError, with `where`, if invalid.

    `settings` are those of tokenizer_config.json, of which the added_tokens_decoder may have more tokens.
    The library gets the parsed file, serialized again, so that both see the same entry of a duplicate key.
    """
    if isinstance(content, bytes):
        check_size(content, where, MAX_VALUES)
        data = parse_object(content, where, msgspec.json.decode)
    else:
        model = content["model"]
        data = {**content, "model": {**model, "vocab": model["vocab"].copy()}}  # both are changed below
    try:
        _add_stated(data, (settings or {}).get("added_tokens_decoder") or {})
        _check_ids(data)
        added = _hide_added_tokens(data)
        data["truncation"] = data["padding"] = None  # settings of training: prompts must not be cut
        data["model"]["dropout"] = None  # of training, too: a text has one encoding
        with _panics_hidden():
            library = tokenizers.Tokenizer.from_buffer(msgspec.json.encode(data))
            library.encode_special_tokens = False
            _try_out(library)
    except BaseException as error:  # a missing key raises KeyError
        if not is_of_library(error):
            raise
        hint = f"it must be a tokenizer.json that the `tokenizers` library {tokenizers.__version__} can read"
        what = f"{type(error).__name__}: {shortened(str(error), 300)}"
        raise ConfigError(f"cannot use {where}: {what}", hint) from None
    # The library assigns ids by a rule of its own, whatever the file says.
    table = {}
    for token in added:
        number = library.token_to_id(token.alias or token.content)
        if number is not None:
            table[number] = replace(token, token_id=number)
    _warn_of_numbers(where, added, {token.content: number for number, token in table.items()})
    return Vocabulary(library, table, frozenset(_types(data.get("decoder"))))


def spellings(vocabulary: Vocabulary) -> dict[int, str]:
    """Return all tokens by their ids."""
    named = {token.alias: token.content for token in vocabulary.added.values() if token.alias is not None}
    tokens = vocabulary.library.get_vocab(with_added_tokens=True)
    return {number: named.get(token, token) for token, number in tokens.items()}


@contextlib.contextmanager
def _panics_hidden() -> Iterator[None]:
    """Discard what a panic of the library writes to standard error, a page each: the error reports it.

    If nothing fails, output of other threads there in the meantime is written afterwards.
    """
    with _STDERR, tempfile.TemporaryFile() as written, contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # standard error is closed
            kept = os.dup(2)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, 2)
            os.dup2(written.fileno(), 2)
        yield
        stack.close()
        written.seek(0)
        with contextlib.suppress(OSError):
            os.write(2, written.read())


def is_of_library(error: BaseException) -> bool:
    """Return True if an error may come from the `tokenizers` library: an Exception, or a panic of Rust."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _check_ids(data: dict[str, Any]) -> None:
    """Refuse invalid and duplicate token ids: the library accepts them, and assigns others."""
    vocab = data["model"]["vocab"]
    added = data.get("added_tokens") or []
    if len(added) > MAX_ADDED or max((len(entry["content"]) for entry in added), default=0) > MAX_NAME:
        raise ValueError(f"more than {MAX_ADDED:,} added tokens, or one of more than {MAX_NAME:,} characters")
    stated = [entry["id"] for entry in added]
    for ids in (list(vocab.values()) if isinstance(vocab, dict) else [], stated):
        for number in ids:
            if type(number) is not int or not 0 <= number < MAX_IDS:
                raise ValueError(f"{quoted(number)} is not a token id (0 to {MAX_IDS - 1:,})")
        if len(set(ids)) < len(ids):
            (number, _), *_ = Counter(ids).most_common(1)
            raise ValueError(f"{number} is the id of two tokens")


def _add_stated(data: dict[str, Any], stated: Mapping[str, Any]) -> None:
    """Add tokens of tokenizer_config.json that a parsed tokenizer.json does not have, by rising ids."""
    own = list(data.get("added_tokens") or [])
    known = {entry["content"] for entry in own} | {str(entry["id"]) for entry in own}
    more = [
        {**_PLAIN_TOKEN, **entry, "id": int(number)}
        for number, entry in stated.items()
        if number not in known and entry["content"] not in known
    ]
    data["added_tokens"] = own + sorted(more, key=lambda entry: entry["id"])


def _try_out(library: tokenizers.Tokenizer) -> None:
    """Encode samples to find parts that fail only in use: a normalizer that panics, tokens it lacks."""
    for text in ("", "a"):
        try:
            ids = library.encode(text).ids
            plain = library.encode(text, add_special_tokens=False).ids
        except Exception:  # this text has no token, which concerns requests with such text alone
            continue
        if any(library.id_to_token(number) is None for number in ids):
            raise ValueError("its post_processor adds tokens that are not in the vocabulary")
        if text and not plain:
            raise ValueError("its post_processor drops the text")


def _warn_of_numbers(where: str, added: list[AddedToken], numbers: dict[str, int]) -> None:
    """Log a warning if the library assigns another id to an added token than the file does."""
    for token in added:
        if (number := numbers.get(token.content)) is not None and number != token.token_id:
            _LOG.warning("%s: %s has the id %d, not %d", where, quoted(token.content), number, token.token_id)
            return


def is_plain_text(content: str) -> bool:
    """Return True for an added token that is no markup: white space, or a word of letters and digits."""
    return all(char.isalnum() or char.isspace() or char == "\u2581" for char in content)


def _hide_added_tokens(data: dict[str, Any]) -> list[AddedToken]:
    """Rename the control tokens of `data`, a parsed tokenizer.json, in place."""
    nonce = secrets.token_hex(16)
    harmless = _types(data.get("normalizer")) <= _HARMLESS
    model = data["model"]
    kept, added = [], []
    for index, entry in enumerate(data.get("added_tokens") or []):
        content, special = entry["content"], bool(entry.get("special"))
        if model.get("byte_fallback") and re.fullmatch(r"<0x[0-9A-F]{2}>", content):
            continue  # a byte, not a control token: the model finds it by its name, which text must not match
        alias = None if not special and is_plain_text(content) else f"{nonce}{index:08d}"
        added.append(AddedToken(entry["id"], content, special, bool(entry.get("single_word")), alias))
        if alias is not None:
            # Whoever writes an alias has already checked its context, such as word boundaries.
            normalized = bool(entry.get("normalized")) and harmless
            entry = entry | {"content": alias, "single_word": False, "normalized": normalized}
        kept.append(entry)
    data["added_tokens"] = kept
    _rename_in_model(model, {token.content: token.alias for token in added if token.alias is not None})
    return added


def _rename_in_model(model: dict[str, Any], aliases: dict[str, str]) -> None:
    """Rename tokens in the model's own vocabulary, and drop the merges that would make them of text."""
    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram: [piece, score] pairs; the unknown piece is stated by its index
        model["vocab"] = [[aliases.get(piece, piece), score] for piece, score in vocab]
        return
    resident = aliases.keys() & vocab.keys()
    if not resident:
        return
    for name in resident:  # the order of the entries has no meaning
        vocab[aliases[name]] = vocab.pop(name)
    if model.get("unk_token") in resident:
        model["unk_token"] = aliases[model["unk_token"]]
    if "merges" in model:
        model["merges"] = _without(model["merges"], resident)


def _without(merges: list[str] | list[list[str]], names: set[str]) -> list[Any]:
    """Return the merges that neither take nor make one of these tokens.

    One that does begins as a name begins, or ends as one ends: of hundreds of thousands, few do.
    """
    begins, ends = {name[:1] for name in names}, {name[-1:] for name in names}
    return [
        merge
        for merge in merges
        if not (merge[0][:1] in begins or merge[-1][-1:] in ends) or not _touches(merge, names)
    ]


def _touches(merge: str | list[str], names: set[str]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left + right in names or left in names or right in names


def _types(part: Any) -> set[str]:
    """Return all `type`s in a normalizer or decoder of tokenizer.json, at any depth."""
    if isinstance(part, list):
        return {name for item in part for name in _types(item)}
    if not isinstance(part, dict):
        return set()
    inner = _types(part.get("normalizers")) | _types(part.get("decoders"))
    return inner | ({part["type"]} if "type" in part else set())
