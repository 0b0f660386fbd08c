"""The formats of Qwen3-Coder, Qwen3.5, Nemotron 3 and Seed-OSS: tags for the function and each parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.text.tools.functions import Function
from quire.text.tools.json_calls import JsonCallReader, Reading, exactly, expect, until
from quire.text.tools.tagged import TaggedCalls, TaggedReader


class QwenXml(TaggedCalls):
    """`<tool_call>`, `<function=NAME>`, `<parameter=NAME>`, the value, and the three closing tags."""

    name = "qwen_xml"
    aliases: tuple[str, ...] = ("qwen3_coder", "qwen3_xml", "nemotron_v3", "step3p5")
    marker = "<tool_call>"
    closing = "</tool_call>"
    head, opening_tag = "\n<function={name}>\n", "<parameter={key}>\n"
    value_end, after_value = "\n</parameter>", "\n"
    tail = "</function>\n"

    @classmethod
    def matches(cls, source: str) -> bool:
        """Look for all tags of the format."""
        return all(tag in source for tag in (cls.marker, "<function=", "<parameter=", "</parameter>"))

    def calls(self, mark: Callable[[str], str]) -> tuple[str, str, str]:
        each = f"call {mark(self.closing)}"
        return each, rf'"\n" {mark(self.marker)} {each}', ""

    def reader(self, functions: Sequence[Function]) -> JsonCallReader:
        """Make a reader of the calls of one answer."""
        return _QwenXmlReader(self, functions)


class SeedOss(QwenXml):
    """The same within `<seed:tool_call>`, with values beside their tags."""

    name = "seed_oss"
    aliases: tuple[str, ...] = ()
    marker = "<seed:tool_call>"
    closing = "</seed:tool_call>"
    opening_tag, value_end = "<parameter={key}>", "</parameter>"

    def reader(self, functions: Sequence[Function]) -> JsonCallReader:
        """Make a reader of the calls of one answer."""
        return _SeedOssReader(self, functions)


class _QwenXmlReader(TaggedReader):
    before_value = "\n"

    def _read_calls(self) -> Reading[None]:
        yield from expect("<")
        yield from exactly("function=")
        self._begin_call((yield from until(">")))
        while True:
            yield from expect("<")
            tag, _, parameter = (yield from until(">")).partition("=")
            if tag == "/function":
                break
            if tag != "parameter":
                raise ValueError
            yield from exactly(self.before_value)
            yield from self._read_parameter(parameter)
        self._emit_arguments("}")
        yield from expect("<")
        yield from exactly(self._syntax.closing[1:])
        self._ended = True
        yield None


class _SeedOssReader(_QwenXmlReader):
    before_value = ""
