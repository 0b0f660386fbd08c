"""The command line as a user meets it: answers, JSON, errors with hints, prompts through pipes, inspect."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from tiny import CONFIGS

import quire
from quire.cli import arguments, terminal
from quire.cli.main import main
from quire.cli.terminal import counted
from quire.environment import cache_folder

QUIRE = f"{sys.executable} -m quire"


def call(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    return int(ended.value.code or 0)


def shell(command: str) -> subprocess.CompletedProcess[bytes]:
    """A command of the shell, which can close streams; `quire` is the command under test."""
    return subprocess.run(
        ["sh", "-c", command.replace("quire", QUIRE)],
        capture_output=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


class Input:
    """Standard input: a file, or a pipe that is `closed` after its bytes or stays open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        self._monkeypatch, self._path = monkeypatch, path
        self._open = contextlib.ExitStack()

    def file(self, data: bytes) -> None:
        self._path.write_bytes(data)
        self._monkeypatch.setattr(sys, "stdin", self._open.enter_context(self._path.open()))

    def pipe(self, data: bytes, closed: bool = True) -> None:
        reader, writer = os.pipe()
        os.write(writer, data)
        self._monkeypatch.setattr(sys, "stdin", self._open.enter_context(os.fdopen(reader)))
        if closed:
            os.close(writer)
        else:
            self._open.callback(os.close, writer)

    def close(self) -> None:
        self._open.close()


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):  # type: ignore[no-untyped-def]
    given = Input(monkeypatch, tmp_path / "stdin")
    yield given
    monkeypatch.undo()
    given.close()


def test_version_is_that_of_the_installed_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--version") == 0
    assert capsys.readouterr().out == f"quire {version('quire')}\n"
    assert quire.__version__ == version("quire")


def test_the_version_of_a_tree_that_is_not_installed_is_not_known(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert call("--version") == 0
    assert capsys.readouterr().out == "quire 0+unknown\n"


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == 0
    assert 'quire run demo "Tell me a story' in capsys.readouterr().out
    assert call("run", "--help") == 0
    text = capsys.readouterr().out
    assert call("help", "run") == 0
    assert capsys.readouterr().out == text
    flags = ("--temperature", "--max-model-len", "--quantization", "--no-enable-prefix-caching", "--json")
    for word in (*flags, "MODEL ", "PROMPT ", "--max-num-seqs N", "(default: 4)", "512M or 4G"):
        assert word in text
    for python in ("None", "max_model_len", "max_num_seqs"):
        assert python not in text
    assert call("help", "runn") == 2


def test_deploy_has_no_flags_of_several_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("deploy", "--help") == 0
    text = capsys.readouterr().out
    assert "--max-queued-tokens" in text
    for flag in ("--max-loaded-memory", "--idle-unload", "--load-wait"):
        assert flag not in text


def test_answer_once(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("run", "demo", "Hi!", "--temperature", "0.9", "--max-tokens", "12", "--seed", "5")
    assert call(*arguments) == 0
    first = capsys.readouterr()
    assert first.out.strip()
    for word in ("prompt tokens", "cached", "output tokens", "first token after", "tokens/s"):
        assert word in first.err
    assert call(*arguments) == 0
    assert capsys.readouterr().out == first.out
    assert call("run", "Hi there!", "--max-tokens", "1") == 0  # no model named: the demo
    assert "1 output token ·" in capsys.readouterr().err


def test_flags_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for argv in (
        ["demo", "What is 3 + 4?", "--system", "Be brief", "--max-tokens", "6"],
        ["demo", "--system", "Be brief", "What is 3 + 4?", "--max-tokens", "6"],
        ["--system", "Be brief", "--max-tokens", "6", "demo", "--", "What is 3 + 4?"],
    ):
        assert call("run", *argv) == 0
        answers.append(capsys.readouterr().out)
    assert len(set(answers)) == 1
    assert call("run", "--raw", "--max-tokens", "2", "--", "demo", "--help") == 0


def test_every_stop_text_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", "Tell me a story", "--json") == 0
    whole = json.loads(capsys.readouterr().out)["text"]
    stop = whole[12:18]
    assert call("run", "Tell me a story", "--json", "--stop", stop, "--stop", "no such words") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["text"] == whole[: whole.index(stop)]
    assert report["finish_reason"] == "stop"


def test_sizes_take_units(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = []
    for size in ("8M", "8000000", "8.0 MB", "8000k"):
        assert call("inspect", "demo", "--json", "--kv-cache-memory-bytes", size) == 0
        sizes.append(json.loads(capsys.readouterr().out)["memory"]["kv_cache_bytes"])
    assert len(set(sizes)) == 1
    assert call("inspect", "demo", "--json", "--kv-cache-memory-bytes", "8Mi") == 0
    assert json.loads(capsys.readouterr().out)["memory"]["kv_cache_bytes"] > sizes[0]


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        (["run", "demo", "hi", "--max-token", "3"], 2, "did you mean '--max-tokens'?"),
        (["run", "demo", "hi", "there"], 2, 'put the prompt in quotes: quire run demo "hi there"'),
        (["run", "say", "hi", "there"], 2, 'quire run demo "say hi there"'),
        (["run", "demo", "hi", "--" + "x" * 500], 2, "xxx...'"),
        (["run", "demo", "hi", "--temperature", "9"], 1, "temperature must be a number from 0 to 2"),
        (["run", "demo", "hi", "--top-k", "few"], 2, "error: --top-k: 'few' is not a whole number"),
        (["run", "demo", "hi", "--device", "rocm:0"], 2, "'rocm:0' is not supported yet"),
        (["run", "demo", "hi", "--device", "cuda:0"], 1, "pip install 'quire[cuda]'"),
        (["run", "demo", "hi", "--kv-cache-memory-bytes", "4X"], 2, "512M"),
        (["serve", "--ttft-goal", "0s"], 2, "'0s' is not a duration"),
        (["run", "demo", "hi", "--raw", "--system", "Be brief"], 2, "--system cannot be combined"),
        (["run", "demo", "h\udce9"], 1, "PROMPT is not UTF-8"),
        (["run", "demo", " "], 1, "the prompt is empty"),
        (["run", "no/such/folder", "hi"], 1, "no such folder"),
        (["run", "hello"], 1, 'to ask the demo model: quire run demo "hello"'),
        (["run", "demos"], 1, "did you mean 'demo'?"),
        (["run", "nosuch", "hello"], 1, "hint: give the path of a model's folder"),
        (["inspect", "nosuch"], 1, "hint: give the path of a model's folder"),
        (["inspect", "some/model.gguf"], 1, "no such file"),
        (["inspect", __file__], 1, "test_cli.py: not a model: there is no config.json beside it"),
        (["run", "demo", "hi", "--max-num-seqs", "0"], 1, "error: --max-num-seqs 0 is out of range"),
        (["run", "demo", "hi", "--max-tokens", "0"], 1, "--max-tokens must be an integer from 1 to"),
        (["inspect", "demo", "--quantization", "int3"], 2, "did you mean 'int8'?"),
        (["inspect"], 2, "quire inspect demo"),
        (["inspect", "demo", "demo"], 2, "unknown argument 'demo'"),
        (["runn"], 2, "did you mean 'run'?"),
        (["--json"], 2, "unknown argument '--json'"),
        (["serve", "--lora-modules", "a=b"], 2, "hint: --adapter-dir loads each sub-folder"),
        (["serve", "--enable-lora"], 2, "hint: --adapter-dir, a folder of adapters"),
        (["run", "--max-loras=4"], 2, "see --max-adapters"),
        (["run", "--enforce-eager"], 2, "there is no compile step"),
    ],
)
def test_errors_say_what_to_do(
    argv: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*argv) == status
    printed = capsys.readouterr().err
    assert words in printed
    lines = printed.splitlines()
    assert len(lines) <= 2
    assert lines[0].startswith("error: ")
    assert all(line.startswith("hint: ") for line in lines[1:])


def test_prompt_from_standard_input_and_json(stdin: Input, capsys: pytest.CaptureFixture[str]) -> None:
    stdin.pipe(b"What is 3 + 4?\n")
    assert call("run", "--json", "--max-tokens", "8", "--temperature", "0") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["output_tokens"] <= 8
    assert report["prompt_tokens"] > 5
    assert report["time_to_first_token_s"] > 0
    assert report["time_to_first_token_s"] == round(report["time_to_first_token_s"], 4)
    assert report["error"] is None
    for nothing in (b"", b" \n"):
        stdin.file(nothing)
        assert call("run") == 1
        assert "the prompt is empty" in capsys.readouterr().err


def test_prompt_and_standard_input_together(stdin: Input, capsys: pytest.CaptureFixture[str]) -> None:
    """Compared by what the model sees: the number of tokens of the raw prompt."""
    seen = []
    arguments = ("--raw", "--json", "--max-tokens", "1")
    for give in (stdin.file, stdin.pipe):
        give(b"a fox\na lantern\n")
        assert call("run", "demo", "Tell of:", *arguments) == 0
        seen.append(json.loads(capsys.readouterr().out)["prompt_tokens"])
    stdin.file(b"")
    assert call("run", "demo", "Tell of:\n\na fox\na lantern", *arguments) == 0
    seen.append(json.loads(capsys.readouterr().out)["prompt_tokens"])
    assert len(set(seen)) == 1


def test_a_silent_pipe_is_not_waited_for(
    stdin: Input, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "STDIN_WAIT_S", 0.05)
    stdin.pipe(b"", closed=False)
    assert call("run", "demo", "Hi!", "--max-tokens", "1") == 0
    assert "standard input is open but has no data" in capsys.readouterr().err
    stdin.pipe(b" plus 4", closed=True)
    assert call("run", "demo", "3", "-", "--max-tokens", "1") == 0


def test_a_wrong_model_is_refused_before_standard_input_is_read(
    stdin: Input, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin.pipe(b"", closed=False)  # would wait without end
    assert call("run", "demos") == 1
    monkeypatch.setenv("QUIRE_OFFLINE", "1")
    assert call("run", "some/model-that-nobody-has") == 1


def test_standard_input_that_is_no_text(stdin: Input, capsys: pytest.CaptureFixture[str]) -> None:
    stdin.file(b"h\xe9llo")
    assert call("run", "demo") == 1
    assert "standard input is not UTF-8 (byte 0xE9 at position 1)" in capsys.readouterr().err


def test_ctrl_c_while_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(argv: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("quire.cli.parser.parse", interrupted)
    assert call("run") == 130
    code = "import sys, quire.cli.main; print('argparse' in sys.modules, 'quire.config' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert ended.stdout == b"False False\n"  # what takes time is imported where Ctrl-C is caught


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ("quire run demo <&-", 1, b"the prompt is empty"),
        ("quire run demo hi --max-tokens 2 >/dev/full", 1, b"No space left"),
        ("quire --help >/dev/full", 1, b"No space left"),
        ("quire run demo hi >&-", 1, b"standard output is closed"),
        ("quire run demo hi --max-tokens 2 2>&-", 0, b""),
        ("quire run demo hi --max-tokens 2 2>/dev/full", 0, b""),
        ("quire run demos hi <&- >&- 2>&-", 1, b""),
        ("quire run demo 'Tell me a story' | head -c 3 >/dev/null", 0, b""),
    ],
)
def test_streams_that_are_closed_or_full(command: str, status: int, words: bytes) -> None:
    if "/dev/full" in command and not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    ended = shell(command)
    assert ended.returncode == status
    assert words in ended.stderr
    assert b"Traceback" not in ended.stderr
    assert b"Exception" not in ended.stderr


def test_output_that_the_terminal_cannot_show() -> None:
    code = "from quire.cli.terminal import prepare_streams; prepare_streams(); print('caf\\xe9')"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (ended.returncode, ended.stdout) == (0, b"caf?\n")


def test_a_model_without_tokenizer_or_template(
    tmp_path: Path, demo_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(demo_folder / name)
    assert call("run", str(tmp_path), "hi") == 1
    assert "no tokenizer" in capsys.readouterr().err
    (tmp_path / "tokenizer.json").symlink_to(demo_folder / "tokenizer.json")
    assert call("run", str(tmp_path), "hi", "--system", "Be brief") == 1
    assert "no chat template" in capsys.readouterr().err
    assert call("run", str(tmp_path), "Once upon", "--max-tokens", "2") == 0
    assert "continues the text" in capsys.readouterr().err


def test_inspect(capsys: pytest.CaptureFixture[str], demo_folder: Path) -> None:
    assert call("inspect", "demo", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["architecture"] == "LlamaForCausalLM"
    file_bytes = (demo_folder / "model.safetensors").stat().st_size
    assert sum(facts["weight_bytes"].values()) <= file_bytes <= sum(facts["weight_bytes"].values()) + 8192
    assert facts["parameters"] * 2 == sum(facts["weight_bytes"].values())
    assert (facts["fits"], facts["problem"], facts["weights_here"]) == (True, None, True)
    assert (facts["backend"], facts["kv_cache_dtype"]) == ("native", "bfloat16")
    assert facts["num_threads"] >= 1
    assert facts["drafts"] == "from texts and grammars"
    assert call("inspect", "demo", "--quantization", "int4") == 0
    shown = capsys.readouterr().out
    for word in ("int4", "parameters", "KV cache", "total", "backend", f"C++ for {facts['isa']}"):
        assert word in shown
    assert call("inspect", "demo", "--device", "reference") == 0
    shown = capsys.readouterr().out
    for word in ("NumPy, float32", "MB as float32"):
        assert word in shown
    assert call("inspect", "demo", "--device", "reference", "--quantization", "int8") == 0
    assert "MB, unquantized ones as float32" in capsys.readouterr().out


def _model(folder: Path, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIGS["llama"], **config}))
    return folder


def test_inspect_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _model(tmp_path / f"[bold]{'x' * 80}[link]")
    assert call("inspect", str(folder)) == 0
    shown = capsys.readouterr().out
    assert f"model                 {folder}" in shown.splitlines()[0]  # whole, and its brackets are text
    assert "none here: sizes from config.json" in shown
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert call("inspect", str(folder)) == 0
    assert "never opened" in capsys.readouterr().out


STEERING = "\x1b[2J\x1b]0;title\x07\n\u202e"
LIES = {
    "a pipe": lambda path: os.mkfifo(path),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a name that steers": lambda path: path.write_text(json.dumps({"architectures": [STEERING]})),
    "a name of a megabyte": lambda path: path.write_text(json.dumps({"architectures": ["A" * 10**6]})),
    "a key that steers": lambda path: path.write_text('{"\\u001b[2J": 1, "\\u001b[2J": 2}'),
    "no UTF-8": lambda path: path.write_bytes(b'{"\xff": 1}'),
}


@pytest.mark.parametrize("label", LIES)
@pytest.mark.parametrize("command", ["inspect", "run"])
def test_a_config_that_lies_is_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, label: str
) -> None:
    LIES[label](tmp_path / "config.json")
    assert call(command, str(tmp_path), *(["hello"] if command == "run" else [])) == 1
    out, err = capsys.readouterr()
    lines = err.removesuffix("\n").split("\n")
    assert out == ""
    assert [line.partition(":")[0] for line in lines] in (["error"], ["error", "hint"])
    assert all(line.isprintable() for line in lines)
    assert len(err) < 1000


@pytest.mark.parametrize(("name", "most"), [("minicpm3", ""), ("deepseek_v32", ", of at most 24 positions")])
def test_inspect_of_latents(name: str, most: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    assert call("inspect", str(tmp_path)) == 0
    found = capsys.readouterr().out
    assert f"2 layers, hidden 16, 4 query heads over latents of 12 + 4 numbers{most}\n" in found


def test_inspect_of_entries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    queries = "3 layers, hidden 16, 4 query heads over vectors of 12 numbers, of 20 positions"
    windows = {"layer_types": ["sliding_attention"] * 3}
    for changes, entries in (({}, " and of entries of 4 (at most 5) or 8 tokens"), (windows, "")):
        (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["deepseek_v4"], **changes}))
        assert call("inspect", str(tmp_path)) == 0
        found = capsys.readouterr().out
        assert f"{queries}{entries}\n" in found
        assert found.partition("KV cache per token")[2].partition("\n")[0].endswith(" beyond windows")
        assert call("inspect", str(tmp_path), "--json") == 0
        facts = json.loads(capsys.readouterr().out)
        of_entries = (12 + 6) * 2 // 4 + 12 * 2 // 8  # numbers of 16 bits: vectors and index keys, vectors
        assert facts["kv_bytes_beyond_windows"] == (of_entries if entries else 0)


def test_inspect_of_what_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _model(tmp_path / "large", hidden_size=1 << 17, intermediate_size=1 << 20)
    assert call("inspect", str(folder)) == 0
    shown = capsys.readouterr().out
    assert "short: the weights alone are too large" in shown
    assert "  KV cache  " not in shown
    assert call("inspect", str(folder), "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["fits"] is False
    assert facts["problem"]
    assert "hint" not in facts["problem"]


def test_a_damaged_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for model in (tmp_path, tmp_path / "model.gguf"):
        assert call("run", str(model), "hi") == 1
        assert "4 bytes are too few for a GGUF file" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["replay", "quantize demo -o", "cache --prefix-cache-dir", "page --out"])
def test_a_home_of_nobody(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*command.split(), "~nobody-has-this-name/x") == 1
    error = capsys.readouterr().err
    assert "no home folder of ~nobody-has-this-name is known" in error
    assert "hint: write the path without ~" in error


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As in a container that runs with any number of a user: nothing is cached."""
    for name in ("HOME", "QUIRE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    assert cache_folder() == Path("/.cache/quire")
    assert call("cache", "ls") == 0
    assert call("run", "demo", "Hi", "--max-tokens", "3", "--device", "reference") == 0
    assert "3 output tokens" in capsys.readouterr().err


def test_plural() -> None:
    assert [counted(n, "token") for n in (0, 1, 2000)] == ["0 tokens", "1 token", "2,000 tokens"]


def test_a_model_cannot_steer_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "a\x1b[2Jb\tc\nd\x07\x9b"
    for is_terminal, shown in ((False, text), (True, "a\u241b[2Jb\tc\nd\u2407\ufffd")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda answer=is_terminal: answer, raising=False)
        writer = terminal.AnswerWriter(sys.stdout)
        writer.write(text)
        writer.end()
        assert capsys.readouterr().out == shown  # a pipe gets what the model said


def test_notes_and_errors_break_no_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = " · ".join(f"{number} words of this part" for number in range(9))
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda answer=is_terminal: answer, raising=False)
        monkeypatch.setenv("TERM", "dumb")
        monkeypatch.setenv("COLUMNS", "50")
        terminal.note(said)
        terminal.complain("long " * 20, "give less")
        lines = capsys.readouterr().err.splitlines()
        assert (max(map(len, lines)) <= 50) == is_terminal
        assert lines[0] == "0 words of this part · 1 words of this part ·" if is_terminal else said
        assert lines[-1] == "hint: give less"
