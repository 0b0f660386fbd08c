"""An audit hook under which loading and generating must work: nothing that was read is run as code."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import CodeType
from typing import Any

PACKAGE = str(Path(__file__).resolve().parents[2] / "quire")
INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
WATCHED = frozenset(
    {"pickle.find_class", "marshal.loads", "marshal.load", "exec", "compile", "os.system", "os.exec"}
)
_FROZEN = "<frozen "


class Refused(BaseException):
    """Not an Exception: no handler for errors may swallow it."""


def install() -> None:
    """From here on, in this process and for good, running what was read raises Refused."""
    sys.addaudithook(_hook)


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event in WATCHED and (why := _refusal(event, args, sys._getframe(1).f_code.co_filename)):
        raise Refused(f"{event}: {why}")


def _refusal(event: str, args: tuple[Any, ...], by: str) -> str | None:
    """Why an event is refused, or None. `by` is the file of the Python code that caused it."""
    if event in ("marshal.loads", "marshal.load"):
        return None if by.startswith(_FROZEN) else by  # an import unmarshals cached code; nothing else may
    if event == "exec":
        return _foreign(args[0].co_filename, by) if isinstance(args[0], CodeType) else None
    if event == "compile":
        name = args[1].decode() if isinstance(args[1], bytes) else str(args[1])
        return _foreign(name, by)
    return str(args)


def _foreign(filename: str, by: str) -> str | None:
    """A file that is neither ours nor installed; or a made-up name, from a caller that is not installed."""
    if filename.startswith((*INSTALLED, PACKAGE, _FROZEN)):
        return None
    if filename.startswith("<") and by.startswith((*INSTALLED, _FROZEN)) and "jinja2" not in by:
        return None  # namedtuple and dataclass write their methods this way; templates are another matter
    return f"{filename} by {by}"
