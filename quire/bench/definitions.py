"""The definitions of all figures of a load test. Reports and help texts print them.

They are those of `vllm bench serve`, so that figures can be compared.
"""

from __future__ import annotations

from typing import NamedTuple


class Definition(NamedTuple):
    """A measure of one request, and what it means."""

    name: str
    title: str
    meaning: str


MEASURES: dict[str, Definition] = {  # by the name in a report's JSON
    "ttft": Definition(
        "TTFT", "time to first token", "from sending the request to the first chunk that brings tokens"
    ),
    "tpot": Definition(
        "TPOT",
        "time per output token",
        "(E2E - TTFT) / (output tokens - 1); an answer of one token or one chunk has none",
    ),
    "itl": Definition(
        "ITL", "inter-token latency", "the gap between two successive chunks that bring tokens"
    ),
    "e2el": Definition("E2E", "end-to-end latency", "from sending to the last chunk that brings tokens"),
}
OTHERS: dict[str, Definition] = {
    "goodput": Definition(
        "goodput",
        "goodput",
        "requests a second that keep every limit of the goal, each by its own figures (for ITL the statistic "
        "of its own gaps); a failed request keeps none",
    ),
    "rejection": Definition("refusal", "time to refusal", "from sending to a reply of 429, 503 or 529"),
    "lateness": Definition(
        "lateness",
        "sent too late by",
        "from the planned moment to sending; latencies count from sending, so lateness says whether they "
        "can be trusted",
    ),
}
PERCENTILES = "percentiles interpolate linearly between values, as numpy.percentile does"


def glossary(width: int = 100) -> str:
    """Return the definitions as lines of text, the names in one column."""
    import textwrap

    lines = []
    for one in (*MEASURES.values(), *OTHERS.values()):
        text = one.meaning if one in OTHERS.values() else f"{one.title}: {one.meaning}"
        name, indent = f"  {one.name:<10}", " " * 12
        lines += textwrap.wrap(text, width, initial_indent=name, subsequent_indent=indent)
    return "\n".join(lines)
