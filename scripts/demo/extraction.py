"""Answers as JSON after a schema that the prompt gives."""

import json

from scripts.demo.lexicon import CITIES, COLOURS, CREATURES, DAYS, JOBS, NAMES, OBJECTS
from scripts.demo.source import Dialogue, Source, assistant, user

ASK = (
    "Answer as JSON with this schema: {schema}\n{text}",
    "{text}\nReply with JSON that matches this schema: {schema}",
    "Extract the data as JSON.\nSchema: {schema}\nText: {text}",
    "Schema: {schema}\n{text}",
    "Turn this into JSON: {text}\nUse the schema {schema}",
    "Read this: {text}\nFill in this JSON schema: {schema}",
    "{text}\nGive me JSON for: {schema}",
    "JSON schema: {schema}\n\nText: {text}\n\nJSON:",
    "Fill the schema {schema} from this text: {text}",
    "Make JSON of the schema {schema} from: {text}",
    "Parse this sentence: {text}\nSchema: {schema}",
    "Write the answer as JSON. {text} Schema: {schema}",
    "Please extract the fields of this schema: {schema}\n\n{text}",
)
SYSTEM_ASK = (
    "Answer only with JSON that follows this schema: {schema}",
    "Reply in JSON. The schema is: {schema}",
    "You extract data. Use this JSON schema: {schema}",
    "Respond with a JSON object that matches {schema}",
    "Output JSON only, according to the schema {schema}",
)


def a_name(source: Source) -> str:
    return source.pseudo_word(2).capitalize() if source.chance(0.4) else source.choice(NAMES)


def a_city(source: Source) -> str:
    return source.pseudo_word(2).capitalize() if source.chance(0.4) else source.choice(CITIES)


def a_thing(source: Source) -> str:
    return source.pseudo_word(2) if source.chance(0.3) else source.choice(OBJECTS)


def title(source: Source) -> str:
    return f"The {source.choice(COLOURS).capitalize()} {a_thing(source).capitalize()}"


STRING, INTEGER, BOOLEAN = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}


def person(source: Source) -> tuple[dict, dict, str]:
    name, age, city, job = a_name(source), source.number(3, 99), a_city(source), source.choice(JOBS)
    text = source.wording(
        (
            "{name} is {age} years old, lives in {city} and works as a {job}.",
            "{name}, {age}, is a {job} from {city}.",
            "My friend {name} from {city} is {age} and a {job}.",
            "I am {name}, I am {age}, and I work as a {job} in {city}.",
            "In {city} lives a {job} called {name} who is {age} years old.",
            "The {job} {name} ({age}) lives in {city}.",
            "Meet {name}: {age} years old, {job}, living in {city}.",
            "{name} is a {age} year old {job} in {city}.",
        )
    )
    fields = {"name": STRING, "age": INTEGER, "city": STRING, "job": STRING}
    values = {"name": name, "age": age, "city": city, "job": job}
    return fields, values, text.format(**values)


def product(source: Source) -> tuple[dict, dict, str]:
    item, colour, price, stock = (
        a_thing(source),
        source.choice(COLOURS),
        source.number(1, 200),
        source.chance(0.5),
    )
    text = source.wording(
        (
            "The {color} {item} costs {price} euros and is {there}.",
            "For {price} dollars you get a {color} {item}. It is {there}.",
            "We have a {color} {item} for {price} coins; it is {there}.",
            "A {item} in {color}, price {price}, {there}.",
            "This {item} is {color}, it is {there} and it costs {price}.",
            "{color} {item}, {there}, {price} euros.",
        )
    )
    fields = {
        "item": STRING,
        "color": source.choice((STRING, {"type": "string", "enum": source.some(COLOURS, 3)})),
        "price": INTEGER,
        "in_stock": BOOLEAN,
    }
    if "enum" in fields["color"]:
        colour = source.choice(fields["color"]["enum"])
    values = {"item": item, "color": colour, "price": price, "in_stock": stock}
    return fields, values, text.format(**values, there="in stock" if stock else "sold out")


def event(source: Source) -> tuple[dict, dict, str]:
    what, day, guests, city = (
        source.choice(("party", "concert", "meeting", "wedding", "race", "picnic", "lesson")),
        source.choice(DAYS),
        source.number(2, 99),
        a_city(source),
    )
    text = source.wording(
        (
            "The {event} is on {day} in {city} with {guests} guests.",
            "On {day} there is a {event} for {guests} people in {city}.",
            "{guests} people will come to the {event} in {city} on {day}.",
            "Come to {city} on {day}: a {event} with {guests} people.",
            "In {city} we plan a {event} on {day}; {guests} guests are invited.",
        )
    )
    fields = {
        "event": STRING,
        "day": source.choice((STRING, {"type": "string", "enum": DAYS})),
        "guests": INTEGER,
        "city": STRING,
    }
    values = {"event": what, "day": day, "guests": guests, "city": city}
    return fields, values, text.format(**values)


def pet(source: Source) -> tuple[dict, dict, str]:
    kinds = source.some(CREATURES[:60], 3)
    values = {
        "name": a_name(source),
        "species": source.choice(kinds),
        "age": source.number(1, 20),
        "friendly": source.chance(0.5),
    }
    text = source.wording(
        (
            "{name} is a {mood} {species} and is {age} years old.",
            "My {species} is called {name}; it is {age} and {mood}.",
            "We have a {mood} {species} named {name} who is {age}.",
            "The {species} {name} is {mood} and {age} years old.",
            "Our {age} year old {species} {name} is {mood}.",
        )
    )
    fields = {
        "name": STRING,
        "species": source.choice((STRING, {"type": "string", "enum": kinds})),
        "age": INTEGER,
        "friendly": BOOLEAN,
    }
    return fields, values, text.format(**values, mood="friendly" if values["friendly"] else "unfriendly")


def order(source: Source) -> tuple[dict, dict, str]:
    items = [a_thing(source) for _ in range(source.number(1, 4))]
    listed = items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
    values = {
        "customer": a_name(source),
        "items": items,
        "total": source.number(1, 300),
        "paid": source.chance(0.5),
    }
    text = source.wording(
        (
            "{customer} ordered {listed} for {total} euros and {has} paid.",
            "{customer} wants {listed}. Total: {total}. {customer} {has} paid.",
            "Order of {customer}: {listed}, together {total}, {has} paid.",
            "{listed} for {customer}, {total} dollars, who {has} paid.",
            "{customer} {has} paid {total} for {listed}.",
        )
    )
    fields = {
        "customer": STRING,
        "items": {"type": "array", "items": STRING},
        "total": INTEGER,
        "paid": BOOLEAN,
    }
    return fields, values, text.format(**values, listed=listed, has="has" if values["paid"] else "has not")


def book(source: Source) -> tuple[dict, dict, str]:
    values = {
        "title": title(source),
        "author": f"{a_name(source)} {a_name(source)}",
        "pages": source.number(10, 900),
        "year": source.number(1900, 2025),
    }
    text = source.wording(
        (
            "{title} by {author} has {pages} pages and came out in {year}.",
            "In {year} {author} wrote {title}, a book of {pages} pages.",
            "{author} is the author of {title} ({year}, {pages} pages).",
            "I am reading {title}. It is from {year}, has {pages} pages and was written by {author}.",
            "The book {title} was written by {author} in {year}. Pages: {pages}.",
        )
    )
    fields = {"title": STRING, "author": STRING, "pages": INTEGER, "year": INTEGER}
    return fields, values, text.format(**values)


def weather(source: Source) -> tuple[dict, dict, str]:
    skies = ["sunny", "cloudy", "rainy", "windy", "snowy", "foggy"]
    values = {
        "city": a_city(source),
        "temperature": source.number(-9, 38),
        "condition": source.choice(skies),
        "day": source.choice(DAYS),
    }
    text = source.wording(
        (
            "On {day} it is {condition} in {city} with {temperature} degrees.",
            "{city}, {day}: {condition}, {temperature} degrees.",
            "It will be {condition} and {temperature} degrees in {city} on {day}.",
            "The weather in {city} on {day} is {condition} at {temperature} degrees.",
        )
    )
    condition = source.choice((STRING, {"type": "string", "enum": skies}))
    fields = {"city": STRING, "temperature": INTEGER, "condition": condition, "day": STRING}
    return fields, values, text.format(**values)


def invented(source: Source) -> tuple[dict, dict, str]:
    """Keys and values nobody has seen, listed as `key: value`."""
    fields, values, pairs = {}, {}, []
    for _ in range(source.number(2, 4)):
        key, kind = source.pseudo_word(), source.choice((STRING, INTEGER, BOOLEAN))
        value = (
            source.pseudo_word()
            if kind is STRING
            else source.number(0, 500)
            if kind is INTEGER
            else source.chance(0.5)
        )
        fields[key], values[key] = kind, value
        pairs.append(f"{key} is {json.dumps(value) if kind is BOOLEAN else value}")
    source.random.shuffle(pairs)
    return (
        fields,
        values,
        source.wording(("{t}.", "Here: {t}.", "We know that {t}.", "The {t}.")).format(t=", ".join(pairs)),
    )


DOMAINS = (person, person, product, event, pet, order, book, weather, invented)


def schema_of(source: Source, fields: dict, keys: list[str]) -> dict:
    schema = {"type": "object", "properties": {key: fields[key] for key in keys}}
    if source.chance(0.7):
        schema["required"] = keys
    if source.chance(0.2):
        schema["additionalProperties"] = False
    return schema


def extraction(source: Source) -> Dialogue:
    """A sentence, a schema with some of its fields in any order, and the JSON."""
    fields, values, text = source.choice(DOMAINS)(source)
    keys = source.some(list(fields), source.number(min(2, len(fields)), len(fields)))
    schema = schema_of(source, fields, keys)
    written = json.dumps(schema)
    wanted = {key: values[key] for key in keys}
    if source.chance(0.3):
        messages = [
            {"role": "system", "content": source.wording(SYSTEM_ASK).format(schema=written)},
            user(text),
        ]
    else:
        messages = [user(source.wording(ASK).format(schema=written, text=text))]
    messages.append(assistant(json.dumps(wanted)))
    return Dialogue(messages, "json", expect={"json": wanted})
