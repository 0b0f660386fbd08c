"""A chat in the terminal: the messages so far, the next answer, and its statistics."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from quire.cli.chosen import in_words
from quire.cli.options import in_flags
from quire.cli.shown_answer import ShownAnswer
from quire.cli.terminal import complain, counted, note
from quire.environment import user_path
from quire.errors import ConfigError, RequestError
from quire.images.prompt import NO_IMAGES, SEEING, image_part
from quire.images.reader import MAX_BYTES
from quire.outputs import drafts_in_words
from quire.regular_file import read_limited
from quire.text.reasoning import find_reasoning

if TYPE_CHECKING:
    from quire.frontend import Encoded
    from quire.llm import LLM
    from quire.outputs import RequestOutput
    from quire.sampling_params import SamplingParams
    from quire.text.tools import OutputFormat
    from quire.types import RequestMetrics

HELP = """  /new           start a new conversation
  /image FILE    put a picture before the next message
  /system TEXT   set the system message; without TEXT show it, with - remove it
  /help          show this list
  /exit          exit (also Ctrl-D, or Ctrl-C twice)
To send a line that starts with a /, put a space before it."""
EXIT_S = 1.0  # a second Ctrl-C within this time exits
_IN_LINE = 4  # settings in the first line
Content = str | list[dict[str, Any]]
_NOTABLE = 0.02  # parts of the time of an answer below this share are left out of its last line


@dataclass
class TerminalChat:
    """A conversation with a model. With `raw`, each prompt is continued without chat template or history.

    Reasoning before an answer is shown, and not kept: templates leave out that of earlier answers.
    """

    llm: LLM
    params: SamplingParams
    raw: bool
    system: str | None
    as_json: bool
    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[dict[str, Any]] = field(default_factory=list)  # of the next message
    _interrupted_s: float = -math.inf  # time of the last Ctrl-C
    _format: OutputFormat | None = None  # of answers with reasoning

    def __post_init__(self) -> None:
        if self.raw or find_reasoning("\n".join(self._templates.values())) is None:
            return
        from quire.text.tools import output_format_of

        self._format = output_format_of(self._templates, self.llm.frontend.tokenizer)
        if self._format.needs_special_tokens:
            self.params = replace(self.params, skip_special_tokens=False)

    @property
    def _templates(self) -> Mapping[str, str]:
        return self.llm.frontend.chat_template.templates

    def hold(self) -> int:
        """Read prompts and answer them. Returns 0 at the end of input, 130 after Ctrl-C twice.

        Raises EngineDead.
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
                note("press Ctrl-C again or Ctrl-D to exit")
            except EOFError:
                print()
                return 0
            except RequestError as error:
                complain(in_flags(error.message), error.hint and in_flags(error.hint))

    def _interrupt(self) -> bool:
        """Record a Ctrl-C. Return True if it is the second one within EXIT_S."""
        before, self._interrupted_s = self._interrupted_s, time.monotonic()
        return self._interrupted_s - before < EXIT_S

    def _introduce(self) -> None:
        """Show the settings chosen for this model, and the keys."""
        chosen = in_words(self.llm.chosen)
        note(" · ".join(chosen[:_IN_LINE]))
        note(" · ".join([*chosen[_IN_LINE:], "text completion" if self.raw else "chat"]))
        note("Ctrl-C stops an answer, twice exits · /help lists commands · Ctrl-D exits")

    def _obey(self, line: str) -> bool:
        """Run a line as a command or answer it. Return False to exit."""
        text = line if self.raw else line.strip()
        if line.startswith("/") and "\n" not in line:
            return self._command(line)
        if line.strip().lower() in ("exit", "quit"):
            note("use Ctrl-D or /exit to exit")
        elif text.strip():
            self.answer(text)
        return True

    def _command(self, line: str) -> bool:
        name, *rest = line.split(maxsplit=1)
        match name.lower():
            case "/exit" | "/quit" | "/bye":
                return False
            case "/new":
                exchanges = counted(len(self.messages) // 2, "exchange")
                note(f"{exchanges} removed" if self.messages else "the conversation is empty")
                self.messages.clear()
            case "/image":
                self._attach_file(rest[0].strip() if rest else "")
            case "/system":
                self._set_system(rest[0].strip() if rest else None)
            case "/help":
                print(HELP)
            case _:
                print(f"unknown command {name[:40]}\n{HELP}")
        return True

    def _set_system(self, text: str | None) -> None:
        if self.raw:
            note("a system message needs a chat template, and none is in use")
            return
        if text is not None:
            self.system = None if text == "-" else text
        is_now = f"system message{' is now' if text else ''}: {self.system}"
        note(is_now if self.system else "no system message")

    def attach(self, image: dict[str, Any]) -> None:
        """Put an image before the next message. Raises RequestError if the model cannot read it."""
        if self.raw:
            raise RequestError("an image needs a chat template, and none is in use")
        if not self.llm.frontend.sees:
            raise RequestError(NO_IMAGES, SEEING)
        self.images.append(image)

    def _attach_file(self, name: str) -> None:
        try:
            self.attach(picture(name))
        except ConfigError as error:
            complain(error.message, error.hint)
        else:
            note(f"{counted(len(self.images), 'image')} before the next message")

    def answer(self, prompt: str) -> int:
        """Stream the answer to one prompt, then its statistics. Returns 0, 1 on failure, 130 after Ctrl-C."""
        content = [*self.images, {"type": "text", "text": prompt}] if self.images else prompt
        self.images = []  # also of a message that is refused because of them
        output: RequestOutput | None = None
        failure, status = None, 0
        shown = ShownAnswer(None, silent=self.as_json)
        try:
            encoded = self.llm.frontend.encode(prompt) if self.raw else self._fit(content)
            if self._format is not None:
                parser = self._format.answer_parser(None, prompt=encoded.text or "")
                shown = ShownAnswer(parser, silent=self.as_json)
            stream = cast("Generator[RequestOutput]", self.llm.stream(encoded, self.params))
            try:
                for output in stream:
                    shown.push(output.outputs[0].delta)
            finally:
                stream.close()  # aborts what is left
        except KeyboardInterrupt:
            self._interrupt()
            status = 130
        except RequestError as error:
            if not self.as_json:
                raise
            failure, status = error.message, 1
        shown.end()
        if output is not None and output.outputs[0].error is not None:
            failure, status = output.outputs[0].error, 1
        if output is not None and not failure:
            self._remember(content, shown.text)
        self._conclude(output, shown, failure, interrupted=status == 130)
        return status

    def _remember(self, content: Content, text: str) -> None:
        if not self.raw:
            self.messages += [{"role": "user", "content": content}, {"role": "assistant", "content": text}]

    def _conclude(
        self, output: RequestOutput | None, shown: ShownAnswer, failure: str | None, interrupted: bool
    ) -> None:
        """Print the line after an answer: JSON, or a summary for people."""
        if self.as_json:
            said = {"text": shown.text} | ({"reasoning": shown.reasoning} if shown.reasoning else {})
            print(json.dumps(said | _report(output, failure, interrupted), ensure_ascii=False), flush=True)
        elif output is not None:
            print("" if shown.text.endswith("\n") else "\n", end="", flush=True)
        elif interrupted:
            print()
        if failure is not None:
            complain(failure)
        elif interrupted:
            note("stopped")
        elif output is not None and not self.as_json:
            note(_summary(output))

    def _fit(self, content: Content) -> Encoded:
        """Encode the conversation, dropping its oldest exchanges until there is room for an answer.

        If even the last message alone leaves no room, it is sent alone, and the engine reports the error.
        """
        longest = self.llm.frontend.max_model_len
        room = longest - min(self.params.max_tokens or longest, longest // 4)
        encoded = self._encode(content, forget=0)
        if len(encoded.token_ids) <= room or not self.messages:
            return encoded
        count = len(self.messages) // 2
        alone = self._encode(content, forget=count)
        if len(alone.token_ids) >= longest:
            return alone  # it will be refused: keep the conversation
        forget = 0
        while len(encoded.token_ids) > room and forget < count:
            forget += 1
            encoded = self._encode(content, forget)
        del self.messages[: 2 * forget]
        note(f"{counted(forget, 'exchange')} dropped: the conversation exceeded {longest:,} tokens")
        return encoded

    def _encode(self, content: Content, forget: int) -> Encoded:
        system = [{"role": "system", "content": self.system}] if self.system else []
        kept = self.messages[2 * forget :]
        return self.llm.frontend.encode_chat([*system, *kept, {"role": "user", "content": content}])


def picture(name: str) -> dict[str, Any]:
    """Return the picture in a file as a part of a message. Raises ConfigError if it cannot be read."""
    return image_part(read_limited(user_path(name), MAX_BYTES), name)


def _read_line() -> str:
    """Read a line, or several that were pasted together."""
    import readline

    readline.parse_and_bind("set enable-bracketed-paste on")  # or each pasted line would be a prompt
    if sys.stdout.isatty():
        return input("\n>>> ")
    print("\n>>> ", end="", file=sys.stderr, flush=True)  # standard output is a file or pipe
    return input()


def _report(output: RequestOutput | None, failure: str | None, interrupted: bool) -> dict[str, Any]:
    """Return how an answer ended and its statistics, for scripts. `output` is None if nothing was made."""
    choice = output.outputs[0] if output is not None else None
    reason = "interrupted" if interrupted else "error" if failure else None
    report: dict[str, Any] = {
        "finish_reason": reason or (choice.finish_reason if choice else None),
        "error": failure,
        "prompt_tokens": len(output.prompt_token_ids) if output else None,
        "cached_tokens": output.num_cached_tokens if output else None,
        "output_tokens": len(choice.token_ids) if choice else 0,
        "time_to_first_token_s": None,
        "tokens_per_s": None,
    }
    times = output.metrics if output else None
    if times is not None and times.num_drafted:
        report |= {"drafted_tokens": times.num_drafted, "accepted_tokens": times.num_accepted}
        report["drafting_gain"] = round(times.drafting_gain, 3)
    if times is not None and times.first_token_s is not None and times.finished_s is not None:
        report["time_to_first_token_s"] = round(times.first_token_s - times.arrival_s, 4)
        seconds = times.finished_s - times.first_token_s
        if seconds > 0 and report["output_tokens"] > 1:
            report["tokens_per_s"] = round((report["output_tokens"] - 1) / seconds, 1)
    return report


def _summary(output: RequestOutput) -> str:
    """Summarize an answer's statistics in one line."""
    report = _report(output, None, False)
    parts = [f"{counted(report['prompt_tokens'], 'prompt token')} ({report['cached_tokens']:,} cached)"]
    parts.append(counted(report["output_tokens"], "output token"))
    if (first := report["time_to_first_token_s"]) is not None:
        parts.append(f"first token after {_duration(first)}")
    if (speed := report["tokens_per_s"]) is not None:
        parts.append(f"{speed:,.1f} tokens/s")
    if output.metrics is not None:
        parts += _receipt(output.metrics)
    if report["finish_reason"] == "length":
        parts.append("stopped at the length limit")
    return " · ".join(parts)


def _receipt(times: RequestMetrics) -> list[str]:
    """Say what drafts gained, and what took or saved a notable part of the time."""
    drafting = times.num_accepted, times.num_drafted, times.decode_s, times.drafting_saved_s
    drafts = [drafts_in_words(*drafting)] if times.num_drafted else []
    total_s = (times.finished_s or times.arrival_s) - times.arrival_s
    seconds = {
        "queued": times.queue_s,
        "saved by the cache": times.cached_saved_s,
        "added by others": times.prefill_interference_s + times.decode_interference_s,
        "preempted": times.preempted_s,
        "waiting for the grammar": times.grammar_s,
    }
    notable = {name: value for name, value in seconds.items() if value >= max(0.001, _NOTABLE * total_s)}
    return drafts + [f"{_duration(value)} {name}" for name, value in notable.items()]


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
