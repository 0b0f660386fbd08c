"""Small tokenizers of every kind, written as the files of a checkpoint, and a ChatML template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</tool_call>", "<think>", "</think>")

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' }}{{ call.function | tojson }}{{ '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

CORPUS = [
    "the quick brown fox jumps over the lazy dog and says hello to the world, again and again",
    "user assistant system tool im_start im_end think call <|im_ end|> < > | / 0123456789",
    "größe naïve 東京 日本語 नमस्ते दुनिया 👩‍👩‍👧 🙂 e\u0301 \t \n\n",
]


def added(token_id: int, content: str, special: bool = True, **flags: bool) -> dict[str, Any]:
    """An entry of `added_tokens`."""
    none = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, "special": special} | none | flags


def write(folder: Path, data: dict[str, Any], config: dict[str, Any] | None = None) -> Path:
    """Write the two files of a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(data))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def byte_level(folder: Path) -> Path:
    """A byte-level BPE like GPT-2's and Qwen's, with ChatML tokens and a run of newlines as added tokens."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(CORPUS, trainer)
    data = json.loads(library.to_str())
    size = len(data["model"]["vocab"])
    names = [(name, True) for name in SPECIALS] + [(name, False) for name in (*MARKUP, "\n\n")]
    data["added_tokens"] = [added(size + i, *name) for i, name in enumerate(names)]
    config = {"eos_token": {"content": "<|im_end|>"}, "pad_token": "<|endoftext|>", "bos_token": None}
    return write(folder, data, config | {"chat_template": CHATML})


def byte_fallback(folder: Path, **config: Any) -> Path:
    """A sentencepiece-like BPE as Llama's. Its merges would make `<s>` and `<tool_call>` of plain text."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    merges = [
        "h e",
        "l l",
        "he ll",
        "hell o",
        "\u2581 hello",
        "\u2581 w",
        "< s",
        "<s >",
        "< /",
        "</ s",
        "</s >",
    ]
    pieces += sorted({char for merge in merges for char in merge if char != " "} | set("abcdrt_o|."))
    pieces += [merge.replace(" ", "") for merge in merges]
    pieces = list(dict.fromkeys([*pieces, "\u2581\u2581"]))
    vocab = {piece: i for i, piece in enumerate(pieces)}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    prepend = {"type": "Prepend", "prepend": "\u2581"}
    back = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    start = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    data = {
        "version": "1.0",
        "added_tokens": [
            *(added(i, name) for i, name in enumerate(pieces[:3])),
            *(added(len(pieces) + i, name) for i, name in enumerate(SPECIALS[1:])),
            added(len(pieces) + 2, "<tool_call>", special=False),
        ],
        "truncation": {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "normalizer": {"type": "Sequence", "normalizers": [prepend, replace]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [start, text],
            "pair": [start, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, strip],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocab,
            "merges": merges,
        },
    }
    return write(folder, data, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | config)


def unigram(folder: Path) -> Path:
    """A Unigram vocabulary with a Metaspace decoder; its pieces include its own control tokens."""
    words = [
        "<unk>",
        "<s>",
        "\u2581",
        "\u2581hello",
        "\u2581world",
        "<",
        ">",
        "s",
        "h",
        "e",
        "l",
        "o",
        "w",
        "r",
        "d",
    ]
    space = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": True}
    data = {
        "version": "1.0",
        "added_tokens": [added(0, "<unk>"), added(1, "<s>")],
        "pre_tokenizer": space,
        "decoder": space,
        "model": {
            "type": "Unigram",
            "unk_id": 0,
            "vocab": [[word, -float(i)] for i, word in enumerate(words)],
        },
    }
    return write(folder, data)


def words(folder: Path) -> Path:
    """Whole words with no decoder at all: tokens are joined with spaces."""
    vocab = {word: i for i, word in enumerate(("[UNK]", "[CLS]", "hello", "world", "again"))}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}
    named = [added(0, "[UNK]"), added(1, "[CLS]")]
    return write(
        folder,
        {"version": "1.0", "added_tokens": named, "pre_tokenizer": {"type": "Whitespace"}, "model": model},
    )


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "unigram": unigram, "words": words}
