"""Simple facts with several wordings each, and questions that follow them up."""

from scripts.demo.data import answered, paragraphs, words
from scripts.demo.lexicon import DAYS, MONTHS
from scripts.demo.source import Dialogue, Source, assistant, user

KINDS = tuple(paragraphs("facts").values())
_MORE = paragraphs("more_facts")
AFTER, BEFORE = _MORE["after"][0], _MORE["before"][0]
COUNT_QUESTIONS, COUNTS = _MORE["counts"]
ODD_FACTS = answered(_MORE["odd"])
PLANETS = words("more_facts")["planets"]


def table_fact(source: Source) -> Dialogue:
    """A question from one of the tables, sometimes followed by "And of ...?"."""
    (answer, follow_up), questions, table = source.choice(KINDS)
    messages, said = [], ""
    for turn in range(1 + source.chance(0.2)):
        a, b = source.choice(table).rsplit(" ", 1)
        asked = follow_up if turn else source.wording(questions)
        said = answer.format(a=a, b=b, A=a[0].upper() + a[1:])
        messages += [user(source.typed(asked.format(a=a))), assistant(said)]
    return Dialogue(messages, "fact", expect={"exact": said})


def count_fact(source: Source) -> Dialogue:
    """The number of parts of a whole."""
    what, whole, count = source.choice(COUNTS).split()
    whole = whole.replace("-", " ")
    asked = source.wording(COUNT_QUESTIONS).format(a=what, c=whole, A=what.capitalize())
    article = "An" if whole[0] in "aeiou" or whole == "hour" else "A"
    said = f"{article} {whole} has {count} {what}."
    return Dialogue([user(source.typed(asked)), assistant(said)], "fact", expect={"exact": said})


def order_fact(source: Source) -> Dialogue:
    """The neighbour of a day, a month, a planet, a letter or a number."""
    numbers, letters = [str(n) for n in range(1, 31)], list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    kind, row = source.choice(
        (("day", DAYS), ("month", MONTHS), ("planet", PLANETS), ("letter", letters), ("number", numbers))
    )
    where = source.number(0, len(row) - 2)
    first, second = row[where], row[where + 1]
    if source.chance(0.6):
        asked, said = source.wording(AFTER).format(kind=kind, a=first), f"After {first} comes {second}."
    else:
        asked, said = source.wording(BEFORE).format(kind=kind, a=second), f"Before {second} comes {first}."
    return Dialogue([user(source.typed(asked)), assistant(said)], "fact", expect={"exact": said})


def odd_fact(source: Source) -> Dialogue:
    questions, said = source.choice(ODD_FACTS)
    return Dialogue(
        [user(source.typed(source.wording(questions))), assistant(said)], "fact", expect={"exact": said}
    )


def fact(source: Source) -> Dialogue:
    draw = source.random.random()
    if draw < 0.6:
        return table_fact(source)
    return (count_fact if draw < 0.7 else order_fact if draw < 0.85 else odd_fact)(source)
