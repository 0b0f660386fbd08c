"""The command `quire`: finds the subcommand, shows errors as one message and a hint."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command.

    Exit status: 0, 1 for an error that was explained, 2 for a wrong command line, 130 after Ctrl-C.
    """
    try:
        status = _status(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:
        status = 130
        if sys.stderr is not None:
            print(file=sys.stderr)
    sys.exit(status)


def _status(argv: list[str]) -> int:
    """Imports come late, so that Ctrl-C during them ends as it does later."""
    from quire.cli.options import in_flags
    from quire.cli.parser import parse
    from quire.cli.terminal import complain, drop_output, prepare_streams, settle_notes
    from quire.errors import QuireError

    if not prepare_streams():
        complain("standard output is closed: there is nowhere to write an answer")
        return 1
    try:
        try:
            args = parse(argv)
            status: int = args.function(args)
        except SystemExit as ended:  # argparse has shown help, or said what is wrong
            status = int(ended.code or 0)
        sys.stdout.flush()
    except QuireError as error:
        complain(in_flags(error.message), error.hint and in_flags(error.hint))
        return 1
    except BrokenPipeError:  # the reader of a pipe has left, which is no error
        drop_output(sys.stdout)
        return 0
    except OSError as error:  # a full disk, say
        drop_output(sys.stdout)
        complain(f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error))
        return 1
    finally:
        settle_notes()
    return status
