"""`--config FILE`: values of flags, precedence of the command line, and errors that name file and line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from quire.cli import parser
from quire.cli.config_file import MAX_BYTES
from quire.cli.main import main
from quire.cli.options import engine_options, sampling_options, server_options
from quire.cli.serve import engine_fields
from quire.errors import ConfigError


def parsed(command: str, path: Path, text: str, *argv: str) -> argparse.Namespace:
    path.write_text(text)
    return parser.parse([command, *argv, "--config", str(path)])


def call(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    return int(ended.value.code or 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "quire.yaml"


SERVE = """
# everything that a flag can be
model: some/model
max-num-seqs: 16          # dashes
max_model_len: 2048       # or underscores
kv-cache-memory-bytes: 512M
enable-prefix-caching: no
block_size: 32
quantization: int8
served-model-name: [one, "two*"]
allowed-origins: https://example.org
log-prompts: true
itl-goal: 60ms
ttft_goal: 1.5s
revision:                 # as if it were not there
"""


def test_a_file_says_what_flags_say(path: Path) -> None:
    args = parsed("serve", path, SERVE)
    assert args.model == "some/model"
    assert engine_options(args) == {
        "max_num_seqs": 16,
        "max_model_len": 2048,
        "itl_goal": 0.06,
        "kv_cache_memory_bytes": 512_000_000,
        "enable_prefix_caching": False,
        "block_size": 32,
        "quantization": "int8",
    }
    names = {"served_model_name": ("one", "two*"), "allowed_origins": ("https://example.org",)}
    assert server_options(args) == {**names, "log_prompts": True, "ttft_goal": 1.5}


def test_off_needs_no_quotes(path: Path) -> None:
    """YAML reads `off` as false."""
    for text in ("off", "'off'", "false"):
        assert engine_options(parsed("run", path, f"speculative: {text}"))["speculative"] == "off"
    assert engine_options(parsed("run", path, "speculative: org/small"))["speculative"] == "org/small"


def test_a_goal_lifts_the_bound_of_prompts(path: Path) -> None:
    for text, expected in (
        ("", 48),
        ("itl-goal: 60ms", None),
        ("max-num-prefill-tokens: 7", 7),
        ("{itl-goal: 1s, max-num-prefill-tokens: 7}", 7),
    ):
        assert engine_fields(parsed("serve", path, text)).get("max_num_prefill_tokens") == expected


def test_flags_win(path: Path) -> None:
    flags = ("--max-num-seqs", "8", "--enable-prefix-caching", "--served-model-name", "three", "demo")
    args = parsed("serve", path, SERVE, *flags)
    assert args.words == ["demo"]
    options = engine_options(args)
    assert (options["max_num_seqs"], options["enable_prefix_caching"], options["block_size"]) == (8, True, 32)
    assert server_options(args)["served_model_name"] == ("three",)  # and not one, two*, three
    twice = ("--served-model-name", "three", "--served-model-name", "four")
    assert server_options(parsed("serve", path, SERVE, *twice))["served_model_name"] == ("three", "four")


def test_json_is_yaml(path: Path) -> None:
    args = parsed("run", path, json.dumps({"temperature": 1, "top-p": 0.5, "stop": ["a", "b"], "json": True}))
    assert sampling_options(args) == {"temperature": 1.0, "top_p": 0.5, "stop": ("a", "b")}
    assert args.json is True
    assert parsed("run", path, "").json is False


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-num-seq: 3", "line 1: unknown key 'max-num-seq'|did you mean 'max-num-seqs'?"),
        ("zzzz: 1\nport: 80", "line 1: unknown key 'zzzz'|the keys are the flags' names"),
        ("\nport: 8000", "line 2: unknown key 'port'|it is a flag of quire serve"),
        ("config: other.yaml", "line 1: unknown key 'config'"),
        ("help: true", "line 1: unknown key 'help'"),
        ("no-enable-prefix-caching: true", "did you mean 'enable-prefix-caching'?"),
        ("seed: 1\n\nmax-num-seqs: many", "line 3: max-num-seqs must be a whole number, got text"),
        ("max-num-seqs: '8'", "max-num-seqs must be a whole number, got text"),
        ("max-num-seqs: 8.5", "max-num-seqs must be a whole number, got a number"),
        ("max-num-seqs: true", "max-num-seqs must be a whole number, got true or false"),
        ("max-num-seqs: [8]", "max-num-seqs must be a whole number, got a list"),
        ("max-num-seqs: 0", "line 1: --max-num-seqs 0 is out of range|give a number from 1 to 65,536"),
        ("max-num-seqs: 8\nmax_num_seqs: 9", "line 2: max-num-seqs is given twice"),
        ("temperature: 9", "line 1: temperature must be a number from 0 to 2"),
        ("quantization: int3", "line 1: quantization: 'int3' is not possible|did you mean 'int8'?"),
        ("block-size: 7", "block-size: '7' is not possible"),
        (
            "kv-cache-dtype: fp8",
            "kv-cache-dtype: 'fp8' is not possible|choose 'int8': it takes the same memory",
        ),
        ("kv-cache-memory-bytes: 4X", "'4X' is not a size"),
        ("itl-goal: 60", "itl-goal must be a duration such as 60ms or 1.5s, got a whole number"),
        ("itl-goal: 60 minutes", "itl-goal: '60 minutes' is not a duration|write a number and its unit"),
        (
            "speculative: on",
            "--speculative 'True' is not possible|choose 'auto', which drafts from texts, 'off'",
        ),
        ("speculative: 5", "speculative must be auto, off or the name of a model, got a whole number"),
        ("json: 1", "json must be true or false, got a whole number"),
        ("revision: 1.10", "revision must be text, got a number|put it in quotes"),
        ("stop: [a, no]", "stop must be text, got true or false|put it in quotes"),
        ("1: 2", "line 1: a key must be text"),
        ("- a", "expected a mapping of flags"),
        ("just words", "expected a mapping of flags"),
        ("a: [b\nc: d", "line 2: not YAML"),
        ("a: 1\n\tb: 2", "line 2: not YAML"),
        ("a: !!python/object/apply:os.system [exit]", "line 1: not YAML"),
        ("a: 2020-99-99", "not YAML"),
        ("a: &x [1]\nb: *x", "line 1: anchors and aliases are not supported"),
        ("a: [[[[1]]]]", "line 1: nested too deep"),
        ("[" * 5000, "nested too deep"),
        ("a: 1\n---\nb: 2", "not YAML"),
        ("a: \x00", "not YAML"),
        ("x" * (MAX_BYTES + 1), "are too many for this file"),
    ],
)
def test_a_wrong_file_is_one_error(
    text: str, words: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_text(text)
    assert call("run", "demo", "hi", "--config", str(path)) == 1
    said = capsys.readouterr().err
    assert [line.partition(":")[0] for line in said.splitlines()] in (["error"], ["error", "hint"])
    assert str(path) in said
    for word in words.split("|"):
        assert word in said


def test_what_may_be_a_secret_is_not_shown(path: Path) -> None:
    for text in ("api-key: sk-123", "port: sk-123", "json: sk-123", "host: [sk-123, 1]", "a: {b: 'sk-123}"):
        with pytest.raises(ConfigError) as wrong:
            parsed("serve", path, text)
        assert "sk-123" not in str(wrong.value)


def test_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latin").write_bytes(b"model: caf\xe9")
    for name, words in (("none", "no such file"), ("", "cannot be read"), ("latin", "not YAML in UTF-8")):
        assert call("probe", "--config", str(tmp_path / name)) == 1
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("run", "model: demo\nmax-tokens: 1"),
        ("serve", "model: demo\nport: 0"),
        ("batch", "input_file: in.jsonl\noutput-file: out.jsonl\nmodel: demo"),
        ("inspect", "model: demo\njson: true"),
        ("probe", "cached: true\nnum-threads: 2"),
        ("cache", ""),
    ],
)
def test_every_command_takes_a_file(command: str, text: str, path: Path) -> None:
    args = parsed(command, path, text)
    for line in text.splitlines():
        key, _, value = line.partition(": ")
        assert str(getattr(args, key.replace("-", "_"))).lower() == value


def test_the_word_model_wins_over_the_file(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text("model: no/such/model\njson: true\n")
    assert call("inspect", "demo", "--config", str(path)) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "demo"
    path.write_text("model: demo\njson: true\nmax-tokens: 1\n")
    assert call("inspect", "--config", str(path)) != 0  # which has no such flag
    assert "it is a flag of quire run" in capsys.readouterr().err
    for words in (["Hello"], ["demo", "Hello"], ["Hello there"]):  # with a model, one word is the prompt
        assert call("run", *words, "--config", str(path)) == 0
        assert json.loads(capsys.readouterr().out)["output_tokens"] == 1
    assert call("run", "no/such/model", "Hello", "--config", str(path)) == 1
