"""The format of LFM2 and LFM2.5: a list of calls as in Python."""

from __future__ import annotations

from quire.text.tools.pythonic import Pythonic


class Lfm2(Pythonic):
    """`[NAME(KEY="text", KEY=[1, 2]), NAME()]` between two marks."""

    name = "lfm2"
    marker = "<|tool_call_start|>"
    closing = "<|tool_call_end|>"

    @classmethod
    def matches(cls, source: str) -> bool:
        """Look for the marker, or for the one of older templates, which print no calls."""
        return cls.marker in source or "<|tool_list_start|>" in source
