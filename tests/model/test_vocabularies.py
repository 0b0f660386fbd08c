"""Tokenizers of folders without a tokenizer.json: tiktoken's, SentencePiece's and Mistral's files."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.text.chat_template import ChatTemplate
from quire.text.tokenizer import Tokenizer, find_tokenizer, need_tokenizer
from quire.text.tools import output_format_of
from quire.weights.folder import ModelFolder
from quire.weights.vocabularies import ranks
from quire.weights.vocabularies.byte_level import merges_of_ranks

LETTERS = [bytes([byte]) for byte in range(256)]
WORDS = [b"he", b"ll", b"hell", b"llo", b" w"]
SPECIAL = (
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[THINK]",
    "[/THINK]",
    "<pad>",
)


def read(folder: Path) -> Tokenizer:
    return need_tokenizer(ModelFolder.at(folder))


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("llama-3", ["tokenizer.model"]),
        ("llama-2", ["tokenizer.model"]),
        ("llama-2", ["tokenizer.model", "tokenizer_config.json"]),
        ("gpt-2", ["vocab.json", "merges.txt"]),
        ("gpt-2", ["vocab.json", "merges.txt", "tokenizer_config.json"]),
    ],
)
def test_published_files(name: str, files: list[str], shared_data: Path, tmp_path: Path) -> None:
    for file in files:
        (tmp_path / file).symlink_to(shared_data / "tokenizers" / name / file)
    tokenizer = read(tmp_path)
    parse = name != "llama-2"  # whose reference takes "<s>" in a text as text
    for case in json.loads((shared_data / "tokenizers" / name / "golden.json").read_text())["cases"]:
        ids = tokenizer.encode(case["text"], add_special_tokens=False, parse_special=parse)
        assert ids == case["ids"], case["text"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == case["decoded"]
    begins = {"llama-3": [128_000], "llama-2": [1], "gpt-2": []}[name]
    assert tokenizer.encode("a")[:-1] == begins


def test_merges_of_ranks() -> None:
    found = {token: number for number, token in enumerate([b"a", b"b", b" ", b"ab", b"b ", b"ab ", b"abab"])}
    merges = [("a", "b"), ("b", "Ġ"), ("a", "bĠ"), ("ab", "Ġ"), ("ab", "ab")]
    assert merges_of_ranks(found) == merges


def tiktoken_of(folder: Path, tokens: list[bytes], name: str = "tiktoken.model") -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (folder / name).write_text("".join(lines))
    return folder


def test_special_tokens_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = ranks._Known("qwen2", ("<one>", "<two>", "<three>"), {"eos_token": "<one>"})
    monkeypatch.setitem(ranks._KNOWN, 261, known)
    tokenizer = read(tiktoken_of(tmp_path, LETTERS + WORDS))
    assert tokenizer.encode("hello w") == [258, ord("o"), 260]
    assert tokenizer.encode("<two>") == list(b"<two>")
    assert tokenizer.encode("<two>", parse_special=True) == [262]
    assert (tokenizer.eos_token_id, tokenizer.vocab_size) == (261, 264)
    stated = {"262": {"content": "<|im_end|>", "special": False}, "300": {"content": "<far>"}}
    settings = {"added_tokens_decoder": stated, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = read(tmp_path)
    assert tokenizer.encode("<|im_end|><three>", parse_special=True) == [262, 263]
    assert tokenizer.eos_token_id == 262
    assert 262 not in tokenizer.special_ids


def test_a_token_that_was_there_before_has_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ranks._KNOWN, 261, ranks._Known("qwen2", ("<one>",), {}))
    tokenizer = read(tiktoken_of(tmp_path, [*LETTERS, b"a", *WORDS]))
    assert tokenizer.encode("hello w") == [258, ord("o"), 260]


def test_ranks_that_are_not_known_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="256 ranks, of no tokenizer"):
        read(tiktoken_of(tmp_path, LETTERS))
    lines = (tmp_path / "tiktoken.model").read_text().splitlines()
    for bad in ("", "!!== 7", "AA==", "AA== x"):
        (tmp_path / "tiktoken.model").write_text("\n".join([*lines, bad, ""]))
        with pytest.raises(ConfigError, match="line 257: no token in base64"):
            read(tmp_path)


def test_kimi_and_hunyuan_are_told_by_their_numbers() -> None:
    kimi, hunyuan = ranks._KNOWN[163_584], ranks._KNOWN[127_957]
    assert kimi.special[0] == "<|reserved_token_163584|>"
    assert len(kimi.special) == 163_840 - 163_584
    assert hunyuan.special[:2] == ("<|endoftext|>", "<|startoftext|>")
    assert hunyuan.special[-1] == "<|extra_204|>"
    assert 127_957 + len(hunyuan.special) == 128_167


def tekken_of(folder: Path, version: str = "v13", **changes: Any) -> Path:
    """Write a tekken.json with a word that its settings leave out, and one special token without a name."""
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate([*LETTERS, *WORDS, b"left out"])
    ]
    special = [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(SPECIAL)]
    reserved = len(SPECIAL) + 1
    size = reserved + len(LETTERS) + len(WORDS)
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|\s+|."
    config = {"pattern": pattern, "num_vocab_tokens": len(vocab), "default_vocab_size": size}
    config |= {"default_num_special_tokens": reserved, "version": version}
    content = {"config": config, "vocab": vocab, "special_tokens": special} | changes
    (folder / "tekken.json").write_text(json.dumps(content))
    return folder


def test_tekken(tmp_path: Path) -> None:
    tokenizer = read(tekken_of(tmp_path))
    first = len(SPECIAL) + 1
    assert tokenizer.encode("hello w") == [1, first + 258, first + ord("o"), first + 260]
    assert tokenizer.encode("[INST]") == [1, *(first + byte for byte in b"[INST]")]
    assert tokenizer.encode("[INST]<SPECIAL_10>", parse_special=True) == [1, 3, 10]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.vocab_size == first + 261
    assert tokenizer.decode([1, first + 258, first + ord("o")]) == "hello"


def test_tekken_without_names_has_those_of_older_versions(tmp_path: Path) -> None:
    changed = json.loads((tekken_of(tmp_path) / "tekken.json").read_text())["config"]
    changed |= {"default_num_special_tokens": 30, "default_vocab_size": 30 + 261, "version": "v3"}
    tokenizer = read(tekken_of(tmp_path, config=changed, special_tokens=None))
    assert tokenizer.encode("[TOOL_CONTENT]<SPECIAL_29>", parse_special=True) == [1, 19, 29]
    assert ModelFolder.at(tmp_path).chat_templates() == {}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"vocab": []}, "0 tokens for 272 numbers, 11 of them special"),
        ({"vocab": [{"rank": 0}]}, "token_bytes"),
        ({"config": {"pattern": "a"}}, "default_vocab_size"),
        ({"special_tokens": [{"rank": 99, "token_str": "<s>"}]}, "special token 99 is none of 11"),
        ({"special_tokens": [{"rank": n, "token_str": "<s>"} for n in range(2)]}, "two tokens have one text"),
    ],
)
def test_damaged_tekken(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(tekken_of(tmp_path, **changes))


@pytest.mark.parametrize("name", ["image", "multimodal"])
def test_images_of_tekken(name: str, tmp_path: Path) -> None:
    folder = ModelFolder.at(tekken_of(tmp_path))
    assert folder.image_processor() == {}
    tekken_of(tmp_path, **{name: {"image_patch_size": 14, "max_image_size": 1540, "spatial_merge_size": 2}})
    found = folder.image_processor()
    assert (found["patch_size"]["height"], found["size"]) == (14, {"longest_edge": 1540})
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "Another"}')
    assert folder.image_processor() == {"image_processor_type": "Another"}


CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "now", "arguments": '{"zone": "é"}'}}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello", "reasoning_content": "Polite."},
    {"role": "user", "content": [{"type": "text", "text": "When?"}]},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL | {"id": "123456789"}]},
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "noon"},
]
TOOLS = (
    '[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "now", "description": "", '
    '"parameters": {"type": "object"}}}][/AVAILABLE_TOOLS]'
)
BEGIN = "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT]"
ARGUED = '[ARGS]{"zone": "é"}'
LISTED = '{"name": "now", "arguments": {"zone": "é"}, "id": "%s"}'
AS_WRITTEN = {
    "v7": (
        f"{BEGIN}[INST]Hi[/INST][THINK]Polite.[/THINK]Hello</s>{TOOLS}[INST]When?[/INST][TOOL_CALLS]["
        f"{LISTED % 'abcdefghi'}, {LISTED % '123456789'}]</s>[TOOL_RESULTS]abcdefghi[TOOL_CONTENT]noon"
    ),
    "v11": (
        f"{BEGIN}[INST]Hi[/INST][THINK]Polite.[/THINK]Hello</s>{TOOLS}[INST]When?[/INST]"
        f"[TOOL_CALLS]now[CALL_ID]abcdefghi{ARGUED}[TOOL_CALLS]now[CALL_ID]123456789{ARGUED}</s>"
        "[TOOL_RESULTS]abcdefghi[TOOL_CONTENT]noon"
    ),
    "v13": (
        f"{BEGIN}{TOOLS}[INST]Hi[/INST][THINK]Polite.[/THINK]Hello</s>[INST]When?[/INST]"
        f"[TOOL_CALLS]now{ARGUED}[TOOL_CALLS]now{ARGUED}</s>[TOOL_RESULTS]noon"
    ),
}


@pytest.mark.parametrize("version", AS_WRITTEN)
def test_conversations_of_tekken(version: str, tmp_path: Path) -> None:
    """As mistral-common 1.13 writes them, whose tokens were compared."""
    folder = ModelFolder.at(tekken_of(tmp_path, version))
    template = ChatTemplate(folder.chat_templates(), need_tokenizer(folder).special_tokens)
    written = template.render(MESSAGES, [TOOL])
    assert written.text == f"{AS_WRITTEN[version]}[/TOOL_RESULTS]"
    assert {segment.text for segment in written.segments if not segment.trusted} >= {"Be brief.", "Hi"}
    expected = "mistral" if version == "v7" else "mistral_args"
    tools = output_format_of(template.templates, None).tools
    assert tools is not None
    assert tools.name == expected
    template.close()


def test_a_template_beside_tekken_is_preferred(tmp_path: Path) -> None:
    (tekken_of(tmp_path) / "chat_template.jinja").write_text("its own")
    assert ModelFolder.at(tmp_path).chat_templates() == {"default": "its own"}


def field(number: int, value: int | float | bytes) -> bytes:
    """Return a field of a message of protocol buffers."""
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(number: int) -> bytes:
    more = number >> 7
    return bytes([number & 127 | (128 if more else 0)]) + (varint(more) if more else b"")


def sentencepiece_of(
    folder: Path, pieces: Mapping[str, float], trainer: Mapping[int, int], normalizer: Mapping[int, Any]
) -> Path:
    types = {"<unk>": 2, "<s>": 3, "</s>": 3}
    content = b"".join(
        field(
            1,
            field(1, piece.encode())
            + field(2, score)
            + field(3, 6 if "<0x" in piece else types.get(piece, 1)),
        )
        for piece, score in pieces.items()
    )
    for number, fields in ((2, trainer), (3, normalizer)):
        content += field(number, b"".join(field(key, value) for key, value in fields.items()))
    (folder / "tokenizer.model").write_bytes(content)
    return folder


SPECIALS = {"<unk>": 0.0, "<s>": 0.0, "</s>": 0.0}
BYTES = {f"<0x{byte:02X}>": 0.0 for byte in range(256)}
PIECES = {"\u2581": -1.0, "a": -2.0, "b": -3.0, "ab": -1.5, "\u2581a": -1.2, "\u2581ab": -4.0, "ba": -2.5}
UNIGRAM, BPE, WORD = {3: 1}, {3: 2}, {3: 3}
AS_IT_IS = {4: 0}  # white space is kept


def spelled(tokenizer: Tokenizer, text: str) -> list[str]:
    return tokenizer.token_strings(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(
    ("trainer", "normalizer", "text", "pieces"),
    [
        (BPE, AS_IT_IS, "ab ba", ["\u2581ab", "\u2581", "ba"]),
        (BPE, AS_IT_IS, "  ab", ["\u2581", "\u2581", "\u2581ab"]),
        (BPE, {4: 1}, "  ab ", ["\u2581ab"]),
        (BPE, AS_IT_IS | {3: 0}, "ab", ["ab"]),
        (BPE, AS_IT_IS, "é", ["\u2581", "<0xC3>", "<0xA9>"]),
        (UNIGRAM, AS_IT_IS, "ab ba", ["\u2581", "ab", "\u2581", "ba"]),
        (UNIGRAM, AS_IT_IS, " a", ["\u2581", "\u2581a"]),
        (UNIGRAM, {4: 1}, "  a  ", ["\u2581a"]),
        (UNIGRAM, AS_IT_IS | {3: 0}, "ab", ["ab"]),
        (UNIGRAM, AS_IT_IS, "é", ["\u2581", "<0xC3>", "<0xA9>"]),
    ],
)
def test_sentencepiece(
    trainer: dict[int, int], normalizer: dict[int, Any], text: str, pieces: list[str], tmp_path: Path
) -> None:
    folder = sentencepiece_of(tmp_path, SPECIALS | BYTES | PIECES, trainer, normalizer)
    tokenizer = read(folder)
    assert spelled(tokenizer, text) == pieces
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id == 1
    assert tokenizer.decode(ids) == (text.strip() if normalizer[4] else text)


def test_a_space_comes_first_only_where_the_settings_say_so(tmp_path: Path) -> None:
    folder = sentencepiece_of(tmp_path, SPECIALS | BYTES | PIECES, BPE, AS_IT_IS)
    for legacy, after in ((True, ["\u2581ab"]), (False, ["ab"])):
        (folder / "tokenizer_config.json").write_text(json.dumps({"legacy": legacy}))
        tokenizer = read(folder)
        ids = tokenizer.encode("a</s>ab", add_special_tokens=False, parse_special=True)
        assert tokenizer.token_strings(ids) == ["\u2581a", *after]


def test_added_tokens(tmp_path: Path) -> None:
    folder = sentencepiece_of(tmp_path, SPECIALS | BYTES | PIECES, BPE, AS_IT_IS)
    size = len(SPECIALS | BYTES | PIECES)
    (folder / "added_tokens.json").write_text(json.dumps({"<|user|>": size, "<|end|>": size + 1}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": ["<|end|>"]}))
    tokenizer = read(folder)
    assert tokenizer.encode("<|end|><|user|>", False, parse_special=True) == [size + 1, size]
    assert size + 1 in tokenizer.special_ids
    assert size not in tokenizer.special_ids


def test_other_files_of_sentencepiece_are_refused(tmp_path: Path) -> None:
    sentencepiece_of(tmp_path, SPECIALS | PIECES, WORD, {})
    with pytest.raises(ConfigError, match="neither BPE nor Unigram"):
        read(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "XLMRobertaTokenizer"}')
    with pytest.raises(ConfigError, match="gives pieces other numbers"):
        read(tmp_path)


def test_a_damaged_file_of_sentencepiece_is_one_error(tmp_path: Path) -> None:
    """Cut between two pieces, or with another letter, a file may still hold a vocabulary."""
    path = sentencepiece_of(tmp_path, SPECIALS | PIECES, BPE, {}) / "tokenizer.model"
    whole = path.read_bytes()
    damaged = [whole[:size] for size in range(len(whole))]
    damaged += [whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :] for at in range(len(whole))]
    refused = 0
    for content in damaged:
        path.write_bytes(content)
        try:
            read(tmp_path)
        except ConfigError:
            refused += 1
    assert refused > len(damaged) // 3


def test_lists_of_tokens_and_merges(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    assert read(tmp_path).encode("ab<|endoftext|>", parse_special=True) == [2, 3]
    for name, content, problem in (
        ("vocab.json", '{"a": 0, "b": 2}', "not those from 0 to 1"),
        ("merges.txt", "a b c\n", "'a b c' is not a pair"),
        ("tokenizer_config.json", '{"tokenizer_class": "CLIPTokenizer"}', "'CLIPTokenizer' splits texts"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError, match=problem):
            read(tmp_path)


def test_words_alone_are_refused(tmp_path: Path) -> None:
    assert find_tokenizer(ModelFolder.at(tmp_path)) is None
    (tmp_path / "vocab.txt").write_text("[PAD]\n")
    with pytest.raises(ConfigError, match=r"only vocab\.txt") as caught:
        read(tmp_path)
    assert "save_pretrained" in (caught.value.hint or "")
