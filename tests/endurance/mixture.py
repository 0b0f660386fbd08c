"""Traffic of every kind for a server that must bear it for hours, and what its answers must be like."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from endurance.answers import Answer, Case, Check, message_problem, response_problem, was_cut, well_formed
from endurance.refusals import WRONG
from quire.bench.openai_api import CHAT, COMPLETIONS
from quire.bench.workload import WORDS

RESPONSES, MESSAGES, TOKENIZE = "/v1/responses", "/v1/messages", "/tokenize"
# Of all requests: how many are hung up on, refused, constrained by a grammar, or call tools.
ABORTED, INVALID, CONSTRAINED, TOOLS = 0.20, 0.05, 0.10, 0.05
NUM_PREFIXES = 4  # beginnings that prompts have in common
LARGEST_STEP = 512  # tokens; the default of --max-num-batched-tokens
LAST_CHUNK = 24  # a client that hangs up has read fewer than so many events

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["fox", "owl", "hare"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 16}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "The weather of a city", "parameters": PARAMETERS}
REGEX = r"[A-Z]{2}-[0-9]{4}(-[a-f]{1,8})?"
CHOICE = ["red", "green", "blue", "a colour of its own"]


class Mixture:
    """Draws requests of every kind in their shares."""

    def __init__(self, model: str, seed: int, num_prompt_tokens: int, num_output_tokens: int) -> None:
        self._model = model
        self._dice = random.Random(seed)
        self._length, self._output = num_prompt_tokens, num_output_tokens
        self._prefixes = [self._dice.choices(WORDS, k=num_prompt_tokens // 2) for _ in range(NUM_PREFIXES)]
        self._plain: list[Callable[[], Case]] = [
            *(self._chat, self._chat, self._completion, self._completion, self._several),
            *(self._logprobs, self._penalties, self._echo, self._tokens, self._response, self._message),
        ]
        self._left: list[Callable[[], Case]] = [
            *(self._chat, self._completion, self._json_schema, self._several, self._response, self._message)
        ]
        self._constrained = [self._json_schema, self._regex, self._choice, self._lark, self._json_object]

    def draw(self) -> Case:
        """The next request."""
        dice = self._dice
        share = dice.random()
        if share < ABORTED:
            case = dice.choice(self._left)()
            at = dice.randrange(LAST_CHUNK)
            return Case("hung up on", case.path, _streamed(case), case.check, hang_up_at=at)
        share -= ABORTED
        for part, makers in (
            (INVALID, [self._invalid]),
            (CONSTRAINED, self._constrained),
            (TOOLS, [self._tools]),
        ):
            if share < part:
                return dice.choice(makers)()
            share -= part
        return self.plain()

    def plain(self) -> Case:
        """The next request that is answered whole, without a grammar."""
        return self._dice.choice(self._plain)()

    def ruled(self) -> Case:
        """The next request with a grammar or tools."""
        return self._dice.choice([*self._constrained, self._tools])()

    def stream(self) -> Case:
        """The next chat that is streamed, for as long as an answer may be."""
        case = self._chat()
        return replace(case, body=_streamed(case))

    def largest(self) -> Case:
        """One that fills a step alone on an idle server, logits of all its tokens included."""
        case = self._echo()
        words = " ".join((WORDS * LARGEST_STEP)[:LARGEST_STEP])
        own = {"prompt": words, "truncate_prompt_tokens": LARGEST_STEP}
        return replace(case, body=json.dumps(json.loads(case.body) | own).encode())

    # Kinds. Each draws what differs from one request to the next.

    def _prompt(self) -> str:
        """Half of them begin as others do, so that blocks are shared while they are given back."""
        count = self._dice.randint(2, self._length)
        words = self._dice.choices(WORDS, k=count)
        prefix = self._dice.choice(self._prefixes) if self._dice.random() < 0.5 else []
        return " ".join((prefix + words)[: self._length])

    def _case(
        self, kind: str, path: str, body: Mapping[str, Any], check: Check | None = None, n: int = 1
    ) -> Case:
        def whole(answer: Answer) -> str:
            return well_formed(answer, n) or (check(answer) if check else "")

        full = {"model": self._model, "seed": self._dice.randrange(1 << 40), **body}
        if path == CHAT and "messages" not in full:
            full["messages"] = [{"role": "user", "content": self._prompt()}]
        if path == COMPLETIONS and "prompt" not in full:
            full["prompt"] = self._prompt()
        full.setdefault("max_tokens", self._dice.randint(1, self._output))
        case = Case(kind, path, json.dumps(full).encode(), whole)
        return replace(case, body=_streamed(case, self._dice.random() < 0.6))

    def _chat(self) -> Case:
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"ignore_eos": True, "max_tokens": self._output, "temperature": 0.8, **stream}
        return self._case("chat", CHAT, body)

    def _completion(self) -> Case:
        ids = [self._dice.randrange(100, 1000) for _ in range(self._dice.randint(1, self._length))]
        body = {"prompt": ids, "ignore_eos": self._dice.random() < 0.7}
        body |= {"priority": self._dice.randint(-2, 2), "cache_salt": self._dice.choice("abc")}
        return self._case("completion", COMPLETIONS, body)

    def _several(self) -> Case:
        n = self._dice.randint(2, 4)
        return self._case("several choices", COMPLETIONS, {"n": n, "temperature": 1.0, "top_p": 0.9}, None, n)

    def _logprobs(self) -> Case:
        def check(answer: Answer) -> str:
            entries = [e for c in answer.choices if c.get("logprobs") for e in c["logprobs"]["content"]]
            if any(not -1e4 <= e["logprob"] <= 1e-6 or len(e["top_logprobs"]) > 6 for e in entries):
                return "a logprob out of range"
            usage = (answer.events[-1] if answer.events else answer.body)["usage"]
            wanted = usage["completion_tokens"]
            return "" if abs(len(entries) - wanted) <= 1 else f"{len(entries)} logprobs of {wanted} tokens"

        return self._case("logprobs", CHAT, {"logprobs": True, "top_logprobs": 5, "temperature": 0}, check)

    def _penalties(self) -> Case:
        body = {
            "presence_penalty": 0.5,
            "frequency_penalty": 0.3,
            "repetition_penalty": 1.2,
            "logit_bias": {"300": -100, "301": 5},
            "min_tokens": 3,
            "bad_words": ["the"],
            "stop": ["\n\n", "###"],
            "max_tokens": self._dice.randint(3, self._output),
        }
        return self._case("penalties", COMPLETIONS, body)

    def _echo(self) -> Case:
        def check(answer: Answer) -> str:
            found = answer.body["choices"][0]["logprobs"]
            same = len({len(found[name]) for name in ("tokens", "token_logprobs", "text_offset")}) == 1
            return "" if same and found["token_logprobs"][0] is None else "echoed logprobs do not fit"

        body = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
        case = self._case("echo", COMPLETIONS, body, check)
        return replace(case, body=_streamed(case, False))

    def _tokens(self) -> Case:
        text = self._prompt()

        def check(answer: Answer) -> str:
            return "" if answer.body["count"] == len(answer.body["tokens"]) else "tokens were miscounted"

        return Case("tokenize", TOKENIZE, json.dumps({"prompt": text}).encode(), check)

    def _response(self) -> Case:
        body = {"model": self._model, "input": self._prompt(), "max_output_tokens": self._output}
        case = Case("responses", RESPONSES, json.dumps(body).encode(), response_problem)
        return replace(case, body=_streamed(case, self._dice.random() < 0.6))

    def _message(self) -> Case:
        turns = [{"role": "user", "content": self._prompt()}]
        body = {"model": self._model, "messages": turns, "max_tokens": self._output}
        case = Case("messages", MESSAGES, json.dumps(body).encode(), message_problem)
        return replace(case, body=_streamed(case, self._dice.random() < 0.6))

    def _json_schema(self) -> Case:
        def check(answer: Answer) -> str:
            return (
                ""
                if was_cut(answer) or fits_schema(answer.text())
                else f"not as the schema: {answer.text()[:80]}"
            )

        form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
        return self._case("grammar", CHAT, {"response_format": form, "max_tokens": 4 * self._output}, check)

    def _json_object(self) -> Case:
        def check(answer: Answer) -> str:
            return "" if was_cut(answer) or isinstance(_json(answer.text()), dict) else "not a JSON object"

        return self._case("grammar", CHAT, {"response_format": {"type": "json_object"}}, check)

    def _regex(self) -> Case:
        def check(answer: Answer) -> str:
            fits = was_cut(answer) or re.fullmatch(REGEX, answer.text())
            return "" if fits else f"not as the expression: {answer.text()[:80]}"

        return self._case("grammar", COMPLETIONS, {"structured_outputs": {"regex": REGEX}}, check)

    def _choice(self) -> Case:
        def check(answer: Answer) -> str:
            return "" if was_cut(answer) or answer.text() in CHOICE else f"no choice: {answer.text()[:80]}"

        return self._case("grammar", CHAT, {"structured_outputs": {"choice": CHOICE}}, check)

    def _lark(self) -> Case:
        def check(answer: Answer) -> str:
            fits = was_cut(answer) or re.fullmatch(r"\d{1,3}( [-+] \d{1,3})*", answer.text())
            return "" if fits else f"not as the grammar: {answer.text()[:80]}"

        text = 'start: NUMBER ((" + " | " - ") NUMBER)*\nNUMBER: /[0-9]{1,3}/\n'
        return self._case("grammar", COMPLETIONS, {"structured_outputs": {"grammar": text}}, check)

    def _tools(self) -> Case:
        choice = self._dice.choice(["required", {"type": "function", "function": {"name": FUNCTION["name"]}}])

        def check(answer: Answer) -> str:
            calls = answer.calls().values()
            valid = all(name == FUNCTION["name"] and fits_parameters(said) for name, said in calls)
            return "" if was_cut(answer) or (calls and valid) else f"calls {list(calls)}"

        body = {
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": choice,
            "max_tokens": 4 * self._output,
        }
        return self._case("tools", CHAT, body, check)

    def _invalid(self) -> Case:
        path, wrong, status = self._dice.choice(WRONG)
        if isinstance(wrong, bytes):
            data = wrong
        else:
            good = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
            data = json.dumps({"model": self._model, **good, **wrong}).encode()
        return Case("invalid", path, data, lambda _: "it was accepted", (status,))


def _streamed(case: Case, stream: bool = True) -> bytes:
    """The same request, as a stream (with usage where that is asked for), or not."""
    fields = json.loads(case.body)
    fields.pop("stream_options", None)
    asks_usage = stream and case.path in (CHAT, COMPLETIONS)
    options = {"stream_options": {"include_usage": True}} if asks_usage else {}
    return json.dumps(fields | {"stream": stream} | options).encode()


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def fits_schema(text: str) -> bool:
    """SCHEMA, by hand: what enforced it is not asked."""
    value = _json(text)
    if not isinstance(value, dict) or value.keys() != SCHEMA["properties"].keys():  # type: ignore[attr-defined]
        return False
    name, age, tags = value["name"], value["age"], value["tags"]
    return (
        isinstance(name, str)
        and len(name) <= 12
        and type(age) is int
        and 0 <= age <= 150
        and value["kind"] in ("fox", "owl", "hare")
        and isinstance(tags, list)
        and len(tags) <= 3
        and all(isinstance(tag, str) and len(tag) <= 8 for tag in tags)
    )


def fits_parameters(text: str) -> bool:
    """PARAMETERS, by hand."""
    value = _json(text)
    if not isinstance(value, dict) or value.keys() != {"city", "days"}:
        return False
    return isinstance(value["city"], str) and len(value["city"]) <= 16 and type(value["days"]) is int
