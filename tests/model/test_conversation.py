"""Conversations: what is kept and forgotten, how answers end, and the program in a real terminal."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from pseudo_terminal import Terminal
from tiny_vision import NUM_TOKENS, picture, write_qwen3_vl

from quire.cli import terminal_chat
from quire.cli.terminal_chat import TerminalChat
from quire.errors import EngineDead, RequestError
from quire.llm import LLM
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import SamplingParams
from quire.types import RequestMetrics

# An answer that lasts: every step takes its time, whatever the machine.
SLOW = """import time
from quire.engine.engine import Engine
step = Engine.step
Engine.step = lambda self: time.sleep(0.02) or step(self)
from quire.cli.main import main
main()"""


def quire_run(*flags: str, slow: bool = False, columns: int = 80, **environment: str) -> Terminal:
    """`quire run` with these flags in a terminal of its own."""
    program = ("-c", SLOW) if slow else ("-m", "quire")
    command = [sys.executable, *program, "run", "--temperature", "0", *flags]
    return Terminal(command, columns=columns, **environment)


@pytest.fixture(scope="module")
def llm():  # type: ignore[no-untyped-def]
    with contextlib.closing(LLM("demo", max_model_len=128, max_num_seqs=2)) as model:
        yield model


def chat(llm: object, as_json: bool = False, raw: bool = False, **params: object) -> TerminalChat:
    chosen = SamplingParams(temperature=0, **{"max_tokens": 4, **params})  # type: ignore[arg-type]
    return TerminalChat(llm, chosen, raw=raw, system=None, as_json=as_json)  # type: ignore[arg-type]


def test_a_conversation_forgets_its_beginning(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    held = chat(llm)
    for _ in range(3):
        assert held.answer("Tell me about the town and the river and the old bridge, please.") == 0
    assert len(held.messages) == 6
    capsys.readouterr()
    assert held.answer("What is 3 + 4? " * 6) == 0
    said = capsys.readouterr().err
    assert said.count("dropped") == 1
    assert "exchange" in said
    assert held.messages[-2]["content"].startswith("What is 3")
    kept = list(held.messages)
    with pytest.raises(RequestError):
        held.answer("too long " * 300)
    assert held.messages == kept


class Failing:
    """An LLM whose streams end as given."""

    def __init__(self, end: BaseException | str, chunks: int = 1) -> None:
        self.end, self.chunks, self.chosen = end, chunks, {"model": "m", "device_map": "one"}
        self.frontend = SimpleNamespace(encode=lambda prompt: prompt)

    def stream(self, prompt: object, params: object):  # type: ignore[no-untyped-def]
        output = RequestOutput("0", None, [1, 2], [CompletionOutput(0)])
        for _ in range(self.chunks):
            output.outputs[0].delta = output.outputs[0].text = "one"
            yield output
        if isinstance(self.end, BaseException):
            raise self.end
        output.outputs[0].finish_reason, output.outputs[0].error = "error", self.end
        yield output


def test_a_failed_answer_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(Failing("out of luck"), raw=True).answer("hi") == 1
    assert "error: out of luck" in capsys.readouterr().err
    assert chat(Failing("out of luck"), raw=True, as_json=True).answer("hi") == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["finish_reason"], report["error"]) == ("error", "out of luck")
    assert chat(Failing(RequestError("no"), chunks=0), raw=True, as_json=True).answer("hi") == 1
    assert json.loads(capsys.readouterr().out)["error"] == "no"


@pytest.mark.parametrize("chunks", [0, 1])
def test_an_interrupted_answer_says_so(chunks: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(Failing(KeyboardInterrupt(), chunks), raw=True).answer("hi") == 130
    assert "stopped" in capsys.readouterr().err
    assert chat(Failing(KeyboardInterrupt(), chunks), raw=True, as_json=True).answer("hi") == 130
    report = json.loads(capsys.readouterr().out)
    assert (report["text"], report["finish_reason"]) == ("one" * chunks, "interrupted")


def test_a_dead_engine_ends_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal_chat, "_read_line", lambda: "hi")
    with pytest.raises(EngineDead):
        chat(Failing(EngineDead("gone")), raw=True).hold()
    assert "device map one" in capsys.readouterr().err  # whatever was chosen is shown


def test_conversation_in_a_terminal() -> None:
    terminal = quire_run("--max-model-len", "128")
    shown = terminal.read_until(">>> ")
    for words in ("demo", "LlamaForCausalLM", "native backend", "context of 128 tokens", "\x1b[2m"):
        assert words in shown
    terminal.type("Hello!\n")
    assert "(0 cached)" in terminal.read_until(">>> ")
    terminal.type("What is 2 + 2?\n")
    assert "cached)" in terminal.read_until(">>> ")
    terminal.type("Say that again, please, and say it slowly. " * 4 + "\n")
    assert "dropped: the conversation exceeded 128 tokens" in terminal.read_until(">>> ")
    terminal.type("\x1b[200~What is\n3 + 4?\x1b[201~\n")  # a paste of two lines is one prompt
    assert terminal.read_until(">>> ").count("output token") == 1
    time.sleep(0.3)  # nobody is so quick: between its prompt and its waiting, readline is deaf
    terminal.type("\x03")
    assert "press Ctrl-C again or Ctrl-D to exit" in terminal.read_until(">>> ")
    assert terminal.close() == 0


def test_commands() -> None:
    terminal = quire_run(NO_COLOR="1")
    assert "\x1b[2m" not in terminal.read_until(">>> ")
    for typed, words in (
        ("/help", "/system TEXT"),
        ("/new", "the conversation is empty"),
        ("/system", "no system message"),
        ("/system Answer in one word.", "system message is now: Answer in one word."),
        ("/System", "system message: Answer in one word."),
        ("/system -", "no system message"),
        ("/where", "unknown command /where"),
        ("exit", "use Ctrl-D or /exit to exit"),
        ("Hi!", "cached)"),
        ("/new", "1 exchange removed"),
    ):
        terminal.type(typed + "\n")
        assert words in terminal.read_until(">>> ")
    terminal.type("/EXIT now\n")
    assert terminal.process.wait(30) == 0
    os.close(terminal.master)


def test_pictures_go_before_the_next_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (1, 2):
        (tmp_path / f"my cat {seed}.png").write_bytes(picture(seed))
    (tmp_path / "text.png").write_text("no picture")
    cat, dog, text, none = (tmp_path / name for name in ("my cat 1.png", "my cat 2.png", "text.png", "none"))
    typed = [f"/image {cat}", "Hi", "Hi", f"/image {dog}", f"/image {cat}", "Hi"]
    typed += [f"/image {none}", "/image", f"/image {text}", "Hi", "Hi", "/exit"]
    lines = iter(typed)
    monkeypatch.setattr(terminal_chat, "_read_line", lambda: next(lines))
    with contextlib.closing(LLM(str(write_qwen3_vl(tmp_path / "model")), device="reference")) as seeing:
        held = chat(seeing, as_json=True, max_tokens=1)
        held.hold()
    out, err = capsys.readouterr()
    answers = [json.loads(line) for line in out.splitlines()]
    first, second, third, failed, fifth = (answer["prompt_tokens"] for answer in answers)
    assert NUM_TOKENS < first < second < first + NUM_TOKENS  # a picture is sent once, and stays
    assert 2 * NUM_TOKENS < third - second < 3 * NUM_TOKENS
    assert failed is None
    assert third < fifth < third + NUM_TOKENS
    assert "2 images before the next message" in err
    assert f"{none}: no such file" in err
    assert "not a picture" in answers[3]["error"]
    assert [type(message["content"]) for message in held.messages[::2]] == [list, str, list, str]


def test_a_model_that_reads_no_pictures_says_so(llm: LLM, tmp_path: Path) -> None:
    part = {"type": "image", "image": picture(1)}
    with pytest.raises(RequestError, match="this model reads no images"):
        chat(llm).attach(part)
    with pytest.raises(RequestError, match="needs a chat template"):
        chat(llm, raw=True).attach(part)


def test_ctrl_c_stops_an_answer_and_not_the_program() -> None:
    terminal = quire_run("--max-model-len", "512", slow=True, TERM="dumb")
    assert "\x1b[2m" not in terminal.read_until(">>> ")
    for _ in range(2):
        terminal.type("Tell me a story about a fox and a lantern.\n")
        terminal.read_until("\n")
        terminal.read_until(" ")  # the first words of the answer are there
        terminal.type("\x03")
        shown = terminal.read_until(">>> ")
        assert "stopped" in shown
        assert "output token" not in shown
        assert "Traceback" not in shown
    terminal.type("/new\n")
    assert "2 exchanges removed" in terminal.read_until(">>> ")
    assert terminal.close() == 0


def test_ctrl_c_twice_leaves() -> None:
    terminal = quire_run("--max-model-len", "512", slow=True)
    assert "Ctrl-C stops an answer, twice exits" in terminal.read_until(">>> ")
    terminal.type("Tell me a story about a fox and a lantern.\n")
    terminal.read_until("\n")
    terminal.read_until(" ")
    terminal.type("\x03")
    terminal.read_until(">>> ")
    assert terminal.press_until_it_ends("\x03") == 130
    assert "Traceback" not in terminal.rest()


def test_ctrl_c_is_twice_only_within_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Presses at these times, in seconds; where the conversation ends."""
    for presses, end in (((0, 0.5), 2), ((0, 1.5, 3, 3.5, 4), 4), ((0, 2, 4), None)):
        clock = iter(presses)
        taken = []

        def press(clock: Iterator[float] = clock, taken: list[float] = taken) -> str:
            if (now := next(clock, None)) is None:
                raise EOFError
            taken.append(now)
            monkeypatch.setattr(terminal_chat.time, "monotonic", lambda: now)
            raise KeyboardInterrupt

        monkeypatch.setattr(terminal_chat, "_read_line", press)
        assert chat(Failing("", 0), raw=True).hold() == (130 if end else 0)
        assert len(taken) == (end or len(presses))


def test_lines_end_between_words() -> None:
    told = "Tell me a story about a fox and a lantern."
    command = [sys.executable, "-m", "quire", "run", "demo", told, "--temperature", "0", "--max-tokens", "80"]
    plain = subprocess.run([*command, "--json"], capture_output=True, check=True, stdin=subprocess.DEVNULL)
    text = json.loads(plain.stdout)["text"]
    terminal = quire_run("demo", told, "--max-tokens", "80", columns=30, TERM="dumb", COLUMNS="")
    shown = terminal.read_until("prompt tokens").rpartition("\n")[0]
    lines = shown.replace("\r", "").rstrip("\n").split("\n")
    assert len(lines) > 5
    assert max(map(len, lines)) <= 30
    assert " ".join(lines).split() == text.split()
    terminal.close()


def test_the_last_line_says_what_took_a_notable_part_of_the_time() -> None:
    times = RequestMetrics(0.0, 0.5, 1.0, 10.0, 1, preempted_s=1.5, cached_saved_s=0.4, grammar_s=0.1)
    answer = CompletionOutput(0, text="a", token_ids=[1, 2], finish_reason="stop", metrics=times)
    output = RequestOutput("0", None, [1, 2, 3], [answer], metrics=times)
    line = terminal_chat._summary(output)
    assert line.endswith("tokens/s · 500 ms queued · 400 ms saved by the cache · 1.5 s preempted")
    times = RequestMetrics(0.0, 0.0, 1.0, 10.0, prefill_interference_s=0.25, decode_interference_s=0.5)
    output.metrics = times
    assert terminal_chat._summary(output).endswith("tokens/s · 750 ms added by others")
    output.metrics = RequestMetrics(0.0, 0.0001, 0.001, 0.002, cached_saved_s=0.0005)
    assert terminal_chat._summary(output).endswith("tokens/s")
