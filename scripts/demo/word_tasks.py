"""Repeating, reversing, sorting, counting, spelling and changing the case of words."""

from scripts.demo.data import lines
from scripts.demo.lexicon import NAMES, WORDS
from scripts.demo.source import Dialogue, Source, assistant, user

TASKS = lines("word_tasks")


def draw_words(source: Source, count: int) -> list[str]:
    """Distinct words, some of them names or words nobody has seen."""
    words: list[str] = []
    while len(words) < count:
        draw = source.random.random()
        word = (
            source.choice(WORDS)
            if draw < 0.7
            else source.choice(NAMES)
            if draw < 0.8
            else source.pseudo_word()
        )
        if word not in words:
            words.append(word)
    return words


def solve(kind: str, words: list[str]) -> str:
    """The right answer."""
    if kind == "repeat":
        return " ".join(words)
    if kind == "count":
        return f"{len(words)} word{'s' if len(words) > 1 else ''}"
    if kind == "upper":
        return " ".join(words).upper()
    if kind == "spell":
        return "-".join(words[0].upper())
    if kind == "count_up":
        return ", ".join(str(n) for n in range(int(words[0]), int(words[2]) + 1))
    ordered = {
        "reverse": words[::-1],
        "sort": sorted(words, key=str.lower),
        "first": words[:1],
        "last": words[-1:],
        "sort_numbers": sorted(words, key=lambda word: int(word) if word.isdigit() else 0),
    }[kind]
    return ", ".join(ordered)


def word_task(source: Source) -> Dialogue:
    """One task on fresh words."""
    kind = source.choice(tuple(TASKS))
    if kind == "count_up":
        low = source.number(0, 40)
        words = [str(low), "to", str(low + source.number(2, 12))]
    elif kind == "sort_numbers":
        words = [str(n) for n in source.some(range(100), source.number(3, 5))]
    else:
        most = {"repeat": 7, "count": 7, "upper": 2, "spell": 1, "sort": 4}.get(kind, 5)
        words = draw_words(source, source.number(1 if most < 3 else 2, most))
    comma = ", " if kind in ("reverse", "sort", "sort_numbers") else " "
    asked = source.wording(TASKS[kind]).format(text=comma.join(words))
    said = solve(kind, words)
    return Dialogue([user(asked), assistant(said)], "words", expect={"exact": said, "kind": kind})
