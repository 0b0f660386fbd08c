"""The sentences and words of the generator, in text files: see `data/*.txt`."""

from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "data"


@cache
def paragraphs(name: str) -> dict[str, list[list[str]]]:
    """Sections `[title]` of a file, in order: paragraphs of lines. In a line, `\\n` is a line break."""
    sections: dict[str, list[list[str]]] = {}
    for line in (FOLDER / f"{name}.txt").read_text("utf-8").splitlines():
        if line.startswith("#"):
            continue
        if line.startswith("["):
            found = sections[line.strip("[]")] = [[]]
        elif sections:
            if line:
                found[-1].append(line.replace("\\n", "\n"))
            elif found[-1]:
                found.append([])
    return {title: [lines for lines in found if lines] for title, found in sections.items()}


def lines(name: str) -> dict[str, list[str]]:
    """Sections of a single paragraph."""
    return {title: first for title, (first, *_) in paragraphs(name).items()}


def words(name: str) -> dict[str, list[str]]:
    """Sections of words, wherever their lines end."""
    return {title: " ".join(found).split() for title, found in lines(name).items()}


def answered(found: list[list[str]]) -> list[tuple[list[str], str]]:
    """Paragraphs of questions, of which the last line, "= ...", is the answer."""
    return [(questions, answer.removeprefix("= ")) for *questions, answer in found]
