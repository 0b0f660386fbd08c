"""Answers in JSON after a schema, with what the grammar forces as drafts and without: steps, and times.

    python benchmarks/speculation_json.py                  the demo model, one stream, tool calls too
    python benchmarks/speculation_json.py --model s135 --kind int4

Two engines, each in a process of its own, get every request in turns; each request has a salt of its own, so
that no earlier answer is drafted from. Where a schema leaves no choice, as about the names of properties, the
tokens are drafted, and verified like others; so is what repeats the text before. The number of steps does not
depend on the machine. What a model of random weights fills in is nonsense, and long: its strings are bounded.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from peers import checkpoints
from speculating.engines import Asked, EngineProcess, Run

from quire.bench.report import columns
from quire.config import EngineConfig
from quire.description import describe
from quire.frontend import Frontend
from quire.sampling_params import StructuredOutputsParams
from quire.text.tools import output_format_of

TEXT, NUMBER = {"type": "string", "maxLength": 12}, {"type": "integer", "minimum": 0, "maximum": 999}
LONG, FLAG, REAL = {"type": "string", "maxLength": 40}, {"type": "boolean"}, {"type": "number"}
DATE, SOME = {"type": "string", "format": "date"}, {"type": "array", "minItems": 1, "maxItems": 2}
PLACE, ITEM = {"street": TEXT, "city": TEXT}, {"product": TEXT, "quantity": NUMBER, "price": NUMBER}


def one_of(*words: str) -> dict[str, Any]:
    """Return the schema of a choice."""
    return {"enum": list(words)}


# By name, what is asked and the properties of the answer, all of which are required.
SCHEMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "person": ("Describe a person.", {"name": TEXT, "age": NUMBER, "city": TEXT}),
    "order": (
        "Order two things.",
        {
            "customer": {"name": TEXT, "email_address": TEXT},
            "first_item": ITEM,
            "second_item": ITEM,
            "is_express": FLAG,
        },
    ),
    "weather": (
        "What is the weather in Paris?",
        {
            "location": TEXT,
            "temperature": NUMBER,
            "unit": one_of("celsius", "fahrenheit"),
            "conditions": one_of("sunny", "cloudy", "rain", "snow"),
        },
    ),
    "review": (
        "Judge a story about a fox.",
        {"title": TEXT, "rating": NUMBER, "would_recommend": FLAG, "summary": LONG},
    ),
    "sentiment": (
        "I love this phone.",
        {"sentiment": one_of("positive", "negative"), "confidence": REAL, "reason": LONG},
    ),
    "answer": ("What is the capital of Norway?", {"answer": TEXT}),
    "verdict": ("Is Oslo in Norway?", {"answer": one_of("yes", "no"), "explanation": LONG}),
    "classification": ("Win money now!", {"label": one_of("spam", "ham", "unsure"), "is_urgent": FLAG}),
    "address": ("12 Main Street, Oslo", {**PLACE, "house_number": NUMBER, "postal_code": TEXT}),
    "entities": (
        "Ann met Tom in Paris.",
        {"people": SOME | {"items": TEXT}, "places": SOME | {"items": TEXT}},
    ),
    "product": (
        "A hammer for 15 dollars.",
        {"product_name": TEXT, "price": REAL, "in_stock": FLAG, "category": one_of("books", "tools")},
    ),
    "flight": (
        "From Oslo to Rome in 190 minutes.",
        {"departure_airport": TEXT, "arrival_airport": TEXT, "duration_minutes": NUMBER, "stops": NUMBER},
    ),
    "task": (
        "Buy milk by Friday.",
        {"task": TEXT, "priority": one_of("low", "high"), "due_date": DATE, "completed": FLAG},
    ),
    "movie": (
        "A comedy from 1994.",
        {"title": TEXT, "year": NUMBER, "genres": SOME | {"items": one_of("drama", "comedy")}},
    ),
    "position": ("48.8 north, 2.3 east", {"latitude": REAL, "longitude": REAL, "altitude_meters": REAL}),
    "settings": (
        "Dark theme, font 12, no mail.",
        {"theme": one_of("dark", "light"), "font_size": NUMBER, "notify": {"email": FLAG, "push": FLAG}},
    ),
    "sum": (
        "3 + 4",
        {"operation": one_of("add", "subtract"), "left": NUMBER, "right": NUMBER, "result": NUMBER},
    ),
    "profile": (
        "Tom Fox, born 1980, user 7.",
        {"user_id": NUMBER, "profile": {"first_name": TEXT, "last_name": TEXT, "birth_year": NUMBER}},
    ),
    "log": (
        "The disk is full.",
        {"level": one_of("info", "warning", "error"), "message": LONG, "timestamp": NUMBER},
    ),
    "invoice": (
        "Two lamps at 12 dollars.",
        {"invoice_number": TEXT, "total_amount": REAL, "currency": one_of("EUR", "USD"), "item": ITEM},
    ),
    "shipment": (
        "Order 17 for Ann in Rome",
        {"order_id": NUMBER, "customer_name": TEXT, "shipping_address": PLACE},
    ),
}
# By name, what is asked, the tools by name with their parameters, and which calls are asked for.
TOOLS: dict[str, tuple[str, dict[str, dict[str, Any]], str]] = {
    "one tool": ("What is the weather in Oslo?", {"get_weather": {"city": TEXT}}, "required"),
    "two tools": (
        "Set a timer for 5 minutes.",
        {"get_weather": {"city": TEXT}, "set_timer": {"minutes": NUMBER}},
        "required",
    ),
    "a choice": (
        "What is the weather in Rome?",
        {"get_weather": {"city": TEXT}, "add": {"first_number": NUMBER, "second_number": NUMBER}},
        "auto",
    ),
    "a long tool": (
        "Find flights from Oslo to Rome for 2",
        {"search_flights": {"departure_city": TEXT, "arrival_city": TEXT, "number_of_passengers": NUMBER}},
        "required",
    ),
}
HEADING = ["schema", "tokens", "steps off", "on", "ratio", "off, ms/token", "on", "ratio", "accepted"]


def schema(properties: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with these properties, in which others may be nested."""
    return {
        "type": "object",
        "properties": {
            name: one if "type" in one or "enum" in one else schema(one) for name, one in properties.items()
        },
        "required": list(properties),
        "additionalProperties": False,
    }


def called(name: str) -> list[dict[str, Any]]:
    """Return one of TOOLS as in OpenAI's API."""
    return [
        {
            "type": "function",
            "function": {"name": tool, "description": tool, "parameters": schema(properties)},
        }
        for tool, properties in TOOLS[name][1].items()
    ]


def structure(frontend: Frontend, name: str, prompt: str) -> StructuredOutputsParams:
    """Return what constrains the answers to a prompt."""
    if name in SCHEMAS:
        return StructuredOutputsParams(json=schema(SCHEMAS[name][1]))
    assert frontend.chat_template is not None
    assert frontend.tokenizer is not None
    form = output_format_of(frontend.chat_template.templates, frontend.tokenizer)
    return StructuredOutputsParams(grammar=form.grammar(called(name), TOOLS[name][2], prompt=prompt))


def requests(config: EngineConfig, name: str, count: int) -> list[Asked]:
    """Return requests for answers after one of SCHEMAS or TOOLS, which differ by their seeds and prompts."""
    description = describe(config)
    longest = description.longest_context
    frontend = Frontend(
        description.source, description.model, max_model_len=longest, longest_context=longest, seed=0
    )
    question = (SCHEMAS.get(name) or TOOLS[name])[0]
    tools = called(name) if name in TOOLS else None
    found = []
    for number in range(count):
        if config.model == "demo":
            text = question if tools else f"{question} Answer {number + 1} in JSON."
            encoded = frontend.encode_chat([{"role": "user", "content": text}], tools)
        else:
            encoded = frontend.encode(f"{question} Answer {number + 1}.")
        prompt = encoded.token_ids
        grammar = frontend.grammars.compile(structure(frontend, name, encoded.text or ""))
        params = {"temperature": 0.8, "seed": number}
        eos = frontend.eos_token_ids
        found.append(
            Asked(prompt, num_tokens=400, eos=eos, salt=f"{name} {number}", grammar=grammar, params=params)
        )
    frontend.close()
    return found


def row(name: str, runs: Sequence[tuple[Run, Run]]) -> list[str]:
    """Return the table's row of pairs of runs, with drafts and without."""
    on, off = zip(*runs, strict=True)
    answers = [run.answers[0] for run in on]
    tokens = sum(answer.num_tokens for answer in answers)
    steps = [sum(run.num_steps for run in way) for way in (off, on)]
    times = [1e3 * sum(run.decode_s for run in way) / tokens for way in (off, on)]
    accepted, drafted = (sum(getattr(a, field) for a in answers) for field in ("num_accepted", "num_drafted"))
    return [
        name,
        f"{tokens:,}",
        *(f"{number:,}" for number in steps),
        f"**{steps[0] / steps[1]:.2f}**",
        *(f"{time:.3f}" for time in times),
        f"{times[0] / times[1]:.2f}",
        f"{accepted:,} of {drafted:,}",
    ]


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    models = ["demo", *sorted(checkpoints.SHAPES)]
    parser.add_argument("--model", default="demo", choices=models, help="default: demo")
    kinds = ("int4", "int8", "bf16")
    parser.add_argument("--kind", default="int4", choices=kinds, help="of other models; default: int4")
    parser.add_argument("--count", type=int, default=4, metavar="N", help="answers a schema; default: 4")
    parser.add_argument("--threads", type=int, metavar="N", help="default: one per core")
    checkpoints.add_work_option(parser)
    options = parser.parse_args()
    config: dict[str, Any] = {"model": "demo", "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 30}
    if options.model != "demo":
        config["model"] = str(checkpoints.make(options.model, options.work))
        config |= {"quantization": options.kind} if options.kind != "bf16" else {}
    if options.threads:
        config["num_threads"] = options.threads
    on = EngineProcess("on", **config, speculative="auto")
    off = EngineProcess("off", **config, speculative="off")
    rows, everything = [HEADING], []
    for name in (*SCHEMAS, *(TOOLS if options.model == "demo" else ())):
        runs = []
        for number, asked in enumerate(requests(EngineConfig(**config), name, options.count)):
            order = (on, off) if number % 2 else (off, on)
            pair = {engine.name: engine.run([asked]) for engine in order}
            if pair["on"].answers[0].digest != pair["off"].answers[0].digest:
                raise SystemExit("answers with drafts and without differ")
            runs.append((pair["on"], pair["off"]))
        everything += runs
        rows.append(row(name, runs))
        print("  ".join(rows[-1]), flush=True)
    rows.append(row("all", everything))
    print("\n" + columns(rows))
    on.close()
    off.close()


if __name__ == "__main__":
    main()
