"""A conversation in the terminal: what was said, what is said next, and what it took."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from quire.cli.chosen import in_words
from quire.cli.options import in_flags
from quire.cli.terminal import AnswerWriter, complain, counted, note
from quire.errors import RequestError

if TYPE_CHECKING:
    from quire.frontend import Encoded
    from quire.llm import LLM
    from quire.outputs import RequestOutput
    from quire.sampling_params import SamplingParams

HELP = """  /new           forget the conversation
  /system TEXT   set the system message; without TEXT show it, with - remove it
  /help          this list
  /exit          leave (or Ctrl-D, or Ctrl-C twice)
A space before the / sends a line as it is."""
LEAVE_S = 1.0  # Ctrl-C again within this time leaves
_IN_LINE = 4  # of these in the first line


@dataclass
class Conversation:
    """Messages so far, and the model that answers. With `raw` each prompt stands alone."""

    llm: LLM
    params: SamplingParams
    raw: bool
    system: str | None
    as_json: bool
    messages: list[dict[str, Any]] = field(default_factory=list)
    _interrupted_s: float = -math.inf  # when Ctrl-C was pressed last

    def hold(self) -> int:
        """Read, answer, repeat, until the end of input: 0, or after Ctrl-C twice: 130.

        An engine that died ends it too.
        """
        self._introduce()
        while True:
            try:
                if not self._obey(_read_line()):
                    return 0
            except KeyboardInterrupt:
                print()
                if self._interrupt():
                    return 130
                note("Ctrl-C again leaves, or Ctrl-D")
            except EOFError:
                print()
                return 0
            except RequestError as error:
                complain(in_flags(error.message), error.hint and in_flags(error.hint))

    def _interrupt(self) -> bool:
        """Note that Ctrl-C was pressed. True if that was so a moment ago, too."""
        before, self._interrupted_s = self._interrupted_s, time.monotonic()
        return self._interrupted_s - before < LEAVE_S

    def _introduce(self) -> None:
        """What was chosen for this model, and what keys do."""
        said = in_words(self.llm.chosen)
        note(" · ".join(said[:_IN_LINE]))
        note(" · ".join([*said[_IN_LINE:], "continues what you type" if self.raw else "chat"]))
        note("Ctrl-C stops an answer, twice it leaves · /help lists commands · Ctrl-D ends")

    def _obey(self, line: str) -> bool:
        """Do what a line says. False when that is to leave."""
        text = line if self.raw else line.strip()
        if line.startswith("/") and "\n" not in line:
            return self._command(line)
        if line.strip().lower() in ("exit", "quit"):
            note("Ctrl-D or /exit leaves")
        elif text.strip():
            self.answer(text)
        return True

    def _command(self, line: str) -> bool:
        name, *rest = line.split(maxsplit=1)
        match name.lower():
            case "/exit" | "/quit" | "/bye":
                return False
            case "/new":
                said = counted(len(self.messages) // 2, "exchange")
                note(f"{said} forgotten" if self.messages else "nothing was said yet")
                self.messages.clear()
            case "/system":
                self._set_system(rest[0].strip() if rest else None)
            case "/help":
                print(HELP)
            case _:
                print(f"unknown command {name[:40]}\n{HELP}")
        return True

    def _set_system(self, text: str | None) -> None:
        if self.raw:
            note("no chat template is in use, so a system message has no place")
            return
        if text is not None:
            self.system = None if text == "-" else text
        is_now = f"system message{' is now' if text else ''}: {self.system}"
        note(is_now if self.system else "no system message")

    def answer(self, prompt: str) -> int:
        """Answer one prompt as it comes, then say what it took. 0, 1 if it failed, 130 after Ctrl-C."""
        output: RequestOutput | None = None
        failure, status = None, 0
        writer = AnswerWriter()
        try:
            encoded = self.llm.frontend.encode(prompt) if self.raw else self._fit(prompt)
            stream = cast("Generator[RequestOutput]", self.llm.stream(encoded, self.params))
            try:
                for output in stream:
                    if not self.as_json:
                        writer.write(output.outputs[0].delta)
            finally:
                stream.close()  # aborts what is left
        except KeyboardInterrupt:
            self._interrupt()
            status = 130
        except RequestError as error:
            if not self.as_json:
                raise
            failure, status = error.message, 1
        writer.end()
        if output is not None and output.outputs[0].error is not None:
            failure, status = output.outputs[0].error, 1
        if output is not None and not failure:
            self._remember(prompt, output.outputs[0].text)
        self._conclude(output, failure, interrupted=status == 130)
        return status

    def _remember(self, prompt: str, text: str) -> None:
        if not self.raw:
            said = (("user", prompt), ("assistant", text))
            self.messages += [{"role": role, "content": content} for role, content in said]

    def _conclude(self, output: RequestOutput | None, failure: str | None, interrupted: bool) -> None:
        """The line after an answer: of JSON, or for people."""
        if self.as_json:
            print(json.dumps(_report(output, failure, interrupted), ensure_ascii=False), flush=True)
        elif output is not None:
            print("" if output.outputs[0].text.endswith("\n") else "\n", end="", flush=True)
        elif interrupted:
            print()
        if failure is not None:
            complain(failure)
        elif interrupted:
            note("stopped")
        elif output is not None and not self.as_json:
            note(_summary(output))

    def _fit(self, prompt: str) -> Encoded:
        """The conversation as tokens. Its beginning is forgotten when no room is left for an answer.

        When even the prompt alone leaves none, it is sent alone: the engine says what is wrong, if it is.
        """
        longest = self.llm.frontend.max_model_len
        room = longest - min(self.params.max_tokens or longest, longest // 4)
        encoded = self._encode(prompt, forget=0)
        if len(encoded.token_ids) <= room or not self.messages:
            return encoded
        count = len(self.messages) // 2
        alone = self._encode(prompt, forget=count)
        if len(alone.token_ids) >= longest:
            return alone  # will be refused: nothing is forgotten for its sake
        forget = 0
        while len(encoded.token_ids) > room and forget < count:
            forget += 1
            encoded = self._encode(prompt, forget)
        del self.messages[: 2 * forget]
        note(f"{counted(forget, 'exchange')} forgotten: the conversation outgrew its {longest:,} tokens")
        return encoded

    def _encode(self, prompt: str, forget: int) -> Encoded:
        system = [{"role": "system", "content": self.system}] if self.system else []
        said = self.messages[2 * forget :]
        return self.llm.frontend.encode_chat([*system, *said, {"role": "user", "content": prompt}])


def _read_line() -> str:
    """A line, or lines that were pasted together."""
    import readline

    readline.parse_and_bind("set enable-bracketed-paste on")  # or each line of a paste would be a prompt
    if sys.stdout.isatty():
        return input("\n>>> ")
    print("\n>>> ", end="", file=sys.stderr, flush=True)  # answers go elsewhere, a file say
    return input()


def _report(output: RequestOutput | None, failure: str | None, interrupted: bool) -> dict[str, Any]:
    """An answer and what it took, for scripts. Without an output nothing had come."""
    choice = output.outputs[0] if output is not None else None
    reason = "interrupted" if interrupted else "error" if failure else None
    report: dict[str, Any] = {
        "text": choice.text if choice else "",
        "finish_reason": reason or (choice.finish_reason if choice else None),
        "error": failure,
        "prompt_tokens": len(output.prompt_token_ids) if output else None,
        "cached_tokens": output.num_cached_tokens if output else None,
        "output_tokens": len(choice.token_ids) if choice else 0,
        "time_to_first_token_s": None,
        "tokens_per_s": None,
    }
    times = output.metrics if output else None
    if times is not None and times.first_token_s is not None and times.finished_s is not None:
        report["time_to_first_token_s"] = round(times.first_token_s - times.arrival_s, 4)
        seconds = times.finished_s - times.first_token_s
        if seconds > 0 and report["output_tokens"] > 1:
            report["tokens_per_s"] = round((report["output_tokens"] - 1) / seconds, 1)
    return report


def _summary(output: RequestOutput) -> str:
    """The same as one line for people."""
    report = _report(output, None, False)
    parts = [f"{counted(report['prompt_tokens'], 'prompt token')} ({report['cached_tokens']:,} cached)"]
    parts.append(counted(report["output_tokens"], "output token"))
    if (first := report["time_to_first_token_s"]) is not None:
        parts.append(f"first token after {f'{first:.1f} s' if first >= 1 else f'{first * 1000:.0f} ms'}")
    if (speed := report["tokens_per_s"]) is not None:
        parts.append(f"{speed:,.1f} tokens/s")
    if report["finish_reason"] == "length":
        parts.append("stopped at the length limit")
    return " · ".join(parts)
