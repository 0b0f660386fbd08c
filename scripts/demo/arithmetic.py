"""Sums on small numbers, in figures and in little word problems."""

from scripts.demo.data import lines, words
from scripts.demo.lexicon import NAMES
from scripts.demo.source import Dialogue, Source, assistant, user

SIGNS = {"+": "plus", "-": "minus", "*": "times"}
PROBLEMS = lines("arithmetic")  # by sign
QUESTIONS, THINGS = PROBLEMS["questions"], words("arithmetic")["things"]


def value(sign: str, a: int, b: int) -> int:
    return a + b if sign == "+" else a - b if sign == "-" else a * b


def draw_sum(source: Source) -> tuple[str, int, int]:
    """A sign and two numbers whose combination belongs to the split; small numbers are more frequent."""

    def draw() -> tuple[str, int, int]:
        sign = source.choice("++--*")
        top = 12 if sign == "*" else source.choice((10, 20, 50, 99))
        a, b = source.number(0, top), source.number(0, top)
        return sign, max(a, b) if sign == "-" else a, min(a, b) if sign == "-" else b

    return source.draw_key(draw, lambda drawn: "sum:" + " ".join(map(str, drawn)))


def arithmetic(source: Source) -> Dialogue:
    """One sum; the answer repeats it, which also helps to get it right."""
    sign, a, b = draw_sum(source)
    if source.chance(0.25):
        names = {"name": source.choice(NAMES), "thing": source.choice(THINGS)}
        asked = source.wording(PROBLEMS[sign]).format(a=a, b=b, **names)
    else:
        spoken = SIGNS[sign] if source.chance(0.3) else "x" if sign == "*" and source.chance(0.4) else sign
        glue = "" if spoken in "+-*x" and source.chance(0.25) else " "
        asked = source.wording(QUESTIONS).format(sum=f"{a}{glue}{spoken}{glue}{b}")
    said = f"{a} {sign} {b} = {value(sign, a, b)}"
    return Dialogue([user(source.typed(asked)), assistant(said)], "arithmetic", expect={"exact": said})
