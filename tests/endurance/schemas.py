"""Check that structured output is always valid: hundreds of generated JSON schemas, and tool calls.

    make endurance ARGS="schemas"                            512 schemas, 160 prompts with tools: some minutes
    make endurance ARGS="schemas --schemas 2000 --seed 7"    others
    make endurance ARGS="schemas --show 9"                   print the schema of that number, and stop

Starts `quire serve demo`, and asks for answers by --temperature, so that the small model strays as far as the
grammar lets it. The schemas grow from a single value to --size of them: strings with lengths, patterns and
formats, bounded numbers, enums, constants, arrays, tuples, objects with optional properties, alternatives,
references. An output that ended by itself must be JSON and must validate (by the jsonschema package, with
formats); one that was cut by the length of the context is counted apart, for it cannot be whole. With tools,
tool_choice is "required": there must be calls, of functions that were given, with arguments that validate.
Ends with status 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import jsonschema
from serving import processes
from serving.processes import ServerProcess

from endurance.structures import random_schema, schema_size, tool_prompt, tool_sets
from quire.bench.http_client import Client
from quire.bench.openai_api import CHAT, Unusable
from quire.bench.report import columns

ROOM = 900  # tokens for an answer: what the demo model's context leaves
AT_ONCE = 16
PARTS = 4  # of the schemas, by size
VALID, CUT, WRONG = "valid", "cut by length", "wrong"
FORMATS = jsonschema.FormatChecker()
HOURS = r"([01]\d|2[0-3]):[0-5]\d"


@FORMATS.checks("date")
def is_date(text: object) -> bool:
    """As RFC 3339 has it, where there is a year 0000; Python has none."""
    if not isinstance(text, str) or not re.fullmatch(r"\d{4}-\d\d-\d\d", text):
        return not isinstance(text, str)
    try:
        date(int(text[:4]) or 2000, int(text[5:7]), int(text[8:]))
    except ValueError:
        return False
    return True


@FORMATS.checks("time")
def is_time(text: object) -> bool:
    """As RFC 3339 has it, without leap seconds."""
    return (
        not isinstance(text, str)
        or re.fullmatch(rf"{HOURS}:[0-5]\d(\.\d+)?([Zz]|[+-]{HOURS})", text) is not None
    )


@FORMATS.checks("date-time")
def is_date_time(text: object) -> bool:
    """Both, and what parts them."""
    if not isinstance(text, str):
        return True
    day, _, time = text.upper().partition("T")
    return is_date(day) and is_time(time)


class Asker:
    """Asks for everything, and keeps what came of it."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        self.outcomes: Counter[tuple[str, str]] = Counter()  # (group, what came of it)
        self.problems: list[str] = []
        self.num_tokens = 0
        self._client = Client(url)
        self._options = options
        self._num_done = 0

    async def run(self) -> None:
        """All schemas, then all prompts with tools."""
        room = asyncio.Semaphore(AT_ONCE)

        async def bounded(asking: Any) -> None:
            async with room:
                await asking

        jobs = [self._schema(number, one) for number, one in enumerate(schemas(self._options))]
        dice = random.Random(self._options.seed)
        jobs += [self._tools(dice.randrange(1 << 30)) for _ in range(self._options.prompts)]
        await asyncio.gather(*map(bounded, jobs))
        self._client.close()

    async def _ask(self, body: dict[str, Any], seed: int) -> dict[str, Any]:
        full = {"temperature": self._options.temperature, "seed": seed, "max_tokens": ROOM, **body}
        reply = await self._client.post(CHAT, json.dumps(full).encode())
        self._num_done += 1
        if sys.stderr.isatty():
            total = self._options.schemas + self._options.prompts
            print(end=f"\r\x1b[K{self._num_done} of {total}", file=sys.stderr, flush=True)
        answer: dict[str, Any] = json.loads(reply.body)
        if reply.status != 200:
            raise ValueError(f"HTTP {reply.status}: {answer}")
        self.num_tokens += answer["usage"]["completion_tokens"]
        choice: dict[str, Any] = answer["choices"][0]
        return choice

    async def _schema(self, number: int, schema: dict[str, Any]) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
        messages = [{"role": "user", "content": "Answer in JSON."}]
        group = f"schemas, {_quarter(number, self._options.schemas)}"
        text = ""
        try:
            choice = await self._ask({"messages": messages, "response_format": form}, number)
            text = choice["message"]["content"]
            if choice["finish_reason"] == "stop":
                jsonschema.validate(json.loads(text), schema, format_checker=FORMATS)
            self.outcomes[group, VALID if choice["finish_reason"] == "stop" else CUT] += 1
        except (ValueError, LookupError, jsonschema.ValidationError) as error:
            self._wrong(group, f"schema {number}: {str(error)[:300]}; the output was `{text[:300]}`")

    async def _tools(self, seed: int) -> None:
        dice = random.Random(seed)
        tools = dice.choice(tool_sets())
        messages = [{"role": "user", "content": tool_prompt(dice)}]
        group, said = "tools", ""
        try:
            choice = await self._ask({"messages": messages, "tools": tools, "tool_choice": "required"}, seed)
            said = json.dumps(choice["message"])
            if choice["finish_reason"] == "length":
                self.outcomes[group, CUT] += 1
                return
            if choice["finish_reason"] != "tool_calls" or not choice["message"]["tool_calls"]:
                raise ValueError("no call came")
            schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
            for call in choice["message"]["tool_calls"]:
                function = call["function"]
                jsonschema.validate(json.loads(function["arguments"]), schemas[function["name"]])
            self.outcomes[group, VALID] += 1
        except (ValueError, LookupError, jsonschema.ValidationError) as error:
            self._wrong(group, f"tools, seed {seed}: {str(error)[:300]}; the answer was `{said[:300]}`")

    def _wrong(self, group: str, problem: str) -> None:
        self.outcomes[group, WRONG] += 1
        self.problems.append(problem)


def schemas(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All of them, growing."""
    dice = random.Random(options.seed)
    count = options.schemas
    return [random_schema(dice, 1 + options.size * number // max(count, 1)) for number in range(count)]


def _quarter(number: int, count: int) -> str:
    part = number * PARTS // count
    return f"{part * count // PARTS} to {(part + 1) * count // PARTS - 1}"


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--schemas", type=int, default=512, metavar="N", help="default: 512")
    add("--prompts", type=int, default=160, metavar="N", help="with tools (default: 160)")
    add("--size", type=int, default=40, metavar="N", help="values in the last schemas, about (default: 40)")
    add("--temperature", type=float, default=1.2, metavar="T", help="default: 1.2")
    add("--seed", type=int, default=0, help="of schemas, prompts and sampling (default: 0)")
    add("--show", type=int, metavar="N", help="print one schema and stop")
    return parser.parse_args()


async def run(options: argparse.Namespace, log: Path) -> Asker:
    """Ask a server of its own."""
    async with ServerProcess(["demo"], log) as server:
        asker = Asker(server.url, options)
        await asker.run()
    return asker


def main() -> None:
    options = read_options()
    if options.show is not None:
        print(json.dumps(schemas(options)[options.show], indent=1, ensure_ascii=False))
        return
    log = Path(tempfile.mkstemp(prefix="quire-schemas-", suffix=".log")[1])
    try:
        asker = processes.run(run(options, log))
    except Unusable as problem:
        sys.exit(f"{problem}\nlog: {log}")
    log.unlink()
    groups = [
        f"schemas, {_quarter(part * options.schemas // PARTS, options.schemas)}" for part in range(PARTS)
    ]
    groups.append("tools")
    rows = [
        (group, *(f"{asker.outcomes[group, came]:,}" for came in (VALID, CUT, WRONG))) for group in groups
    ]
    total = Counter(came for _, came in asker.outcomes.elements())
    rows.append(("all", *(f"{total[came]:,}" for came in (VALID, CUT, WRONG))))
    largest = max(map(schema_size, schemas(options)), default=0)
    print(f"\n{asker.num_tokens:,} tokens; the largest schema has {largest} values\n")
    print(columns([("", VALID, CUT, WRONG), *rows]))
    print("".join(f"\n- {problem}" for problem in asker.problems[:20]))
    sys.exit(1 if asker.problems else 0)
