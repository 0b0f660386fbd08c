"""Translation of llguidance's errors: the part of a grammar or schema that is refused, and an alternative."""

from __future__ import annotations

import re

MAX_CHARACTERS = 500
_BOUNDS = "minimum, maximum: these bounds cannot be enforced: keep them within 9.2e18, and not too close to 0"
_COMPLEX = "it has too many alternatives at one place: use fewer properties or choices"
_ONE_OF = (
    "oneOf: its alternatives may overlap, and exactly one match cannot be enforced: use anyOf, or "
    "distinguish them by a required property with a different const in each"
)
_ENDS = r"pattern: ^ and $ are supported only at the ends, \\b not at all; found \1"
# The first expression found in an error decides its message.
_WORDS = tuple(
    (re.compile(expression, re.DOTALL), words)
    for expression, words in (
        (r"^panic", "it is too large"),
        (r"^NoExtension", "nothing can follow: it matches no text"),
        (r"Current row has \d+ items|Too many items", _COMPLEX),
        (r"too big \(limit for this grammar|too many expressions|schema too large", "it is too large"),
        (r"oneOf constraints are not supported", _ONE_OF),
        (r"Unimplemented keys: \[(.{1,300}?)\]", r"keywords that cannot be enforced: \1"),
        (r"Invalid type: ([^\n]{0,64})", r"type: \1 is not a JSON type, such as string, integer, object"),
        (r"Failed to generate regex for (?:integer|float) range", _BOUNDS),
        (r"regex parse error:\s*\({2,}0\\\.", _BOUNDS),
        (r"number out of range at line", "a number in it exceeds 64-bit floats"),
        (r"Resource '([^\n]{0,200}?)' is not present", r"$ref: \1 is not in this schema; nothing is fetched"),
        (r"Pointer '([^\n]{0,200}?)' does not exist", r"$ref: \1 does not exist in this schema"),
        (r"lookarounds not supported yet; \w+ in regex ([^\n]{0,200})", _ENDS),
        (r"Expected f64 for '(\w+)', got ([^\n]{0,100})", r"\1: expected a number, got \2"),
        (r"unknown field `(\w{0,64})`, expected one of `item_separator`", r"x-guidance has no option \1"),
    )
)


def in_words(error: str) -> str:
    """Return an error as one line, without internal names."""
    for expression, words in _WORDS:
        if (found := expression.search(error)) is not None:
            return " ".join(found.expand(words).split())[:MAX_CHARACTERS]
    return " ".join(error.removesuffix("<non-verbose/>").split())[:MAX_CHARACTERS]
