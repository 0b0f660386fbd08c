"""`quire run`: chat in the terminal, or answer once."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from quire.cli.arguments import add_words, model_and_prompt
from quire.cli.option_types import TEXT
from quire.cli.options import add_engine_flags, add_sampling_flags, engine_options, sampling_options
from quire.cli.terminal import note
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.llm import LLM

DESCRIPTION = """Chat with a model, or answer one prompt.

Without PROMPT it holds a conversation: Ctrl-C stops an answer; Ctrl-C twice
within a second, or Ctrl-D, leaves.
"""
WORDS = """MODEL    checkpoint folder, hub id such as Qwen/Qwen3-0.6B, or 'demo' (default), a toy that
         comes with Quire
PROMPT   the question, in quotes; after -- it may begin with a dash
-        read standard input to its end, however long that takes

A file or pipe on standard input is the prompt or, with PROMPT, comes after it and a blank line. Beside
PROMPT, a pipe that gives nothing for 1 s is left alone, unless there is a '-'; </dev/null keeps all out."""
MAX_NUM_SEQS = 4  # one person asks one thing at a time: most of the memory for caches stays free


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "run",
        help="chat in the terminal, or answer once",
        usage="quire run [MODEL] [PROMPT] [-] [flags]",
        description=DESCRIPTION,
    )
    add_words(parser, WORDS)
    parser.add_argument(
        "--system", type=TEXT, metavar="TEXT", help="system message at the head of the conversation"
    )
    parser.add_argument("--raw", action="store_true", help="continue PROMPT as it is, without chat template")
    parser.add_argument("--json", action="store_true", help="print each answer as one line of JSON")
    add_sampling_flags(parser)
    add_engine_flags(parser, {"max_num_seqs": MAX_NUM_SEQS})
    parser.set_defaults(function=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Answer once when there is a prompt, else hold a conversation."""
    if args.system is not None and args.raw:
        args.parser.refuse("--system has no place in a --raw prompt", "leave one of them out")
    model, prompt = model_and_prompt(args)
    from quire.cli.conversation import Conversation
    from quire.llm import LLM
    from quire.sampling_params import SamplingParams

    llm = LLM(model, **engine_options(args))
    try:
        raw = _is_raw(llm, args)
        defaults = {"max_tokens": None, **llm.frontend.default_params}
        params = SamplingParams.from_dict(sampling_options(args), defaults)
        chat = Conversation(llm, params, raw=raw, system=args.system, as_json=args.json)
        return chat.hold() if prompt is None else chat.answer(prompt)
    finally:
        llm.close()


def _is_raw(llm: LLM, args: argparse.Namespace) -> bool:
    """Whether prompts are continued as they are. Raises ConfigError for what the model cannot do."""
    if llm.frontend.tokenizer is None:
        raise ConfigError(
            "this model has no tokenizer, so it can neither read a prompt nor write an answer",
            "put its tokenizer.json into the folder; without one, token ids work from Python (LLM.generate)",
        )
    if args.raw or llm.frontend.chat_template.templates:
        if not args.raw:
            llm.frontend.chat_template.check()
        return bool(args.raw)
    if args.system is not None:
        raise ConfigError("this model has no chat template, so --system has no place", "leave it out")
    note("this model has no chat template: it continues the text it is given")
    return True
