"""`quire run`: chat in the terminal, or answer once."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.cli.options import add_engine_flags, add_sampling_flags, engine_options, sampling_options
from quire.errors import ConfigError, QuireError

if TYPE_CHECKING:
    from quire.llm import LLM
    from quire.outputs import RequestOutput

DESCRIPTION = """Chat with a model, or answer one prompt.

Without PROMPT it holds a conversation: Ctrl-C stops an answer, Ctrl-D ends. A prompt may also come
through a pipe. MODEL is a checkpoint folder, a hub id such as Qwen/Qwen3-0.6B, or 'demo' (default), a
toy that comes with Quire.
"""
HELP = """  /new      forget the conversation
  /system   set the system message, for example: /system Answer in one word.
  /help     this list
  /exit     leave (or Ctrl-D)"""


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "run",
        help="chat in the terminal, or answer once",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", default=None, metavar="MODEL")
    parser.add_argument("prompt", nargs="?", default=None, metavar="PROMPT")
    parser.add_argument("--system", metavar="TEXT", help="system message at the head of the conversation")
    parser.add_argument("--raw", action="store_true", help="continue PROMPT as it is, without chat template")
    parser.add_argument("--json", action="store_true", help="print each answer as one line of JSON")
    add_sampling_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(function=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Answer once when there is a prompt, else hold a conversation."""
    model, prompt = _model_and_prompt(args)
    from quire.llm import LLM
    from quire.sampling_params import SamplingParams

    llm = LLM(model, **engine_options(args))
    try:
        defaults = {"max_tokens": None, **llm.frontend.default_params}
        params = SamplingParams.from_dict(sampling_options(args), defaults)
        raw = args.raw or not llm.frontend.chat_template.templates
        chat = Conversation(llm, params, raw=raw, system=args.system, as_json=args.json)
        if prompt is not None:
            return 0 if chat.answer(prompt) else 130
        return chat.hold()
    finally:
        llm.close()


def _model_and_prompt(args: argparse.Namespace) -> tuple[str, str | None]:
    """`quire run "a question"` means the demo: a model's name has no spaces."""
    model, prompt = args.model, args.prompt
    if prompt is None and model is not None and any(c.isspace() for c in model):
        model, prompt = None, model
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read().strip()
        if not prompt:
            raise ConfigError("no prompt: standard input is empty", 'try: quire run demo "Hello"')
    return model or "demo", prompt


@dataclass
class Conversation:
    """Messages so far, and the model that answers. Without a chat template each prompt stands alone."""

    llm: LLM
    params: Any
    raw: bool
    system: str | None
    as_json: bool
    messages: list[dict[str, Any]] = field(default_factory=list)

    def hold(self) -> int:
        """Read, answer, repeat, until the end of input."""
        import readline  # noqa: F401  gives input() line editing and history

        chosen = self.llm.chosen
        how = "continues what you type" if self.raw else "chat"
        _note(f"{chosen['model']} · {chosen['architecture']} · {chosen['backend']} backend · {how}")
        _note("Ctrl-C stops an answer, /help lists commands, Ctrl-D ends")
        while True:
            try:
                line = input("\n>>> ").strip()
            except KeyboardInterrupt:
                print()
                continue
            except EOFError:
                print()
                return 0
            if line == "/exit":
                return 0
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._answer_or_explain(line)

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/new":
            self.messages.clear()
        elif name == "/system":
            self.system = rest.strip() or None
        elif name == "/help":
            print(HELP)
        else:
            print(f"unknown command {name}\n{HELP}")

    def _answer_or_explain(self, line: str) -> None:
        try:
            self.answer(line)
        except QuireError as error:
            print(f"error: {error}", file=sys.stderr)

    def answer(self, prompt: str) -> bool:
        """Answer one prompt as it comes, then say what it took. False when Ctrl-C stopped it."""
        output, whole = None, True
        try:
            for output in self._stream(prompt):
                if not self.as_json:
                    print(output.outputs[0].delta, end="", flush=True)
        except KeyboardInterrupt:
            whole = False
        if output is None:
            return whole
        choice = output.outputs[0]
        if not self.raw:
            self.messages += [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": choice.text},
            ]
        if self.as_json:
            print(json.dumps(_report(output), ensure_ascii=False))
        else:
            print("" if choice.text.endswith("\n") else "\n", end="")
            _note(_summary(output) if whole else "stopped")
        if choice.error is not None:
            print(f"error: {choice.error}", file=sys.stderr)
        return whole

    def _stream(self, prompt: str) -> Iterator[RequestOutput]:
        if self.raw:
            return self.llm.stream(prompt, self.params)
        return self.llm.stream({"prompt_token_ids": self._fit(prompt)}, self.params)

    def _fit(self, prompt: str) -> list[int]:
        """The conversation as tokens. Its beginning is forgotten when no room is left for an answer."""
        longest = self.llm.frontend.max_model_len
        room = longest - min(self.params.max_tokens or longest, longest // 4)
        system = [{"role": "system", "content": self.system}] if self.system else []
        while True:
            messages = [*system, *self.messages, {"role": "user", "content": prompt}]
            _, token_ids = self.llm.frontend.encode_chat(messages)
            if len(token_ids) <= room or not self.messages:
                return token_ids
            _note("the conversation has outgrown the context: its beginning is forgotten")
            del self.messages[:2]


def _report(output: RequestOutput) -> dict[str, Any]:
    """An answer and what it took, for scripts."""
    choice, times = output.outputs[0], output.metrics
    report: dict[str, Any] = {
        "text": choice.text,
        "finish_reason": choice.finish_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "output_tokens": len(choice.token_ids),
        "time_to_first_token_s": None,
        "tokens_per_s": None,
    }
    if times is not None and times.first_token_s is not None and times.finished_s is not None:
        report["time_to_first_token_s"] = times.first_token_s - times.arrival_s
        seconds = times.finished_s - times.first_token_s
        if seconds > 0 and len(choice.token_ids) > 1:
            report["tokens_per_s"] = (len(choice.token_ids) - 1) / seconds
    return report


def _summary(output: RequestOutput) -> str:
    """The same as one line for people."""
    report = _report(output)
    parts = [f"{report['prompt_tokens']} prompt tokens ({report['cached_tokens']} cached)"]
    parts.append(f"{report['output_tokens']} output tokens")
    if (first := report["time_to_first_token_s"]) is not None:
        parts.append(f"first token after {first * 1000:.0f} ms")
    if (speed := report["tokens_per_s"]) is not None:
        parts.append(f"{speed:.1f} tokens/s")
    if report["finish_reason"] == "length":
        parts.append("stopped at the length limit")
    return " · ".join(parts)


def _note(text: str) -> None:
    """A line about the answer, not of it: to standard error, dim in a terminal."""
    dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
    print(f"{dim}{text}{plain}", file=sys.stderr, flush=True)
