"""llguidance's errors in Quire's words: what of a grammar or schema is refused, and what to write instead."""

from __future__ import annotations

import re

MAX_CHARACTERS = 500
_BOUNDS = "minimum, maximum: no expression is made of these bounds: keep them within 9.2e18, and away from 0"
_COMPLEX = "it has more alternatives at one place than can be followed: offer fewer properties or choices"
_ONE_OF = (
    "oneOf: its alternatives may overlap, and that exactly one holds cannot be enforced: write anyOf, or "
    "tell them apart by a required property that has another const in each"
)
_ENDS = r"pattern: ^ and $ stand at the ends alone, \\b nowhere; not as in \1"
# The first that is found in an error stands for all of it.
_WORDS = tuple(
    (re.compile(expression, re.DOTALL), words)
    for expression, words in (
        (r"^panic", "it is too large"),
        (r"^NoExtension", "nothing can follow: it matches no text"),
        (r"Current row has \d+ items|Too many items", _COMPLEX),
        (r"too big \(limit for this grammar|too many expressions|schema too large", "it is too large"),
        (r"oneOf constraints are not supported", _ONE_OF),
        (r"Unimplemented keys: \[(.{1,300}?)\]", r"keywords that cannot be enforced: \1"),
        (r"Invalid type: ([^\n]{0,64})", r"type: \1 is none of JSON's, such as string, integer, object"),
        (r"Failed to generate regex for (?:integer|float) range", _BOUNDS),
        (r"regex parse error:\s*\({2,}0\\\.", _BOUNDS),
        (r"number out of range at line", "a number in it is beyond 64-bit floats"),
        (r"Resource '([^\n]{0,200}?)' is not present", r"$ref: \1 is not in this schema; nothing is fetched"),
        (r"Pointer '([^\n]{0,200}?)' does not exist", r"$ref: there is nothing at \1 of this schema"),
        (r"lookarounds not supported yet; \w+ in regex ([^\n]{0,200})", _ENDS),
        (r"Expected f64 for '(\w+)', got ([^\n]{0,100})", r"\1: expected a number, got \2"),
        (r"unknown field `(\w{0,64})`, expected one of `item_separator`", r"x-guidance has no option \1"),
    )
)


def in_words(error: str) -> str:
    """An error in one line, without the names of what is inside."""
    for expression, words in _WORDS:
        if (found := expression.search(error)) is not None:
            return " ".join(found.expand(words).split())[:MAX_CHARACTERS]
    return " ".join(error.removesuffix("<non-verbose/>").split())[:MAX_CHARACTERS]
