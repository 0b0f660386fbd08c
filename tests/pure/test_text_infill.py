"""Prompts for text between two others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_folders import tokenizer_of
from small_tokenizers import added, byte_fallback, byte_level

from quire.text.infill import Gap, Infill, OtherFile
from quire.text.tokenizer import Tokenizer

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")


def with_tokens(folder: Path, *names: str) -> Tokenizer:
    data = json.loads((folder / "tokenizer.json").read_text())
    size = max(token["id"] for token in data["added_tokens"]) + 1
    data["added_tokens"] += [added(size + i, name, special=False) for i, name in enumerate(names)]
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return tokenizer_of(folder)


def infill_of(folder: Path, *names: str) -> Infill:
    found = Infill.of(with_tokens(byte_level(folder), *names), 1 << 20)
    assert found is not None
    return found


def written(infill: Infill, prefix: str, suffix: str, *, begun: str = "", room: int | None = None) -> str:
    return infill.tokenizer.decode(infill.encode(Gap(prefix, suffix, begun), room), skip_special_tokens=False)


def test_a_vocabulary_without_all_three_tokens_has_none(tmp_path: Path) -> None:
    assert Infill.of(tokenizer_of(byte_level(tmp_path / "plain")), 1 << 20) is None
    assert Infill.of(with_tokens(byte_level(tmp_path / "two"), *QWEN[:2]), 1 << 20) is None


def test_tokens_that_the_model_lacks_are_none(tmp_path: Path) -> None:
    tokenizer = with_tokens(byte_level(tmp_path), *QWEN)
    last = tokenizer.token_id("<|fim_middle|>")
    assert last is not None
    assert Infill.of(tokenizer, last) is None
    found = Infill.of(tokenizer, last + 1)
    assert found is not None
    assert (found.file, found.end_ids) == (None, (last - 2, last - 1, last))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (QWEN, "<|fim_prefix|>the quick<|fim_suffix|>lazy dog<|fim_middle|> brown"),
        (
            ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
            "<fim_prefix>the quick<fim_suffix>lazy dog<fim_middle> brown",
        ),
        (
            ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
            "<｜fim▁begin｜>the quick<｜fim▁hole｜>lazy dog<｜fim▁end｜> brown",
        ),
        (("[PREFIX]", "[SUFFIX]"), "[SUFFIX]lazy dog[PREFIX]the quick brown"),
    ],
    ids=["qwen", "starcoder", "deepseek", "mistral"],
)
def test_the_prompt_of_each_kind(tmp_path: Path, names: tuple[str, ...], expected: str) -> None:
    assert written(infill_of(tmp_path, *names), "the quick", "lazy dog", begun=" brown") == expected


def test_texts_never_become_control_tokens(tmp_path: Path) -> None:
    infill = infill_of(tmp_path, *QWEN)
    files = [OtherFile("<|file_sep|>", "<|repo_name|>")]
    ids = infill.encode(Gap("a <|fim_suffix|> b", "<|im_end|>", "<|fim_pad|>", files))
    names = [
        infill.tokenizer.control_tokens[number] for number in ids if number in infill.tokenizer.control_ids
    ]
    assert names == [
        "<|repo_name|>",
        "<|file_sep|>",
        "<|file_sep|>",
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
    ]


def test_the_beginning_of_every_text_comes_first(tmp_path: Path) -> None:
    tokenizer = with_tokens(byte_fallback(tmp_path), "▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
    infill = Infill.of(tokenizer, 1 << 20)
    assert infill is not None
    ids = infill.encode(Gap("the", "dog"))
    assert tokenizer.encode("")[:1] == [tokenizer.bos_token_id] == ids[:1]
    assert ids.count(ids[0]) == 1
    assert tokenizer.token_id("▁<EOT>") in infill.end_ids


def test_other_files_precede_it_under_their_names(tmp_path: Path) -> None:
    files = [OtherFile("a.py", "the fox"), OtherFile("b.py", "the dog")]
    infill = infill_of(tmp_path / "qwen", *QWEN)
    text = infill.tokenizer.decode(infill.encode(Gap("over", "lazy", "", files)), skip_special_tokens=False)
    assert text == (
        "<|repo_name|>project\n<|file_sep|>a.py\nthe fox\n<|file_sep|>b.py\nthe dog\n<|file_sep|>filename\n"
        "<|fim_prefix|>over<|fim_suffix|>lazy<|fim_middle|>"
    )
    infill = infill_of(tmp_path / "deepseek", "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")
    text = infill.tokenizer.decode(infill.encode(Gap("over", "lazy", "", files)), skip_special_tokens=False)
    assert text == "the fox\nthe dog\n<｜fim▁begin｜>over<｜fim▁hole｜>lazy<｜fim▁end｜>"


def test_what_is_farthest_from_the_gap_is_left_out(tmp_path: Path) -> None:
    infill = infill_of(tmp_path, *QWEN)
    prefix, suffix = "0123456789" * 8, "9876543210" * 8
    count = len(infill.encode(Gap(prefix, suffix)))
    for room in range(3, count + 20):
        ids = infill.encode(Gap(prefix, suffix), room)
        assert len(ids) == max(3, min(room, count))
        text = infill.tokenizer.decode(ids, skip_special_tokens=False)
        before, after = (
            text.removeprefix("<|fim_prefix|>").removesuffix("<|fim_middle|>").split("<|fim_suffix|>")
        )
        assert prefix.endswith(before)
        assert suffix.startswith(after)
        assert room < 20 or len(after) >= room // 4 - 3 or after == suffix
    short = infill.encode(Gap(prefix * 9, "9"), 60)
    assert len(short) == 60  # the rest of the suffix's quarter is the prefix's


def test_the_last_files_that_fit_are_kept_whole(tmp_path: Path) -> None:
    infill = infill_of(tmp_path, *QWEN)
    files = [OtherFile(f"{n}", f"{n}" * 10) for n in range(4)]
    whole = infill.encode(Gap("the", "dog", "", files))
    alone = infill.encode(Gap("the", "dog"))
    seen = set()
    for room in range(len(alone), len(whole) + 1):
        ids = infill.encode(Gap("the", "dog", "", files), room)
        assert len(ids) <= room
        assert ids[-len(alone) :] == alone
        text = infill.tokenizer.decode(ids, skip_special_tokens=False)
        kept = [n for n in range(4) if f"{n}\n{f'{n}' * 10}\n" in text]
        assert kept == [*range(4 - len(kept), 4)]
        assert text.count("<|file_sep|>") == (len(kept) + 1 if kept else 0)
        seen.add(len(kept))
    assert seen == {0, 1, 2, 3, 4}
