"""`quire run`: chat in the terminal, or answer one prompt."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from quire.cli.arguments import add_words, model_and_prompt
from quire.cli.option_types import TEXT, Repeated
from quire.cli.options import add_engine_flags, add_sampling_flags, engine_options, sampling_options
from quire.cli.terminal import note
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.llm import LLM

DESCRIPTION = """Chat with a model, or answer one prompt.

Without PROMPT, start a conversation. Ctrl-C stops an answer; Ctrl-C twice within a second, or
Ctrl-D, exits. Reasoning before an answer is shown dim, and goes to standard error.
"""
WORDS = """MODEL    checkpoint folder, Hub id such as Qwen/Qwen3-0.6B, or 'demo' (default), a small model
         included with Quire
PROMPT   the prompt, in quotes; put -- before one that starts with a dash
-        read standard input to its end, however long that takes

A file or pipe on standard input is the prompt or, if PROMPT is given, is appended to it after a
blank line. With PROMPT, a pipe without data for 1 s is ignored unless '-' is given; </dev/null
ignores standard input altogether."""
MAX_NUM_SEQS = 4  # one person asks one question at a time, so most cache memory can stay free


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "run",
        help="chat in the terminal, or answer one prompt",
        usage="quire run [MODEL] [PROMPT] [-] [flags]",
        description=DESCRIPTION,
    )
    add_words(parser, WORDS)
    parser.add_argument("--system", type=TEXT, metavar="TEXT", help="system message")
    parser.add_argument(
        "--image",
        type=TEXT,
        action=Repeated,
        default=[],
        metavar="FILE",
        help="picture in PNG, JPEG, WebP or GIF, for a model that sees; goes before PROMPT or the first "
        "message; repeatable",
    )
    parser.add_argument(
        "--raw", action="store_true", help="continue PROMPT as plain text, without chat template"
    )
    parser.add_argument("--json", action="store_true", help="print each answer as one line of JSON")
    add_sampling_flags(parser)
    add_engine_flags(parser, {"max_num_seqs": MAX_NUM_SEQS})
    parser.set_defaults(function=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Answer the prompt if there is one, else start a conversation."""
    if args.system is not None and args.raw:
        args.parser.refuse("--system cannot be combined with --raw", "leave one of them out")
    if args.image and args.raw:
        args.parser.refuse("--image cannot be combined with --raw", "leave one of them out")
    model, prompt = model_and_prompt(args)
    from quire.cli.terminal_chat import TerminalChat, picture
    from quire.llm import LLM
    from quire.sampling_params import SamplingParams

    pictures = [picture(name) for name in args.image]
    llm = LLM(model, **engine_options(args))
    try:
        raw = _is_raw(llm, args)
        defaults = {"max_tokens": None, **llm.frontend.default_params}
        params = SamplingParams.from_dict(sampling_options(args), defaults)
        chat = TerminalChat(llm, params, raw=raw, system=args.system, as_json=args.json)
        for part in pictures:
            chat.attach(part)
        if prompt is None:
            return chat.hold()
        if (checkpoint := llm.chosen.get("checkpoint")) is not None:
            note(f"{llm.chosen['model']}: {checkpoint}")
        return chat.answer(prompt)
    finally:
        llm.close()


def _is_raw(llm: LLM, args: argparse.Namespace) -> bool:
    """Return True if prompts are continued without chat template. Raises ConfigError without a tokenizer."""
    if llm.frontend.tokenizer is None:
        raise ConfigError(
            "this model has no tokenizer, so it can neither read a prompt nor write an answer",
            "add tokenizer.json to its folder; LLM.generate takes token ids without one",
        )
    if args.raw or llm.frontend.chat_template.templates:
        if not args.raw:
            llm.frontend.chat_template.check()
        return bool(args.raw)
    if args.system is not None:
        raise ConfigError("this model has no chat template, so it takes no --system", "leave it out")
    note("this model has no chat template: it continues the text of the prompt")
    return True
