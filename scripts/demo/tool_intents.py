"""Tools by what they do: names, descriptions, requests, parameters and results."""

from collections.abc import Callable
from dataclasses import dataclass

from scripts.demo.data import lines, paragraphs, words
from scripts.demo.extraction import a_city, a_name, a_thing, title
from scripts.demo.lexicon import COLOURS, DAYS, WORDS
from scripts.demo.source import Source

Draw = Callable[[Source], object]


@dataclass(frozen=True)
class Param:
    """A parameter of a tool: the names it may bear, its type, and how a value is drawn."""

    names: tuple[str, ...]
    draw: Draw
    type: str = "string"
    enum: tuple[str, ...] = ()
    description: str = ""


@dataclass(frozen=True)
class Intent:
    """Something a tool does: how it may be named and described, how it is asked for, what comes back.

    Wordings mark arguments by their canonical names; an argument that a wording does not mention is not
    passed. `result` draws what the tool returns, and `answer` says it with the same marks.
    """

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    params: dict[str, Param]
    wordings: tuple[str, ...]
    result: Callable[[Source], dict]
    answer: str


def a_number(source: Source) -> int:
    return source.number(1, source.choice((10, 60, 500)))


def a_clock_time(source: Source) -> str:
    return f"{source.number(0, 23):02d}:{source.choice(('00', '15', '30', '45'))}"


def a_topic(source: Source) -> str:
    return source.choice(
        (
            source.choice(WORDS),
            a_thing(source),
            f"{source.choice(WORDS)} {source.choice(WORDS)}",
            f"{source.choice(COLOURS)} {source.choice(WORDS)}",
        )
    )


def a_sentence(source: Source) -> str:
    return source.choice(
        (
            "I am late",
            "see you soon",
            "dinner is ready",
            "call me back",
            "happy birthday",
            "good luck",
            "the train is late",
            f"please buy {a_topic(source)}",
            f"meet me in {a_city(source)}",
            f"I found the {a_thing(source)}",
            f"bring the {a_thing(source)}",
            f"I like {a_topic(source)}",
        )
    )


def a_chore(source: Source) -> str:
    return source.choice(
        (
            "water the plants",
            "call the doctor",
            "buy milk",
            "feed the cat",
            "pay the rent",
            "go running",
            f"call {a_name(source)}",
            f"buy {a_topic(source)}",
            f"find the {a_thing(source)}",
            f"write to {a_name(source)}",
            f"clean the {a_thing(source)}",
        )
    )


def an_expression(source: Source) -> str:
    return f"{source.number(2, 999)} {source.choice('+-*/')} {source.number(2, 999)}"


def one_of(*options: str) -> Draw:
    return lambda source: source.choice(options)


LANGUAGES = (
    "French",
    "German",
    "Spanish",
    "Italian",
    "Dutch",
    "Polish",
    "Greek",
    "Turkish",
    "Latin",
    "Danish",
)
UNITS = ("km", "miles", "meters", "feet", "kg", "pounds", "liters", "gallons", "hours", "minutes")
CURRENCIES = ("EUR", "USD", "GBP", "JPY", "CHF", "SEK", "INR", "CAD")
SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy")
ROOMS = ("kitchen", "bedroom", "bathroom", "hall", "garage", "office", "garden", "attic")
CITY = Param(("city", "location", "place", "town"), a_city, description="Name of the city")


def done(source: Source) -> dict:
    """Return the result of a tool that only does something."""
    return {source.choice(("status", "result")): source.choice(("ok", "done", "success"))}


def intent(name: str, params: dict[str, Param], result: Callable[[Source], dict] = done) -> Intent:
    """Make the intent that data/tools.txt has under this name."""
    (names,), descriptions, wordings, (answer,) = paragraphs("tools")[name]
    return Intent(tuple(names.split()), tuple(descriptions), params, tuple(wordings), result, answer)


INTENTS = (
    intent(
        "get_weather",
        {
            "city": CITY,
            "unit": Param(("unit", "units"), one_of("celsius", "fahrenheit"), enum=("celsius", "fahrenheit")),
        },
        lambda source: {"condition": source.choice(SKIES), "temperature": source.number(-9, 38)},
    ),
    intent("get_time", {"city": CITY}, lambda source: {"time": a_clock_time(source)}),
    intent(
        "calculator",
        {
            "expression": Param(
                ("expression", "formula", "input", "expr"), an_expression, description="What to calculate"
            )
        },
        lambda source: {"result": source.number(1, 9999)},
    ),
    intent(
        "search",
        {
            "query": Param(("query", "q", "topic", "text"), a_topic, description="What to search for"),
            "count": Param(("count", "limit", "max_results"), lambda source: source.number(1, 20), "integer"),
        },
        lambda source: {"title": title(source), "pages": source.number(1, 90)},
    ),
    intent(
        "send_message",
        {
            "to": Param(("to", "recipient", "person", "name"), a_name, description="Who gets it"),
            "text": Param(("text", "message", "body", "content"), a_sentence, description="What to say"),
        },
    ),
    intent(
        "set_reminder",
        {
            "task": Param(("task", "text", "what", "title"), a_chore, description="What to remember"),
            "time": Param(("time", "at", "when"), a_clock_time, description="Time as HH:MM"),
        },
    ),
    intent(
        "translate",
        {
            "text": Param(("text", "phrase", "input", "words"), a_topic),
            "language": Param(
                ("language", "target", "target_language", "to"),
                one_of(*LANGUAGES),
                description="Target language",
            ),
        },
        lambda source: {"translation": source.pseudo_word()},
    ),
    intent(
        "convert_units",
        {
            "value": Param(("value", "amount", "number"), a_number, "number"),
            "source": Param(
                ("from", "from_unit", "unit_from"), one_of(*UNITS[::2]), description="Unit to convert from"
            ),
            "target": Param(
                ("to", "to_unit", "unit_to"), one_of(*UNITS[1::2]), description="Unit to convert to"
            ),
        },
        lambda source: {"result": source.number(1, 999)},
    ),
    intent(
        "convert_currency",
        {
            "amount": Param(("amount", "value", "sum"), a_number, "number"),
            "source": Param(
                ("from_currency", "from", "source"), one_of(*CURRENCIES[::2]), description="Currency you have"
            ),
            "target": Param(
                ("to_currency", "to", "target"), one_of(*CURRENCIES[1::2]), description="Currency you want"
            ),
        },
        lambda source: {"result": source.number(1, 999)},
    ),
    intent(
        "play_music",
        {
            "song": Param(("song", "title", "track", "name"), title, description="Name of the song"),
            "volume": Param(("volume", "loudness"), lambda source: source.number(1, 10), "integer"),
        },
    ),
    intent(
        "set_light",
        {
            "room": Param(("room", "area", "where"), one_of(*ROOMS), description="The room"),
            "state": Param(("state", "mode", "action"), one_of("on", "off"), enum=("on", "off")),
        },
    ),
    intent(
        "set_timer",
        {
            "minutes": Param(
                ("minutes", "duration", "length"),
                lambda source: source.number(1, 90),
                "integer",
                description="Length in minutes",
            )
        },
    ),
    intent(
        "book_table",
        {
            "restaurant": Param(("restaurant", "place", "name"), title, description="Name of the restaurant"),
            "people": Param(
                ("people", "guests", "party_size"), lambda source: source.number(1, 12), "integer"
            ),
            "day": Param(("day", "date", "when"), one_of(*DAYS)),
        },
    ),
    intent(
        "get_stock_price",
        {"symbol": Param(("symbol", "ticker", "company"), lambda source: source.pseudo_word(1).upper())},
        lambda source: {"price": source.number(2, 900)},
    ),
    intent(
        "find_route",
        {
            "start": Param(("start", "from", "origin"), a_city, description="Where to start"),
            "end": Param(("end", "to", "destination"), a_city, description="Where to go"),
        },
        lambda source: {"distance_km": source.number(5, 999)},
    ),
    intent(
        "create_event",
        {
            "title": Param(
                ("title", "event", "name"),
                one_of(
                    "lunch",
                    "dentist",
                    "team meeting",
                    "piano lesson",
                    "yoga",
                    "parents evening",
                    "football",
                    "chess club",
                ),
            ),
            "day": Param(("day", "date"), one_of(*DAYS)),
            "time": Param(("time", "start", "at"), a_clock_time),
        },
    ),
    intent(
        "list_files",
        {
            "path": Param(
                ("path", "folder", "directory", "dir"),
                lambda source: "/" + "/".join(source.pseudo_word(1) for _ in range(source.number(1, 3))),
            )
        },
        lambda source: {"files": [f"{source.pseudo_word(1)}.txt" for _ in range(source.number(1, 3))]},
    ),
)
VERBS, NOUNS, NAMING, AMOUNTS = (words("invented_tools")[w] for w in ("verbs", "nouns", "naming", "amounts"))
ONE, TWO = (lines("invented_tools")[title] for title in ("one", "two"))


def joined(source: Source, *words: str) -> str:
    """A function name in one of the usual styles."""
    style = source.choice(("snake", "snake", "camel", "kebab"))
    if style == "camel":
        return words[0] + "".join(word.capitalize() for word in words[1:])
    return ("-" if style == "kebab" else "_").join(words)


def invented(source: Source) -> Intent:
    """A tool that does something to something; the pair of verb and noun belongs to the split."""

    def draw() -> tuple[str, str]:
        verb = source.pseudo_word(2) if source.chance(0.15) else source.choice(VERBS)
        return verb, source.pseudo_word(2) if source.chance(0.15) else source.choice(NOUNS)

    verb, noun = source.draw_key(draw, lambda pair: f"tool:{pair[0]} {pair[1]}")
    order = (verb, noun) if source.chance(0.8) else (noun, verb)
    value = source.choice(
        (lambda s: s.pseudo_word(), a_name, a_thing, lambda s: f"{s.pseudo_word(1).upper()}{s.number(1, 99)}")
    )
    params = {"value": Param((source.choice(NAMING), f"{noun}_{source.choice(NAMING)}", noun), value)}
    wording = source.wording(ONE)
    if source.chance(0.4):
        amount = source.choice(AMOUNTS)
        params["number"] = Param((amount,), a_number, "integer")
        wording = source.wording(TWO).replace("{amount}", amount)
    asked = wording.format(verb=verb, noun=noun)
    asked = asked[0].upper() + asked[1:]
    description = source.choice(
        (f"{verb.capitalize()} a {noun}", f"{verb.capitalize()} the {noun} of that name")
    )
    return Intent(
        (joined(source, *order),),
        (description,),
        params,
        (asked,),
        done,
        f"Done: {verb} the {noun} {{value}}.",
    )
