"""`quire batch`: answer a file of requests, in the format of OpenAI's batch API."""

from __future__ import annotations

import argparse
import asyncio
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, BinaryIO

from quire.cli.arguments import check_model
from quire.cli.option_types import TEXT
from quire.cli.options import add_engine_flags, add_server_flags, engine_options, server_options
from quire.cli.terminal import complain, counted, note
from quire.errors import ConfigError, shortened

if TYPE_CHECKING:
    from quire.cli.batch_output import StreamOutput
    from quire.cli.batch_run import Tally

DESCRIPTION = """Answer a file of requests, many of them at a time. Needs no server and opens no port.

  quire batch in.jsonl -o out.jsonl                    with the demo model
  quire batch in.jsonl -o out.jsonl --model Qwen/Qwen3-0.6B --quantization int8
  generate-requests | quire batch - -o - > out.jsonl   from a pipe, into another

Each line of INPUT is a request, as for OpenAI's batch API:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
   "body": {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 50}}
url is /v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings, /v1/score or /v1/rerank; body is
what 'quire serve' takes there.
A "model" in a body must be MODEL, or a --served-model-name ('*' accepts any name).

Each line of OUTPUT is a response, in order of completion; custom_id identifies the request:
  {"id": "batch_req_...", "custom_id": "1",
   "response": {"status_code": 200, "request_id": "...", "body": {...}}, "error": null}
If a request fails, "error" has a "code" and a "message", and the other requests continue.

To resume after Ctrl-C, a crash or errors, run the same command again: requests that are answered
in OUTPUT are skipped, and failed ones are retried. Exit status: 0 if every request was answered,
1 if not, 130 after Ctrl-C.
"""
WORDS = """INPUT    file of requests, one JSON object per line; - reads standard input"""
SERVER_FLAGS = ("served_model_name", "tool_call_parser", "reasoning_parser")
TRY = "try: quire batch in.jsonl -o out.jsonl"


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "batch",
        help="answer a file of requests, in OpenAI's batch format",
        usage="quire batch INPUT -o OUTPUT [--model MODEL] [flags]",
        description=DESCRIPTION,
    )
    words = parser.add_argument_group("arguments", WORDS)
    words.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument(
        "-i",
        "--input-file",
        type=TEXT,
        metavar="INPUT",
        help="the same as the argument INPUT, which takes precedence",
    )
    parser.add_argument(
        "-o",
        "--output-file",
        type=TEXT,
        metavar="OUTPUT",
        help="file for the responses; - writes to standard output",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="discard the contents of OUTPUT and start over"
    )
    parser.add_argument(
        "--model", type=TEXT, metavar="MODEL", help="checkpoint folder, Hub id, or 'demo' (default: demo)"
    )
    add_server_flags(parser, SERVER_FLAGS)
    add_engine_flags(parser)
    parser.set_defaults(function=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Answer all requests and print a summary."""
    source = _input_name(args)
    if args.output_file is None:
        args.parser.refuse("OUTPUT is missing", TRY)
    model = args.model or "demo"
    check_model(model, args.revision)
    from quire.cli.batch_output import open_output
    from quire.cli.batch_run import Tally
    from quire.config import EngineConfig, ServerConfig

    config = ServerConfig(**server_options(args))
    engine_config = EngineConfig(model=model, **engine_options(args))
    file = _open_input(source)
    is_pipe = not file.seekable()
    with ExitStack() as closing:
        if not is_pipe:  # closing a pipe would wait for the thread that reads it
            closing.callback(file.close)
        output = open_output(args.output_file, args.overwrite, source)
        closing.callback(output.close)
        tally = Tally(None if is_pipe else _num_lines(file), num_before=len(output.done))
        if tally.total == 0:
            raise ConfigError(f"{source} holds no requests", "write one JSON object per line")
        status = asyncio.run(_answer(config, engine_config, file, output, tally))
    return _conclude(tally, output, status, args.overwrite)


def _input_name(args: argparse.Namespace) -> str:
    name, *more = args.words or [args.input_file]
    if name is None:
        args.parser.refuse("INPUT is missing", TRY)
    if more:
        args.parser.refuse(f"unexpected {shortened(more[0])!r}", "give one INPUT, and the output to -o")
    return str(name)


def _open_input(name: str) -> BinaryIO:
    try:
        # Not sys.stdin: a thread that waits in it would keep Python from ending.
        return open(0 if name == "-" else name, "rb", closefd=name != "-")
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None


def _num_lines(file: BinaryIO) -> int:
    """Count the remaining lines without changing the position in the file."""
    begin, count, last = file.tell(), 0, b"\n"
    while data := file.read(1 << 20):
        count += data.count(b"\n")
        last = data
    file.seek(begin)
    return count + (not last.endswith(b"\n"))


async def _answer(config: Any, engine_config: Any, file: BinaryIO, output: StreamOutput, tally: Tally) -> int:
    """Load the model and answer all requests. Returns 0, or 128 plus the signal that ended it."""
    from quire.cli.batch_run import answer_all
    from quire.cli.chosen import in_words
    from quire.server.lifecycle import local_server

    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    caught: list[int] = []

    def stop(number: int) -> None:
        caught.append(number)
        if task is not None:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        async with local_server(config, engine_config) as server:
            note(" · ".join(in_words(server.chosen)[:4]))
            output.begin()
            if output.done or output.num_errors:
                note(f"{output.name}: {tally.earlier(output.num_errors)}")
            await answer_all(server, file, output, tally, 2 * engine_config.max_num_seqs)
    except asyncio.CancelledError:
        if not caught:
            raise
        return 128 + caught[0]
    return 0


def _conclude(tally: Tally, output: StreamOutput, status: int, overwrite: bool) -> int:
    """Print a summary and, if anything is left to do, how to resume. Returns the exit status."""
    note(tally.summary())
    same = "the same command" + (" without --overwrite" if overwrite else "")
    if status:
        again = f"run {same} again to resume" if output.resumes else "with a file as -o, it could be resumed"
        complain("interrupted", again)
        return status
    if tally.num_others:
        others = counted(tally.num_others, "answer")
        note(f"{output.name} also has {others} to requests that are not in INPUT")
    if tally.failed:
        complain(
            f"{tally.failed:,} of {tally.seen:,} requests failed: {tally.first_error}",
            f"each error is in {output.name}" + (f"; {same} retries them" if output.resumes else ""),
        )
    return int(bool(tally.failed))
