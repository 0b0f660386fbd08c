"""The `quire` command: run a subcommand, and report errors as a message and a hint."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import NoReturn


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command.

    Exit status: 0, 1 for a reported error, 2 for a wrong command line, 130 after Ctrl-C.
    """
    try:
        status = _status(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:
        status = 130
        if sys.stderr is not None:
            print(file=sys.stderr)
    if argv is None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one more Ctrl-C must not change the exit status
    sys.exit(status)


def _status(argv: list[str]) -> int:
    """Run a command and return its exit status. Imports are local so that Ctrl-C is handled during them."""
    from quire.cli.options import in_flags
    from quire.cli.parser import parse
    from quire.cli.terminal import complain, drop_output, prepare_streams, settle_notes
    from quire.errors import QuireError

    if not prepare_streams():
        complain("standard output is closed")
        return 1
    try:
        try:
            args = parse(argv)
            status: int = args.function(args)
        except SystemExit as ended:  # argparse printed help or an error
            status = int(ended.code or 0)
        sys.stdout.flush()
    except QuireError as error:
        complain(in_flags(error.message), error.hint and in_flags(error.hint))
        return 1
    except BrokenPipeError:  # the reader of the pipe is gone, which is not an error
        drop_output(sys.stdout)
        return 0
    except OSError as error:  # such as a full disk
        drop_output(sys.stdout)
        complain(f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error))
        return 1
    finally:
        settle_notes()
    return status
