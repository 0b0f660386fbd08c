"""What tools do: how they are named, described and asked for, what they take, and what comes back."""

from collections.abc import Callable
from dataclasses import dataclass

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
    """What a tool returns that only does something."""
    return {source.choice(("status", "result")): source.choice(("ok", "done", "success"))}


INTENTS = (
    Intent(
        (
            "get_weather",
            "weather",
            "current_weather",
            "fetch_weather",
            "get_current_weather",
            "weather_lookup",
        ),
        ("Get the current weather in a city", "Current weather of a place", "Look up the weather"),
        {
            "city": CITY,
            "unit": Param(("unit", "units"), one_of("celsius", "fahrenheit"), enum=("celsius", "fahrenheit")),
        },
        (
            "What is the weather in {city}?",
            "How is the weather in {city}?",
            "What's the weather like in {city}?",
            "Is it raining in {city}?",
            "Weather in {city}?",
            "Tell me the weather in {city}.",
            "Do I need an umbrella in {city}?",
            "How warm is it in {city}?",
            "Weather for {city} please",
            "What is the temperature in {city} in {unit}?",
            "Check the weather in {city} in {unit}.",
            "Is it cold in {city}?",
            "What's the weather in {city} right now?",
            "Will I need a coat in {city} today?",
            "Could you look up the weather in {city}?",
            "Is the sun shining in {city}?",
        ),
        lambda source: {"condition": source.choice(SKIES), "temperature": source.number(-9, 38)},
        "It is {condition} in {city}, with {temperature} degrees.",
    ),
    Intent(
        ("get_time", "current_time", "time_in", "clock", "what_time", "get_local_time"),
        ("Get the current time in a city", "Local time of a place", "Tell the time"),
        {"city": CITY},
        (
            "What time is it in {city}?",
            "Tell me the time in {city}.",
            "What is the local time in {city}?",
            "Current time in {city}?",
            "How late is it in {city}?",
            "Is it night in {city} now?",
            "Time in {city} please",
            "Do you know what time it is in {city}?",
            "What does the clock say in {city}?",
        ),
        lambda source: {"time": a_clock_time(source)},
        "It is {time} in {city}.",
    ),
    Intent(
        ("calculator", "calculate", "compute", "evaluate", "math", "do_math"),
        ("Evaluate an arithmetic expression", "Calculate the value of an expression", "Do arithmetic"),
        {
            "expression": Param(
                ("expression", "formula", "input", "expr"), an_expression, description="What to calculate"
            )
        },
        (
            "What is {expression}?",
            "Calculate {expression}.",
            "Compute {expression}.",
            "How much is {expression}?",
            "Use the calculator for {expression}.",
            "Please work out {expression}.",
            "I need the value of {expression}.",
            "{expression} = ?",
            "Can you calculate {expression} for me?",
            "Evaluate {expression}",
        ),
        lambda source: {"result": source.number(1, 9999)},
        "{expression} = {result}",
    ),
    Intent(
        ("search", "web_search", "search_web", "find_pages", "lookup", "search_internet"),
        ("Search the web", "Find pages about a topic", "Look something up on the internet"),
        {
            "query": Param(("query", "q", "topic", "text"), a_topic, description="What to search for"),
            "count": Param(("count", "limit", "max_results"), lambda source: source.number(1, 20), "integer"),
        },
        (
            "Search for {query}.",
            "Search the web for {query}.",
            "Find pages about {query}.",
            "Look up {query} on the internet.",
            "Google {query}",
            "What can you find about {query}?",
            "Find {count} pages about {query}.",
            "Search the web for {query} and give me {count} results.",
            "Please look for {query} online.",
            "I need information about {query}.",
            "Show me {count} results for {query}.",
        ),
        lambda source: {"title": title(source), "pages": source.number(1, 90)},
        "I found {pages} pages. The first is called {title}.",
    ),
    Intent(
        ("send_message", "message", "send_text", "text_person", "send_sms", "write_message"),
        ("Send a message to a person", "Send a text message", "Write somebody a message"),
        {
            "to": Param(("to", "recipient", "person", "name"), a_name, description="Who gets it"),
            "text": Param(("text", "message", "body", "content"), a_sentence, description="What to say"),
        },
        (
            'Send {to} the message "{text}".',
            "Tell {to}: {text}",
            "Write to {to}: {text}",
            'Message {to} "{text}"',
            "Send a message to {to} saying {text}.",
            "Text {to} that {text}.",
            "Let {to} know: {text}",
            'Please send "{text}" to {to}.',
            'Can you text "{text}" to {to}?',
            "Drop {to} a line: {text}",
        ),
        done,
        "I sent your message to {to}.",
    ),
    Intent(
        ("set_reminder", "reminder", "add_reminder", "remind", "create_reminder", "remind_me"),
        ("Set a reminder", "Remind the user of something", "Create a reminder for a time"),
        {
            "task": Param(("task", "text", "what", "title"), a_chore, description="What to remember"),
            "time": Param(("time", "at", "when"), a_clock_time, description="Time as HH:MM"),
        },
        (
            "Remind me to {task} at {time}.",
            "Set a reminder for {time}: {task}",
            "At {time} remind me to {task}.",
            "I must {task} at {time}, remind me.",
            "Please remind me at {time} to {task}.",
            "Reminder: {task}, {time}",
            "Do not let me forget to {task} at {time}.",
            "Create a reminder to {task} at {time}.",
        ),
        done,
        "I will remind you to {task} at {time}.",
    ),
    Intent(
        ("translate", "translate_text", "translator", "translation", "to_language"),
        ("Translate a text", "Translate words into another language", "Turn text into another language"),
        {
            "text": Param(("text", "phrase", "input", "words"), a_topic),
            "language": Param(
                ("language", "target", "target_language", "to"),
                one_of(*LANGUAGES),
                description="Target language",
            ),
        },
        (
            'Translate "{text}" into {language}.',
            'How do you say "{text}" in {language}?',
            "What is {text} in {language}?",
            "Translate {text} to {language}.",
            'Say "{text}" in {language}.',
            'I need "{text}" in {language}.',
            '{language} for "{text}"?',
            "Please put {text} into {language}.",
        ),
        lambda source: {"translation": source.pseudo_word()},
        "In {language} that is {translation}.",
    ),
    Intent(
        ("convert_units", "unit_converter", "convert", "unit_convert"),
        ("Convert between units", "Convert a value to another unit", "Unit conversion"),
        {
            "value": Param(("value", "amount", "number"), a_number, "number"),
            "source": Param(
                ("from", "from_unit", "unit_from"), one_of(*UNITS[::2]), description="Unit to convert from"
            ),
            "target": Param(
                ("to", "to_unit", "unit_to"), one_of(*UNITS[1::2]), description="Unit to convert to"
            ),
        },
        (
            "Convert {value} {source} to {target}.",
            "How many {target} are {value} {source}?",
            "What is {value} {source} in {target}?",
            "{value} {source} in {target}?",
            "Change {value} {source} into {target}.",
            "Please convert {value} {source} into {target}.",
            "I have {value} {source}. How many {target} is that?",
        ),
        lambda source: {"result": source.number(1, 999)},
        "{value} {source} are {result} {target}.",
    ),
    Intent(
        ("convert_currency", "exchange", "currency_converter", "exchange_money"),
        ("Convert money between currencies", "Currency exchange", "Exchange an amount of money"),
        {
            "amount": Param(("amount", "value", "sum"), a_number, "number"),
            "source": Param(
                ("from_currency", "from", "source"), one_of(*CURRENCIES[::2]), description="Currency you have"
            ),
            "target": Param(
                ("to_currency", "to", "target"), one_of(*CURRENCIES[1::2]), description="Currency you want"
            ),
        },
        (
            "How much is {amount} {source} in {target}?",
            "Convert {amount} {source} to {target}.",
            "Change {amount} {source} into {target}.",
            "Exchange {amount} {source} for {target}.",
            "What are {amount} {source} worth in {target}?",
            "I want {target} for {amount} {source}.",
            "{amount} {source} to {target} please",
        ),
        lambda source: {"result": source.number(1, 999)},
        "{amount} {source} are {result} {target}.",
    ),
    Intent(
        ("play_music", "play_song", "music", "start_music", "play"),
        ("Play a song", "Play music", "Start a song on the speaker"),
        {
            "song": Param(("song", "title", "track", "name"), title, description="Name of the song"),
            "volume": Param(("volume", "loudness"), lambda source: source.number(1, 10), "integer"),
        },
        (
            "Play {song}.",
            "I want to hear {song}.",
            "Put on the song {song}.",
            "Play the song {song} please.",
            "Play {song} at volume {volume}.",
            "Can you play {song}?",
            "Start {song} with volume {volume}.",
            "Let me listen to {song}.",
        ),
        done,
        "Now playing {song}.",
    ),
    Intent(
        ("set_light", "light", "control_light", "switch_light", "lights"),
        ("Switch a light on or off", "Control the light of a room", "Turn lights on or off"),
        {
            "room": Param(("room", "area", "where"), one_of(*ROOMS), description="The room"),
            "state": Param(("state", "mode", "action"), one_of("on", "off"), enum=("on", "off")),
        },
        (
            "Turn {state} the light in the {room}.",
            "Switch the {room} light {state}.",
            "Light {state} in the {room}!",
            "Please turn the {room} light {state}.",
            "{room} light {state}",
            "I want the light in the {room} {state}.",
            "Could you switch {state} the light in the {room}?",
        ),
        done,
        "The light in the {room} is {state}.",
    ),
    Intent(
        ("set_timer", "timer", "start_timer", "countdown"),
        ("Start a timer", "Set a timer for some minutes", "Count down minutes"),
        {
            "minutes": Param(
                ("minutes", "duration", "length"),
                lambda source: source.number(1, 90),
                "integer",
                description="Length in minutes",
            )
        },
        (
            "Set a timer for {minutes} minutes.",
            "Start a timer of {minutes} minutes.",
            "Timer: {minutes} minutes",
            "Wake me in {minutes} minutes.",
            "Count down {minutes} minutes.",
            "Give me a {minutes} minute timer.",
            "I need a timer for {minutes} minutes.",
        ),
        done,
        "The timer is set for {minutes} minutes.",
    ),
    Intent(
        ("book_table", "reserve_table", "restaurant_booking", "reservation"),
        ("Reserve a table in a restaurant", "Book a table", "Make a restaurant reservation"),
        {
            "restaurant": Param(("restaurant", "place", "name"), title, description="Name of the restaurant"),
            "people": Param(
                ("people", "guests", "party_size"), lambda source: source.number(1, 12), "integer"
            ),
            "day": Param(("day", "date", "when"), one_of(*DAYS)),
        },
        (
            "Book a table at {restaurant} for {people} people on {day}.",
            "Reserve a table for {people} at {restaurant} on {day}.",
            "We are {people} and want to eat at {restaurant} on {day}.",
            "On {day} I need a table for {people} at {restaurant}.",
            "Table for {people} at {restaurant}, {day}",
            "Please book {restaurant} for {people} people on {day}.",
        ),
        done,
        "I booked a table for {people} at {restaurant} on {day}.",
    ),
    Intent(
        ("get_stock_price", "stock_price", "stock", "share_price"),
        ("Get the price of a stock", "Current share price of a company", "Look up a stock"),
        {"symbol": Param(("symbol", "ticker", "company"), lambda source: source.pseudo_word(1).upper())},
        (
            "What is the stock price of {symbol}?",
            "How much is a share of {symbol}?",
            "Price of {symbol} stock?",
            "Look up the stock {symbol}.",
            "How is {symbol} trading?",
            "Tell me the share price of {symbol}.",
            "What does {symbol} stock cost?",
        ),
        lambda source: {"price": source.number(2, 900)},
        "{symbol} is at {price}.",
    ),
    Intent(
        ("find_route", "directions", "route", "get_directions", "navigate"),
        ("Find the way between two places", "Get directions", "Plan a route"),
        {
            "start": Param(("start", "from", "origin"), a_city, description="Where to start"),
            "end": Param(("end", "to", "destination"), a_city, description="Where to go"),
        },
        (
            "How do I get from {start} to {end}?",
            "Find a route from {start} to {end}.",
            "What is the way from {start} to {end}?",
            "Directions from {start} to {end}",
            "I want to go from {start} to {end}.",
            "Show me the way to {end} from {start}.",
            "Navigate from {start} to {end}.",
        ),
        lambda source: {"distance_km": source.number(5, 999)},
        "From {start} to {end} it is {distance_km} km.",
    ),
    Intent(
        ("create_event", "add_event", "calendar", "schedule_meeting", "add_to_calendar"),
        ("Add an event to the calendar", "Create a calendar entry", "Put a meeting into the calendar"),
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
        (
            "Add {title} to my calendar on {day} at {time}.",
            "Put {title} on {day} at {time} into my calendar.",
            "I have {title} on {day} at {time}, write it down.",
            "Create an event: {title}, {day}, {time}",
            "Schedule {title} for {day} at {time}.",
            "On {day} at {time} I have {title}. Add it.",
        ),
        done,
        "{title} is in your calendar for {day} at {time}.",
    ),
    Intent(
        ("list_files", "ls", "show_files", "read_directory"),
        ("List the files of a folder", "Show what is in a directory", "List a directory"),
        {
            "path": Param(
                ("path", "folder", "directory", "dir"),
                lambda source: "/" + "/".join(source.pseudo_word(1) for _ in range(source.number(1, 3))),
            )
        },
        (
            "Which files are in {path}?",
            "List the files in {path}.",
            "Show me the folder {path}.",
            "What is in {path}?",
            "ls {path}",
            "Please list {path}.",
            "Open {path} and tell me what is there.",
        ),
        lambda source: {"files": [f"{source.pseudo_word(1)}.txt" for _ in range(source.number(1, 3))]},
        "I see {files}.",
    ),
)
VERBS = """open close start stop paint lock unlock delete create rename buy sell book cancel print scan
clean repair move copy hide show check measure wash fill empty charge rent order return find
track restart update pause resume archive share invite greet feed water cut fold count weigh
test""".split()
NOUNS = """door account list file photo garage robot printer parcel ticket garden car bike boat oven
heater fan pump camera alarm window ladder bottle tank folder album video page book letter
contract user group team room desk chair lamp plant fish horse machine engine sensor server
database""".split()
NAMING = ("name", "id", "label", "target", "item", "key", "code", "title")
AMOUNTS = ("count", "level", "amount", "times", "speed", "days", "size")
SINGLE = (
    "{verb} the {noun} {{value}}.",
    "Please {verb} the {noun} {{value}}.",
    "Can you {verb} the {noun} {{value}}?",
    "I want to {verb} the {noun} {{value}}.",
    "{verb} the {noun} called {{value}}.",
    "{verb} {noun} {{value}}",
    "I need you to {verb} the {noun} named {{value}}.",
    "Could you {verb} {noun} {{value}} for me?",
    "Go and {verb} the {noun} {{value}}.",
    "It is time to {verb} the {noun} {{value}}.",
    "Would you {verb} the {noun} with the name {{value}}?",
    "The {noun} {{value}}: {verb} it.",
)
DOUBLE = (
    "{verb} the {noun} {{value}} with {amount} {{number}}.",
    "Please {verb} the {noun} {{value}}, {amount} {{number}}.",
    "{verb} the {noun} called {{value}}. The {amount} is {{number}}.",
    "With {amount} {{number}}, {verb} the {noun} {{value}}.",
    "I want to {verb} the {noun} {{value}} and set the {amount} to {{number}}.",
    "Can you {verb} {noun} {{value}} using {amount} {{number}}?",
    "Use {amount} {{number}} to {verb} the {noun} {{value}}.",
)


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
    wording = source.wording(SINGLE)
    if source.chance(0.4):
        amount = source.choice(AMOUNTS)
        params["number"] = Param((amount,), a_number, "integer")
        wording = source.wording(DOUBLE).replace("{amount}", amount)
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
