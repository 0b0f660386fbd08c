"""Little stories about asked-for things, composed from the skeletons in data/plots.txt."""

from scripts.demo.data import answered, lines, paragraphs
from scripts.demo.lexicon import CREATURES, FEMALE, LOOKS, MALE, NAMES, OBJECTS, PLACES, TRAITS, WOMEN
from scripts.demo.source import Dialogue, Source, assistant, user

PLOTS = tuple(paragraphs("plots").values())
EXTRAS = paragraphs("stories")["extras"]
OPENINGS, MORALS, REQUESTS, BARE_REQUESTS = (
    lines("stories")[title] for title in ("openings", "morals", "requests", "bare requests")
)
FOLLOW_UPS = answered(paragraphs("stories")["follow-ups"])
NAMES_OF = {
    "f": [name for name in NAMES if name in WOMEN],
    "m": [name for name in NAMES if name not in WOMEN],
}
PRONOUNS = {"m": ("he", "him", "his", "himself"), "f": ("she", "her", "her", "herself")}


def with_article(phrase: str) -> str:
    return (
        "an " if phrase[0].lower() in "aeiou" and not phrase.startswith(("unicorn", "use")) else "a "
    ) + phrase


def gender_of(source: Source, kind: str) -> str:
    if kind in FEMALE or kind in MALE:
        return "f" if kind in FEMALE else "m"
    return source.choice("mf")


def thing_word(source: Source) -> str:
    """An object: mostly a known one, sometimes a word nobody has seen."""
    return source.pseudo_word(source.number(1, 2)) if source.chance(0.1) else source.choice(OBJECTS)


def creature_word(source: Source) -> str:
    return source.pseudo_word(source.number(1, 2)) if source.chance(0.05) else source.choice(CREATURES)


def name_word(source: Source, gender: str) -> str:
    if source.chance(0.15):
        return source.pseudo_word(2).capitalize()
    return source.choice(NAMES_OF[gender])


def draw_cast(source: Source) -> dict[str, str]:
    """Everything a story is about. The pair of hero and object is what the split holds out."""
    hero, thing = source.draw_key(
        lambda: (creature_word(source), thing_word(source)), lambda pair: f"story:{pair[0]}+{pair[1]}"
    )
    fkind = creature_word(source)
    while fkind == hero:
        fkind = creature_word(source)
    gender, fgender = gender_of(source, hero), gender_of(source, fkind)
    name, friend = name_word(source, gender), name_word(source, fgender)
    while friend == name:
        friend = name_word(source, fgender)
    extra = thing_word(source)
    place = source.choice(tuple(PLACES))
    traits = source.some(TRAITS, 2)
    cast = {
        "hero": hero,
        "fkind": fkind,
        "thing": thing,
        "extra": extra,
        "place": place,
        "at": PLACES[place],
        "name": name,
        "friend": friend,
        "Name": name,
        "a_hero": with_article(f"{traits[0]} {hero}"),
        "a_friend": with_article(f"{traits[1]} {fkind}"),
        "a_thing": with_article(f"{source.choice(LOOKS)} {thing}"),
        "a_extra": with_article(f"{source.choice(LOOKS)} {extra}"),
    }
    cast.update(zip(("he", "him", "his", "himself"), PRONOUNS[gender], strict=True))
    cast.update(zip(("fhe", "fhim", "fhis"), PRONOUNS[fgender][:3], strict=True))
    return cast


def fill(sentence: str, cast: dict[str, str]) -> str:
    """The sentence with its marks replaced; it begins with a capital."""
    capitals = {
        mark.capitalize(): text.capitalize() for mark, text in cast.items() if mark in ("he", "his", "him")
    }
    capitals["At"] = cast["at"][0].upper() + cast["at"][1:]
    filled = sentence.format(**cast, **capitals)
    return filled[0].upper() + filled[1:]


def tell(source: Source, cast: dict[str, str], with_extra: bool) -> str:
    """A story of one plot; a second object is worked in only when it was asked for."""
    beats = [OPENINGS, *source.choice(PLOTS)]
    if with_extra:
        beats = [beats[0], EXTRAS[0], *beats[1:], EXTRAS[1]]
    sentences = [fill(source.choice(beat), cast) for beat in beats]
    if source.chance(0.3):
        sentences.append(source.choice(MORALS))
    return " ".join(sentences)


def asked_things(source: Source) -> tuple[str, ...]:
    """Which parts of the cast the request names."""
    if source.unseen:
        return source.choice((("hero", "thing"), ("hero", "thing", "fkind"), ("hero", "thing", "place")))
    return source.choice(
        (
            ("hero",),
            ("thing",),
            ("place",),
            ("hero", "thing"),
            ("hero", "thing"),
            ("hero", "thing"),
            ("hero", "fkind"),
            ("hero", "place"),
            ("thing", "place"),
            ("thing", "extra"),
            ("hero", "thing", "place"),
            ("hero", "fkind", "thing"),
            ("hero", "thing", "extra"),
        )
    )


def phrase(source: Source, cast: dict[str, str], part: str) -> str:
    """Name one thing in a request: bare, with its adjective, or with the hero's name."""
    if part == "hero" and source.chance(0.15):
        return f"{with_article(cast['hero'])} {source.choice(('named', 'called'))} {cast['name']}"
    described = cast.get({"hero": "a_hero", "fkind": "a_friend"}.get(part, f"a_{part}"))
    if described and source.chance(0.1):
        return described
    return f"the {cast[part]}" if part == "place" and source.chance(0.3) else with_article(cast[part])


def story(source: Source) -> Dialogue:
    """A request for one to three things and the story that has them all."""
    cast = draw_cast(source)
    if not source.unseen and source.chance(0.06):
        asked = source.typed(source.wording(BARE_REQUESTS))
        return Dialogue(
            [user(asked), assistant(tell(source, cast, False))],
            "story",
            expect={"contains": [], "cast": cast},
        )
    parts = list(asked_things(source))
    source.random.shuffle(parts)
    names = [phrase(source, cast, part) for part in parts]
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    asked = source.typed(source.wording(REQUESTS).format(things=listed))
    told = tell(source, cast, "extra" in parts)
    expect = {"contains": [cast[part] for part in parts], "cast": cast}
    return Dialogue([user(asked), assistant(told)], "story", expect=expect)


def story_question(source: Source) -> Dialogue:
    """A story and a question about it."""
    told = story(source)
    cast = told.expect["cast"]
    questions, answer = source.choice(FOLLOW_UPS)
    told.messages += [
        user(source.typed(fill(source.wording(questions), cast))),
        assistant(fill(answer, cast)),
    ]
    told.task, told.expect = "story_question", {"exact": fill(answer, cast)}
    return told
