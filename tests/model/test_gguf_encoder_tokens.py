"""Tokenizers of encoders in GGUF files: texts have the tokens that a tokenizer.json of the same gives."""

from __future__ import annotations

import base64
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from gguf_files import write
from gguf_pooled import charsmap_of, strings, tokens_of
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import CORPUS
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from quire.errors import ConfigError
from quire.text.tokenizer import Tokenizer
from quire.weights.gguf.container import GgufFile
from quire.weights.gguf.tokenizer import tokenizer_of
from quire.weights.gguf.tokens import read_tokens

BERT = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
BERT |= {"mask_token": "[MASK]"}
XLM = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
XLM |= {"cls_token": "<s>", "sep_token": "</s>"}
REPLACED = {"\t": " ", "\n": " ", "\r": " ", "\u3000": " ", "\u2581": " ", "\uff21": "A", "\ufb01": "fi"}
REPLACED |= {"e\u0301": "\u00e9", "\u00ad": ""}
TEXTS = [
    *CORPUS,
    "",
    " ",
    "a",
    " leading, trailing  and   double ",
    "The Quick BROWN fox; isn't it? (yes!) $3.50 -- a_b #tag @you",
    "Größe, naïve façade, e\u0301 \u00e9 \u0130stanbul ﬁne \uff21",
    "東京は日本の首都です。我爱北京天安门",
    "नमस्ते दुनिया مرحبا שלום Привет",
    "zero\u200bwidth \u00adsoft\u00ad \ufeff mark \ufffd \x00 \x07 bell",
    "x" * 99 + " " + "y" * 100 + " " + "z" * 101 + " " + "the" * 200,
    "[CLS] [unused1] <s> </s> ▁the ▁ ##the [PAD]",
    "tab\tline\nreturn\r\n\u3000wide \u2028separator",
    "👩‍👩‍👧 🏳️‍🌈 ☃ ½ ﷺ",
]


@cache
def word_piece(small: bool) -> str:
    library = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=small)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    special = ["[PAD]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [] if small else list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    trainer = trainers.WordPieceTrainer(
        vocab_size=500, special_tokens=special, show_progress=False, initial_alphabet=letters
    )
    library.train_from_iterator(CORPUS + TEXTS[8:10], trainer)
    ids = [(name, library.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    library.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    return library.to_str()


@cache
def unigram() -> str:
    library = tokenizers.Tokenizer(models.Unigram())
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    library.decoder = decoders.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    library.train_from_iterator(CORPUS + TEXTS[8:10], trainer)
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    data = json.loads(library.to_str())
    charsmap = base64.b64encode(charsmap_of(REPLACED)).decode()
    data["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    data["model"]["vocab"] = [[text, round(score, 4)] for text, score in data["model"]["vocab"]]
    return json.dumps(data)


@cache
def byte_level() -> str:
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(CORPUS + TEXTS[8:10], trainer)
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return library.to_str()


KINDS = {
    "bytes": (byte_level(), XLM),
    "small": (word_piece(True), BERT),
    "capitals": (word_piece(False), BERT),
    "unigram": (unigram(), XLM),
}


def read(path: Path, metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a file with this metadata; None as a value leaves a key out."""
    kept = {key: value for key, value in metadata.items() if value is not None}
    tokens = read_tokens(GgufFile.open(write(path, {"general.architecture": "bert"} | kept, {})).metadata)
    assert tokens is not None
    return Tokenizer.from_data(tokenizer_of(tokens))


@cache
def both(kind: str, folder: Path) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    data, names = KINDS[kind]
    own = read(folder / f"{kind}.gguf", tokens_of(json.loads(data), names))
    plain = json.loads(data)
    plain["added_tokens"] = []  # the names of which are text
    if isinstance(vocab := plain["model"]["vocab"], list):
        plain["model"]["vocab"] = [
            [f"\ue000{n}" if n < 4 else one, score] for n, (one, score) in enumerate(vocab)
        ]
        plain["post_processor"] = None
    return own, tokenizers.Tokenizer.from_str(json.dumps(plain))


def check(kind: str, folder: Path, one: str, two: str) -> None:
    own, library = both(kind, folder)
    alone = library.encode(one, add_special_tokens=False).ids
    other = library.encode(two, add_special_tokens=False).ids
    first, last = (own.token_id(KINDS[kind][1][name]) for name in ("cls_token", "sep_token"))
    assert own.encode(one, add_special_tokens=False) == alone
    assert own.encode_whole(one) == [first, *alone, last]
    between = [last] if KINDS[kind][1] == XLM else []
    assert own.encode_whole(one, two) == [first, *alone, last, *between, *other, last]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_texts(kind: str, number: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    check(kind, tmp_path_factory.getbasetemp(), TEXTS[number], TEXTS[number - 1])


@pytest.mark.parametrize("kind", KINDS)
@given(one=st.text(max_size=40), two=st.text(max_size=10))
def test_any_text(kind: str, one: str, two: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    check(kind, tmp_path_factory.getbasetemp(), one, two)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_not_text(kind: str, tmp_path: Path) -> None:
    own, _ = both(kind, tmp_path)
    assert own.special_tokens == KINDS[kind][1]
    control = {own.token_id(name) for name in own.special_tokens.values()}
    asked = " ".join(own.special_tokens.values())
    assert not {*own.encode(asked, add_special_tokens=False)} & (control - {own.token_id("[UNK]")})


@pytest.mark.parametrize("named", [True, False])
def test_a_file_that_names_no_tokens(named: bool, tmp_path: Path) -> None:
    """Their ids are those of their names, or of other keys of the metadata."""
    metadata = {
        key: value
        for key, value in tokens_of(json.loads(word_piece(True)), BERT).items()
        if not key.endswith("_id")
    }
    own, _ = both("small", tmp_path)
    if named:
        ids = {"bos": "[CLS]", "eos": "[SEP]"}
        metadata |= {f"tokenizer.ggml.{key}_token_id": own.token_id(name) for key, name in ids.items()}
    found = read(tmp_path / "m.gguf", metadata)
    assert found.encode_whole("the fox", "again") == own.encode_whole("the fox", "again")
    assert found.special_tokens["sep_token"] == "[SEP]"


@pytest.mark.parametrize("kind", ["bytes", "unigram"])
@pytest.mark.parametrize(
    ("stated", "before", "after", "between"),
    [
        ({}, [0], [2], [2]),
        ({"add_bos_token": False}, [], [2], [2]),
        ({"add_sep_token": False}, [0], [2], []),
        ({"add_eos_token": False}, [0], [], []),
    ],
)
def test_tokens_around_texts_are_those_stated(
    kind: str,
    stated: dict[str, bool],
    before: list[int],
    after: list[int],
    between: list[int],
    tmp_path: Path,
) -> None:
    metadata = tokens_of(json.loads(KINDS[kind][0]), XLM)
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in stated.items()}
    own = read(tmp_path / "m.gguf", metadata)
    fox, again = (own.encode(text, add_special_tokens=False) for text in ("the fox", "again"))
    assert own.encode_whole("the fox") == [*before, *fox, *after]
    if after:
        assert own.encode_whole("the fox", "again") == [*before, *fox, *after, *between, *again, *after]


def test_a_token_of_text_that_is_named_stays_text(tmp_path: Path) -> None:
    """What separates may be an ordinary token."""
    metadata = tokens_of(
        json.loads(byte_level()), {"bos_token": "<s>", "eos_token": "</s>", "sep_token": "e"}
    )
    own = read(tmp_path / "m.gguf", metadata)
    assert own.token_id("e") in own.encode("e", add_special_tokens=False)


FAULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no scores": ("unigram", {"scores": None}, "tokens have 0 scores"),
    "too few scores": ("unigram", {"scores": [0.5]}, "tokens have 1 scores"),
    "too few types": ("unigram", {"token_type": [1, 1]}, "tokens have 2 types"),
    "types of words": ("small", {"token_type": [1, 1]}, "tokens have 2 types"),
    "no tokens": ("small", {"tokens": None}, "a tokenizer without tokens"),
    "no name": ("small", {"tokens": ["a", "b"], "token_type": [1, 1], "cls_token_id": None}, "tokens"),
    "twice": ("small", {"tokens": strings(["[X]", "\u2581[X]"]), "token_type": [3, 1]}, "tokens"),
    "far": ("small", {"cls_token_id": 1 << 20}, "cls_token_id = 1,048,576, but there are"),
    "no list": ("unigram", {"precompiled_charsmap": 3}, "precompiled_charsmap = 3 is not a list of numbers"),
    "no bytes": ("unigram", {"precompiled_charsmap": [1.5]}, "precompiled_charsmap is not a list of bytes"),
    "large": ("unigram", {"precompiled_charsmap": [300, 5]}, "precompiled_charsmap is not a list of bytes"),
    "cut": ("unigram", {"precompiled_charsmap": [9, 0, 0]}, "cannot use the tokenizer of"),
    "a flag": ("unigram", {"add_space_prefix": "yes"}, "add_space_prefix = 'yes' is not true or false"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_refused(fault: str, tmp_path: Path) -> None:
    kind, changed, words = FAULTS[fault]
    data, names = KINDS[kind]
    changed = {f"tokenizer.ggml.{key}": value for key, value in changed.items()}
    with pytest.raises(ConfigError, match=words):
        read(tmp_path / "m.gguf", tokens_of(json.loads(data), names) | changed)
