"""Answers as JSON after a schema that the prompt gives."""

import json

from scripts.demo.data import lines
from scripts.demo.lexicon import CITIES, COLOURS, CREATURES, DAYS, JOBS, NAMES, OBJECTS
from scripts.demo.source import Dialogue, Source, assistant, user

TEXTS = lines("extraction")


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
    text = source.wording(TEXTS["person"])
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
    text = source.wording(TEXTS["product"])
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
    text = source.wording(TEXTS["event"])
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
    text = source.wording(TEXTS["pet"])
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
    text = source.wording(TEXTS["order"])
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
    text = source.wording(TEXTS["book"])
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
    text = source.wording(TEXTS["weather"])
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
        source.wording(TEXTS["invented"]).format(t=", ".join(pairs)),
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
            {"role": "system", "content": source.wording(TEXTS["system"]).format(schema=written)},
            user(text),
        ]
    else:
        messages = [user(source.wording(TEXTS["ask"]).format(schema=written, text=text))]
    messages.append(assistant(json.dumps(wanted)))
    return Dialogue(messages, "json", expect={"json": wanted})
