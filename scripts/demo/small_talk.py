"""Greetings, thanks, farewells, and questions about the model itself."""

from scripts.demo.data import lines, paragraphs
from scripts.demo.source import Dialogue, Source, assistant, user

EXCHANGES = paragraphs("small_talk")
SYSTEM_PROMPTS = lines("system_prompts")["all"]


def small_talk(source: Source, kind: str | None = None) -> Dialogue:
    """One exchange of the given kind, or of any."""
    kind = kind or source.choice(tuple(EXCHANGES))
    questions, answers = EXCHANGES[kind]
    asked = source.typed(source.wording(questions))
    return Dialogue(
        [user(asked), assistant(source.choice(answers))], "small_talk", expect={"any_of": answers}
    )
