"""MODEL and PROMPT, from the positional arguments of a command line and standard input."""

from __future__ import annotations

import argparse
import os
import select
import shlex
import stat
import sys
from pathlib import Path

from quire.cli.option_types import TEXT
from quire.cli.terminal import note
from quire.errors import ConfigError, did_you_mean, shortened

STDIN_WAIT_S = 1.0  # for the first byte of a pipe, which may have been inherited and never be written to
_ASK = 'try: quire run demo "Hello"'


def add_words(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the positional arguments of a command, explained by `text`, and --model in place of MODEL."""
    words = parser.add_argument_group("arguments", text)
    words.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument(
        "--model", type=TEXT, metavar="MODEL", help="the same as the argument MODEL, which takes precedence"
    )


def model_and_prompt(args: argparse.Namespace) -> tuple[str, str | None]:
    """Return the model to run and the prompt, or None to start a conversation. Raises ConfigError.

    An invalid MODEL is refused before standard input is read.
    """
    model, prompt, wait = _split(args)
    reads = wait or (prompt is None and not sys.stdin.isatty())
    check_model(model, args.revision, ask_hub=reads, may_be_prompt=prompt is None)
    if prompt is None and not reads:
        return model, None
    piped = _piped(reads)
    piped = piped.removesuffix("\n") if args.raw else piped.strip()
    parts = [text for text in (prompt, piped) if text and not text.isspace()]
    if not parts:
        raise ConfigError("the prompt is empty", _ASK)
    return model, "\n\n".join(parts)


def _split(args: argparse.Namespace) -> tuple[str, str | None, bool]:
    """Split the positional arguments into (model, prompt, True if "-" asks for standard input).

    `quire run "a question"` asks the default model: a model name that is not a path has no spaces.
    """
    words = list(args.words)
    wait = bool(words) and words[-1] == "-"
    if wait:
        words.pop()
    if len(words) > 2:
        model = words.pop(0) if is_path(words[0]) or "/" in words[0] or words[0] == "demo" else "demo"
        whole = _quoted(" ".join(words))
        args.parser.refuse("more than one PROMPT", f"put the prompt in quotes: quire run {model} {whole}")
    default = args.model or "demo"
    model, prompt = (words + [default, None][len(words) :])[:2]
    if prompt is None and not _is_model(model, args.model):
        model, prompt = default, model
    return model, _utf8(prompt), wait


def _is_model(word: str, given: str | None) -> bool:
    """Return True if a single word is MODEL rather than PROMPT. `given` is the value of --model."""
    if is_path(word) or word == given:
        return True
    has_space = any(c.isspace() for c in word)
    return not has_space and (given is None or word == "demo" or "/" in word)


def _quoted(prompt: str) -> str:
    """Quote a prompt for the shell."""
    short = shortened(prompt)
    return shlex.quote(short) if set(short) & set('"$`\\!') else f'"{short}"'


def _utf8(prompt: str | None) -> str | None:
    """Return a prompt unchanged. Raises ConfigError if it is not UTF-8, which Python hides in surrogates."""
    try:
        (prompt or "").encode()
    except UnicodeEncodeError:
        raise ConfigError("PROMPT is not UTF-8") from None
    return prompt


def is_path(model: str) -> bool:
    """Return True if a file or folder has this name."""
    try:
        return bool(model) and Path(model).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long, a zero byte, no such user
        return False


def check_model(
    model: str, revision: str | None = None, *, ask_hub: bool = False, may_be_prompt: bool = False
) -> None:
    """Raise ConfigError for an invalid model name, which may be meant as a prompt.

    With `ask_hub`, also for one not on the Hub.
    """
    if model in ("demo", "demo-draft") or is_path(model):
        return
    if model and "/" not in model:  # Hub ids are "organisation/name"
        folders = [one.name for one in Path().iterdir() if one.is_dir() and not one.name.startswith(".")]
        near = did_you_mean(model[:80], ["demo", *folders])
        hint = "give the path of a model's folder, or an id such as 'organisation/name'"
        if may_be_prompt:
            hint = f"to ask the demo model: quire run demo {_quoted(model)}"
        raise ConfigError(f"model {shortened(model)!r}: no such folder, and not a Hub id", near or hint)
    if ask_hub:
        from quire.weights.hub import resolve

        resolve(model, revision, weights=False)


def _piped(must: bool) -> str:
    """Read standard input to its end.

    Unless it `must` be read, only a file or a pipe is, and a pipe only once it has data: an inherited one
    may stay open forever without any.
    """
    try:
        file = sys.stdin.fileno()
        mode = os.fstat(file).st_mode
    except (OSError, ValueError):  # not a file, as in an embedded Python
        return ""
    if not must and not stat.S_ISREG(mode):
        if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
            return ""
        if not select.select([file], [], [], STDIN_WAIT_S)[0]:
            note("standard input is open but has no data: ignored; add - after PROMPT to wait for it")
            return ""
    data = sys.stdin.buffer.read()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        where = f"byte 0x{data[error.start]:02X} at position {error.start:,}"
        raise ConfigError(f"standard input is not UTF-8 ({where})") from None
