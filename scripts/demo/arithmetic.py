"""Sums on small numbers, in figures and in little word problems."""

from scripts.demo.lexicon import NAMES
from scripts.demo.source import Dialogue, Source, assistant, user

SIGNS = {"+": "plus", "-": "minus", "*": "times"}
QUESTIONS = (
    "What is {sum}?",
    "What's {sum}?",
    "How much is {sum}?",
    "{sum}",
    "{sum} = ?",
    "Calculate {sum}.",
    "Compute {sum}.",
    "Can you tell me what {sum} is?",
    "Please work out {sum}.",
    "What does {sum} make?",
    "{sum}?",
    "Solve {sum}.",
    "Tell me {sum}.",
    "I need to know {sum}.",
    "What do you get for {sum}?",
    "Give me the result of {sum}.",
)
PROBLEMS = {
    "+": (
        "{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have now?",
        "{name} finds {a} {thing} in the morning and {b} in the evening. How many {thing} is that?",
        "There are {a} {thing} on the table and {b} in the box. How many {thing} are there?",
        "If {name} buys {a} {thing} and then {b} more, how many {thing} are there in all?",
        "A basket holds {a} {thing}. {name} adds {b}. How many {thing} are in it now?",
    ),
    "-": (
        "{name} has {a} {thing} and gives away {b}. How many {thing} are left?",
        "There were {a} {thing}, but {name} ate {b}. How many {thing} are left?",
        "{name} had {a} {thing} and lost {b}. How many {thing} does {name} have now?",
        "From {a} {thing} {name} takes {b} away. How many {thing} remain?",
        "{name} sells {b} of {a} {thing}. How many {thing} are left?",
    ),
    "*": (
        "There are {a} boxes with {b} {thing} each. How many {thing} is that?",
        "{name} buys {a} bags with {b} {thing} in each. How many {thing} are there?",
        "Each of {a} children has {b} {thing}. How many {thing} do they have?",
        "{name} fills {a} baskets with {b} {thing} each. How many {thing} are there?",
    ),
}
THINGS = """apples pears cookies balls books coins stones eggs flowers stars pencils shells nuts cards
buttons""".split()


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
