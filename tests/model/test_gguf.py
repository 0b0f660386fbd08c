"""GGUF files made by gguf-py and llama.cpp: every number, the logits, the tokenizers, and the commands."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from test_goldens import greedy
from tiny import Dense as Numbers
from tiny import Paged

from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.models import read_model
from quire.program.passes import fuse
from quire.quantize.kinds import Dense
from quire.text.tokenizer import Tokenizer, need_tokenizer
from quire.weights.gguf.blocks import CODINGS, block_weights, read_blocks
from quire.weights.gguf.container import GgufFile
from quire.weights.gguf.metadata import Metadata
from quire.weights.gguf.model import GgufModel
from quire.weights.gguf.tokenizer import tokenizer_of
from quire.weights.gguf.tokens import FileTokens, end_tokens, read_tokens
from quire.weights.gguf.types import TYPES
from quire.weights.hub import open_model
from quire.weights.load import load
from quire.weights.plan import plan
from quire.weights.vocabularies.splits import SPLITS

FILES = [f"gguf/tinyq-{kind}" for kind in ("IQ4_NL", "MXFP4", "Q2_K", "Q4_0", "Q4_K_M", "Q5_0", "Q5_K_M")]
FILES += ["gguf/tinyq-Q6_K", "gguf/tinyq-Q8_0", "gguf/tinyq3-Q4_K_M", "gguf-demo/demo-Q4_K_M"]
DEMO = "quantized/gguf-demo/demo-Q4_K_M.gguf"
VOCABULARIES = ["gpt-2/ggml-vocab-gpt-2", "llama-2/ggml-vocab-llama-spm", "phi-3/ggml-vocab-phi-3"]


def tokens_of(values: Mapping[str, Any]) -> FileTokens:
    tokens = read_tokens(Metadata("a file", values))
    assert tokens is not None
    return tokens


def golden_of(path: Path) -> Any:
    return json.loads(path.with_suffix(".golden.json").read_text())


@pytest.mark.parametrize("name", FILES)
def test_every_number_is_that_of_the_format(name: str, shared_data: Path) -> None:
    file = GgufFile.open(shared_data / "quantized" / f"{name}.gguf")
    expected = golden_of(file.path)["sha256"]
    assert file.tensors.keys() == expected.keys()
    for tensor in file.tensors.values():
        blocks = file.blocks(tensor)
        if (coding := CODINGS.get(tensor.type.name)) is None:
            dense = blocks.view("<f4")
        else:
            weight = read_blocks(coding, blocks, tensor.shape)
            assert weight.storage == coding.storage
            assert weight.nbytes == weight.storage.nbytes(weight.shape)
            dense = weight.dense()
        assert hashlib.sha256(dense.tobytes()).hexdigest() == expected[tensor.name], tensor.name


# Of gguf-py's dequantization of the same bytes, NaN apart.
SHA256 = {
    "Q4_0": "c43b8983bf6c0973",
    "Q4_1": "1c94547d7c0ff1bf",
    "Q5_0": "18a96cb089d78ecf",
    "Q5_1": "147cea77b886b97e",
    "Q8_0": "465a0e830a52655b",
    "Q2_K": "e7ba9023d31be3fa",
    "Q3_K": "57ec37b492fece24",
    "Q4_K": "6566941db3878a35",
    "Q5_K": "243e7a55f535093b",
    "Q6_K": "ca433a2b3500ba8f",
    "IQ4_NL": "328eddd532cd5465",
    "IQ4_XS": "731ff92f0e7a82b3",
    "MXFP4": "4349fe40d35be00c",
    "TQ1_0": "30ba7bc62ac1ed65",
    "TQ2_0": "3cb67f0e03eac461",
}


@pytest.mark.parametrize("kind", CODINGS)
def test_blocks_of_any_bytes(kind: str) -> None:
    """Types and codes that no file here has, against gguf-py, and read by panels against read at once."""
    (block,) = (block for block in TYPES.values() if block.name == kind)
    blocks = np.random.default_rng(7).integers(0, 256, (3, 2 * block.nbytes), dtype=np.uint8)
    assert block_weights(CODINGS[kind].storage) == block.weights
    dense = read_blocks(CODINGS[kind], blocks, (3, 2 * block.weights)).dense()
    dense[np.isnan(dense)] = 0
    assert hashlib.sha256(dense.tobytes()).hexdigest()[:16] == SHA256[kind]
    many = np.tile(blocks, (2000, 1))
    weight = read_blocks(CODINGS[kind], many, (6000, 2 * block.weights))
    rows = weight.rows(np.array([0, 3333, 5998]))
    np.testing.assert_array_equal(
        rows, read_blocks(CODINGS[kind], blocks, (3, 2 * block.weights)).dense()[[0, 0, 1]]
    )


@pytest.mark.parametrize("name", FILES)
def test_logits_and_greedy_tokens(name: str, shared_data: Path) -> None:
    """With the weights as float32, as the goldens were made: rows in pairs, norms, names, configuration."""
    source = GgufModel(shared_data / "quantized" / f"{name}.gguf")
    model = read_model(source.config())
    program = fuse(model.program)
    loaded = load(plan(program.weights(), source.tensors(), ignored=()))
    assert any(not isinstance(weight, Dense) for weight in loaded.values())
    paged = Paged(program, {key: Numbers(weight.dense()) for key, weight in loaded.items()}, num_blocks=300)
    prompts = golden_of(source.path)["prompts"]
    results = greedy(model, paged, [p["ids"] for p in prompts], [len(p["greedy"]) for p in prompts])
    for prompt, logits, tokens in zip(prompts, *results, strict=True):
        expected = np.array(prompt["last_logits"], np.float32)
        assert np.abs(logits[-1] - expected).max() <= 1e-4 * np.abs(expected).max()
        assert logits.argmax(axis=-1).tolist() == prompt["argmax"]
        assert tokens == prompt["greedy"]


def test_the_tokenizer_and_templates_of_the_demo(shared_data: Path) -> None:
    source = GgufModel(shared_data / DEMO)
    tokenizer = need_tokenizer(source)
    known = json.loads((source.path.parent / "demo.texts.json").read_text())
    for text, ids in zip(known["texts"], known["ids"], strict=True):
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
    for text, ids in zip(known["chat"], known["chat_ids"], strict=True):
        assert tokenizer.encode(text, parse_special=True) == ids
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert source.chat_templates()["default"] == open_model("demo").chat_templates()["default"]


def test_a_template_beside_a_file_replaces_its_own(shared_data: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.symlink_to((shared_data / DEMO).resolve())
    assert "<|im_start|>" in GgufModel(path).chat_templates()["default"]
    (tmp_path / "m.jinja").write_text("{{ messages[0]['content'] }}")
    assert GgufModel(path).chat_templates() == {"default": "{{ messages[0]['content'] }}"}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_published_vocabularies(name: str, shared_data: Path) -> None:
    """Byte-level BPE, and pieces by score, with their merges made here."""
    path = shared_data / "tokenizers" / f"{name}.gguf"
    tokenizer = Tokenizer.from_data(tokenizer_of(tokens_of(GgufFile.open(path).metadata.values)))
    texts = Path(f"{path}.inp").read_text().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{path}.out").read_text().splitlines()
    for text, line in zip(texts, lines, strict=False):
        assert tokenizer.encode(text, add_special_tokens=False) == [int(number) for number in line.split()]
    for case in json.loads((path.parent / "golden.json").read_text())["cases"]:
        ids = tokenizer.encode(case["text"], add_special_tokens=False, parse_special=True)
        assert ids == case["ids"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == case["decoded"]


def test_pieces_whose_merges_are_stated(shared_data: Path) -> None:
    """Gemma 4's kind: the merges of the file, no scores, and the tokens that end its turns."""
    scored = GgufFile.open(shared_data / "tokenizers" / f"{VOCABULARIES[1]}.gguf").metadata
    values = {**scored.values, "tokenizer.ggml.add_space_prefix": False}
    by_score = tokenizer_of(tokens_of(values))
    values["tokenizer.ggml.merges"] = [" ".join(pair) for pair in by_score.content["model"]["merges"]]
    values["tokenizer.ggml.model"] = "gemma4"
    del values["tokenizer.ggml.scores"]
    stated = tokenizer_of(tokens_of(values))
    assert stated.settings["add_bos_token"]
    both = Tokenizer.from_data(by_score), Tokenizer.from_data(stated)
    for text in (TEXT, "a  b", "\u2581", "\x00 \U0001f999"):
        assert both[0].encode(text) == both[1].encode(text)
    texts = values["tokenizer.ggml.tokens"]
    values["tokenizer.ggml.tokens"] = [*texts[:-2], "<|tool_response>", "<turn|>"]
    kinds = [*values["tokenizer.ggml.token_type"][:-2], 4, 3]
    values["tokenizer.ggml.token_type"] = np.array(kinds)
    assert end_tokens(tokens_of(values))[-2:] == [len(texts) - 2, len(texts) - 1]


# Pieces of one text by the split of a name: what the models' own tokenizers make of it.
TEXT = "I'LL say 12345 naïve don't HelloWorld 東京//.\n\n x"
PIECES = {
    "gpt-2": "I|'|LL| say| 12345| naïve| don|'t| HelloWorld| 東京|//.|\n\n| x",
    "smollm": "I|'|LL| say| |1|2|3|4|5| naïve| don|'t| HelloWorld| 東京|//.|\n\n| x",
    "llama-bpe": "I|'LL| say| |123|45| naïve| don|'t| HelloWorld| 東京|//.\n\n| x",
    "qwen2": "I|'LL| say| |1|2|3|4|5| naïve| don|'t| HelloWorld| 東京|//.\n\n| x",
    "gpt-4o": "I'LL| say| |123|45| naïve| don't| Hello|World| 東京|//.\n\n| x",
    "tekken": "I|'LL| say| |1|2|3|4|5| naïve| don|'t| Hello|World| 東京|//.\n\n| x",
    "default": "I|'|LL| say| |123|45| naïve| don|'|t| HelloWorld| 東京|//.|\n\n| x",
}


def test_splits(shared_data: Path) -> None:
    """Every pattern is one that the library takes, and no text loses a character."""
    metadata = GgufFile.open(shared_data / DEMO).metadata
    for name in SPLITS:
        data = tokenizer_of(tokens_of({**metadata.values, "tokenizer.ggml.pre": name}))
        tokenizer = Tokenizer.from_data(data)
        assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT, name
        splitter = tokenizers.Tokenizer.from_str(json.dumps(data.content)).pre_tokenizer
        assert splitter is not None
        pieces = [TEXT[start:end] for _, (start, end) in splitter.pre_tokenize_str(TEXT)]
        assert "".join(pieces) == TEXT, name
        if name in PIECES:
            assert "|".join(pieces) == PIECES[name], name


def test_a_file_that_does_not_name_its_split(shared_data: Path, caplog: pytest.LogCaptureFixture) -> None:
    metadata = GgufFile.open(shared_data / DEMO).metadata
    values = {key: value for key, value in metadata.values.items() if key != "tokenizer.ggml.pre"}
    tokenizer_of(tokens_of(values))
    assert "does not say how texts are split (tokenizer.ggml.pre); taken as 'default'" in caplog.text
    tokenizer_of(tokens_of(values | {"general.architecture": "qwen3"}))
    assert "taken as 'qwen2'" in caplog.text
    values["tokenizer.ggml.tokens"] = ["<|begin_of_text|>", *values["tokenizer.ggml.tokens"][1:]]
    tokenizer_of(tokens_of(values))
    assert "taken as 'llama-bpe'" in caplog.text


def test_tokens_that_end_an_answer(shared_data: Path) -> None:
    """Those stated, and control tokens known by their names; <|end|> not where it parts an answer."""
    metadata = GgufFile.open(shared_data / "tokenizers" / f"{VOCABULARIES[2]}.gguf").metadata
    assert end_tokens(tokens_of(metadata.values)) == [32000, 32007]
    tokens = metadata.texts("tokenizer.ggml.tokens")
    harmony = [{"<|placeholder1|>": "<|return|>"}.get(text, text) for text in tokens]
    values = {**metadata.values, "tokenizer.ggml.tokens": harmony}
    assert end_tokens(tokens_of(values)) == [32000, 32002]


def test_a_chat_with_a_file(shared_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(shared_data / DEMO)
    for argv in (["run", path, "What is 3 + 4?", "--device", "reference"], ["inspect", path, "--json"]):
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main(argv)
        assert left.value.code == 0
        if argv[0] == "run":
            assert "7" in capsys.readouterr().out
    assert json.loads(capsys.readouterr().out)["architecture"] == "LlamaForCausalLM"


def test_a_model_without_a_vocabulary_takes_ids(shared_data: Path) -> None:
    llm = LLM(str(shared_data / f"quantized/{FILES[4]}.gguf"), device="reference")
    params = SamplingParams(max_tokens=4, temperature=0, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], params)
    assert len(output.outputs[0].token_ids) == 4
