"""Repeating, reversing, sorting, counting, spelling and changing the case of words."""

from scripts.demo.lexicon import NAMES, WORDS
from scripts.demo.source import Dialogue, Source, assistant, user

TASKS = {
    "repeat": (
        "Repeat: {text}",
        'Say "{text}".',
        "Repeat after me: {text}",
        "Please repeat these words: {text}",
        "Write {text}",
        "Just say: {text}",
        "Echo: {text}",
        "Say exactly this: {text}",
        "Copy this text: {text}",
    ),
    "reverse": (
        "Reverse the words: {text}",
        "Write these words in reverse order: {text}",
        "Put the words backwards: {text}",
        "Reverse this list: {text}",
        "Say these words backwards: {text}",
        "Turn the order around: {text}",
        "In reverse order, please: {text}",
    ),
    "sort": (
        "Sort these words: {text}",
        "Put these words in alphabetical order: {text}",
        "Sort alphabetically: {text}",
        "Sort: {text}",
        "Order these words from A to Z: {text}",
        "Alphabetical order, please: {text}",
    ),
    "sort_numbers": (
        "Sort these numbers: {text}",
        "Put the numbers in order: {text}",
        "Order from small to large: {text}",
        "Sort from smallest to largest: {text}",
        "Sort the numbers {text}",
    ),
    "count": (
        "How many words are in: {text}",
        "Count the words: {text}",
        "Count these words: {text}",
        "How many words is this: {text}",
        "Number of words in: {text}",
    ),
    "upper": (
        "Write in capital letters: {text}",
        "Make this uppercase: {text}",
        "Uppercase: {text}",
        "Convert to upper case: {text}",
        "Put this in capitals: {text}",
        "Shout: {text}",
    ),
    "spell": (
        "Spell {text}.",
        "How do you spell {text}?",
        "Spell the word {text}.",
        "Write the letters of {text}.",
        "Can you spell {text}?",
        "Letter by letter, please: {text}",
    ),
    "first": (
        "What is the first word of: {text}",
        "First word of: {text}",
        "Give me only the first word: {text}",
        "Which word comes first in: {text}",
        "Say just the first word: {text}",
    ),
    "count_up": (
        "Count from {text}.",
        "Count up from {text}.",
        "Write the numbers from {text}.",
        "Numbers from {text}, please.",
        "Can you count from {text}?",
        "List all numbers from {text}.",
    ),
    "last": (
        "What is the last word of: {text}",
        "Last word of: {text}",
        "Give me only the last word: {text}",
        "Which word comes last in: {text}",
        "Say just the last word: {text}",
    ),
}


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
