"""Names of fields in errors: each API's own, in place of those of the neutral request."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from quire.errors import RequestError


@contextmanager
def renaming_fields(names: Mapping[str, str | Callable[[re.Match[str]], str]]) -> Iterator[None]:
    """Rewrite field names in a RequestError to this API's names: pattern -> replacement, as for re.sub."""
    try:
        yield
    except RequestError as error:
        for pattern, own in names.items():
            error.message = re.sub(pattern, own, error.message)
            error.param = error.param and re.sub(pattern, own, error.param)
        raise
