"""What a page shows: its chapters, and its numbers with the fields of the API that they stand for."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from playwright.sync_api import Locator, Page, Request, expect

CHAPTERS = {
    "prefill": "Prefill and decode",
    "cache": "The KV cache",
    "batching": "Continuous batching",
    "blocks": "Paged memory",
    "attention": "Attention in parts",
    "speculation": "Speculation",
    "quantization": "Fewer bits",
    "heads": "Grouped heads",
    "metrics": "Latency and goodput",
    "roofline": "The roofline",
    "scale": "At scale",
}
_FIELDS = """(root) => [...root.querySelectorAll("[data-field]")].map((one) => ({
  field: one.dataset.field, value: one.dataset.value ?? null, text: one.innerText,
}))"""
_UNITS = {"": 1.0, "%": 0.01, "\N{MULTIPLICATION SIGN}": 1.0}
_PREFIXES = {"": 1.0, "µ": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_NUMBER = re.compile(r"^(-?[\d,]+(?:\.\d+)?)\s*(\S*)")


@dataclass(frozen=True)
class Shown:
    """A number of the page: the API's field that it stands for, its exact value, and what is read."""

    field: str
    value: str
    text: str

    def check(self, expected: Any) -> None:
        """Compare the exact value with the API's, and the text with it as far as its digits go."""
        if isinstance(expected, str):
            assert (self.value, self.text) == (expected, expected), self
            return
        assert float(self.value) == expected, (self, expected)
        read = _NUMBER.match(self.text)
        assert read, self
        digits, unit = float(read[1].replace(",", "")), read[2].rstrip(",;")
        prefix = next(name for name in ("µ", "m", "k", "M", "G", "T", "") if unit.startswith(name))
        scale = _UNITS[unit] if unit in _UNITS else _PREFIXES[prefix] if len(unit) > 1 else 1.0
        exact = expected / 1e3 if self.field.endswith("_ms") else expected
        assert digits * scale == pytest.approx(exact, rel=0.006, abs=0.006 * scale), (self, expected)


def go_to(page: Page, name: str) -> None:
    """Open a chapter by its address, and wait until it is there."""
    page.evaluate("(name) => { location.hash = `#/${name}` }", name)
    expect(page).to_have_title(f"{CHAPTERS[name]} · Quire")
    expect(page.locator(".chapter h2")).to_be_visible()


def until_live(page: Page) -> None:
    """Wait for the first frame of the engine."""
    expect(page.locator(".pulse")).to_have_text("live")


def shown(place: Page | Locator, within: str = ".chapter") -> list[Shown]:
    """Return the numbers that name a field and have a value: of an element, or of one `within` a page."""
    root = place.locator(within).first if isinstance(place, Page) else place
    found: list[dict[str, Any]] = root.evaluate(_FIELDS)
    return [Shown(**one) for one in found if one["value"] is not None]


@dataclass
class Api:
    """What the API says: of the engine by own requests, of answers and experiments as the page got them."""

    client: httpx.Client
    answers: list[dict[str, Any]] = field(default_factory=list)  # chunks with `timings`, the last one last
    experiments: dict[str, list[Any]] = field(default_factory=dict)  # lines, by name

    def attach(self, page: Page) -> None:
        """Note the replies to a page."""
        page.on("requestfinished", self._note)

    def until_answered(self, page: Page, count: int) -> None:
        """Wait until so many answers are noted: the page may show the last one before."""
        for _ in range(200):
            if len(self.answers) >= count:
                return
            page.wait_for_timeout(50)
        raise AssertionError(f"{len(self.answers)} answers instead of {count}")

    def _note(self, request: Request) -> None:
        _, _, name = request.url.partition("/page/experiments/")
        if not name and "/v1/" not in request.url:
            return
        response = request.response()
        assert response is not None
        lines = response.text().splitlines()
        if name:
            self.experiments[name] = [json.loads(line) for line in lines if line]
            return
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        self.answers += [chunk for chunk in chunks if chunk.get("timings")]

    def value(self, name: str) -> Any:
        """Return the field with a name such as `timings.prefill_ms` or `steps.812.device_s`."""
        source, _, path = name.partition(".")
        match source:
            case "timings" | "usage":
                return _at(self.answers[-1][source], path)
            case "steps":
                index, _, path = path.partition(".")
                steps = self.client.get("/steps", params={"last": 4096}).json()["steps"]
                return next(one for one in steps if one["index"] == int(index))[path]
            case "ceilings":
                return self.client.get("/steps").json()["ceilings"][path]
            case "server_info":
                return _at(self.client.get("/server_info").json(), path)
            case "load":
                return _at(self.client.get("/load").json(), path)
            case "law":
                return _at(self.client.get("/steps/law").json(), path)
            case "cache":
                return _at(self._cache()["groups"][0], path)
            case "experiments":
                name, _, path = path.partition(".")
                return _at(self.experiments[name], path)
        raise AssertionError(f"no field of the API: {name}")

    def _cache(self) -> Any:
        """Return what a new viewer is told of the caches."""
        with self.client.stream("GET", "/page/events") as events:
            frames = map(json.loads, events.iter_lines())
            return next(frame["cache"] for frame in frames if frame.get("cache"))

    def check(self, numbers: list[Shown]) -> None:
        """Compare numbers with their fields."""
        for one in numbers:
            one.check(self.value(one.field))


def _at(value: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        value = value[int(name)] if isinstance(value, list) else value[name]
    return value
