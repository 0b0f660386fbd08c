"""Names of modules by exact name or pattern, as quantization_config lists them.

Patterns are regular expressions from an untrusted file, and names are untrusted too: Python's matcher can
take exponential time. So a pattern may have a few repetitions, none of them of a group.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from quire.errors import ConfigError, quoted

_REPETITIONS, _LENGTH, _NAME = 4, 1000, 400
_PIECES = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|(?P<group>\))?(?P<repeat>[*+]|\{\d*,?\d*\})", re.DOTALL)
_MARK = "re:"


def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a regular expression. Raises ConfigError unless it is one that is matched in little time."""
    repeats = [found for found in _PIECES.finditer(pattern) if found["repeat"]]
    if len(pattern) > _LENGTH or len(repeats) > _REPETITIONS or any(found["group"] for found in repeats):
        raise ConfigError(
            f"config.json: the pattern {quoted(pattern)} in quantization_config is too complex",
            f"a pattern has at most {_REPETITIONS} repetitions, and none of a group",
        )
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        message = f"config.json: the pattern {quoted(pattern)} in quantization_config is invalid: {error}"
        raise ConfigError(message) from None


class ModuleNames:
    """A list of names and patterns ("re:..."), each matched against the whole name of a module."""

    def __init__(self, listed: Iterable[str]) -> None:
        listed = list(listed)
        self.exact = frozenset(name for name in listed if not name.startswith(_MARK))
        self._patterns = [compiled(n.removeprefix(_MARK)) for n in listed if n.startswith(_MARK)]

    def __contains__(self, module: object) -> bool:
        if not isinstance(module, str) or len(module) > _NAME:
            return False
        return module in self.exact or any(pattern.match(module) for pattern in self._patterns)
