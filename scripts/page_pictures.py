"""Take the pictures in docs/page/: the page of `quire serve demo` in Chromium, filled by real requests.

    make browser ARGS=--collect-only                       # installs Chromium and .browser
    .browser/bin/python scripts/page_pictures.py           # the pictures that docs/page/ keeps
    .browser/bin/python scripts/page_pictures.py --all --out /tmp/pictures    # every chapter in every look

A conversation is held in the chat, and every button of a chapter that starts something is pressed. Chapters
are taken as high as they are, wide and narrow, light and dark. Speeds are those of the machine.
"""

from __future__ import annotations

import argparse
import base64
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "page"
TYPED = (
    "Tell me a story about a fox and a lantern.",
    "What is 27 + 14?",
    "Tell me a story about a dog.",
)
WIDTHS = {"wide": 1440, "narrow": 390}
LEAST_HEIGHT = {"wide": 900, "narrow": 844}
MOST_HEIGHT = 3200
KEPT = {
    "wide-light": None,  # all chapters
    "wide-dark": ("batching", "roofline"),
    "narrow-light": ("chat", "cache", "blocks"),
    "narrow-dark": ("chat", "speculation", "metrics"),
}
PATIENCE_MS = 120_000  # for an experiment
QUALITY = 0.7
SCALE = {"wide": 0.8, "narrow": 1.0}  # of the files
HIGHEST = """() => Math.max(document.documentElement.scrollHeight,
  ...[...document.querySelectorAll(".inside, .inside *")]
    .filter((one) => getComputedStyle(one).overflowY === "auto")
    .map((one) => one.getBoundingClientRect().top + one.scrollHeight))"""
TO_WEBP = """async ([png, quality, scale]) => {
  const image = new Image();
  image.src = png;
  await image.decode();
  const [width, height] = [image.width * scale, image.height * scale].map(Math.round);
  const canvas = Object.assign(document.createElement("canvas"), {width, height});
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(image, 0, 0, width, height);
  return canvas.toDataURL("image/webp", quality);
}"""


@contextmanager
def demo() -> Iterator[str]:
    """The URL of a server of the demo model."""
    command = [str(ROOT / ".venv" / "bin" / "python"), "-m", "quire", "serve", "demo", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            assert server.stdout is not None
            for line in server.stdout:
                if found := re.search(r"(http://[^\s/]+)/v1", line):
                    yield found[1]
                    break
        finally:
            server.terminate()


class Pictures:
    """Takes pictures of one page, which keeps what it shows while its look changes."""

    def __init__(self, browser: Browser, url: str, out: Path) -> None:
        self._out, self._written = out, 0
        self._plain = browser.new_page()  # converts
        self.page: Page = browser.new_page(viewport={"width": 1440, "height": 900})
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.goto(url)
        expect(self.page.locator(".pulse")).to_have_text("live")

    def talk(self) -> None:
        """Hold the conversation."""
        for number, text in enumerate(TYPED, 1):
            box = self.page.get_by_label("Message", exact=True)
            box.fill(text)
            box.press("Enter")
            expect(self.page.locator(".message.assistant .receipt")).to_have_count(number)

    def fill(self, chapter: str) -> None:
        """Open a chapter and press its buttons."""
        self.page.evaluate("(name) => { location.hash = `#/${name}` }", chapter)
        expect(self.page.locator(f"[aria-current=page][href$='{chapter}']")).to_be_visible()
        expect(self.page.locator(".chapter h2")).to_be_visible()
        buttons = self.page.locator(".chapter .action button.primary:enabled")
        for index in range(buttons.count()):
            buttons.nth(index).click()
            expect(self.page.locator(".chapter .spinner")).to_have_count(0)
        self.page.wait_for_timeout(1000)  # the last frames

    def take(self, name: str, look: str) -> None:
        """Write a picture of what is shown."""
        width, _, scheme = look.partition("-")
        self.page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        height = LEAST_HEIGHT[width]
        self.page.set_viewport_size({"width": WIDTHS[width], "height": height})
        if width == "narrow":
            tab = "Chat" if name == "chat" else "Inside the engine"
            self.page.get_by_role("button", name=tab, exact=True).click()
        if name != "chat":
            height = min(MOST_HEIGHT, max(height, self.page.evaluate(HIGHEST)))
            self.page.set_viewport_size({"width": WIDTHS[width], "height": height})
        self.page.wait_for_timeout(400)
        png = self.page.screenshot(animations="disabled")
        source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        webp = self._plain.evaluate(TO_WEBP, [source, QUALITY, SCALE[width]])
        path = self._out / f"{name}-{look}.webp"
        path.write_bytes(base64.b64decode(webp.partition(",")[2]))
        self._written += path.stat().st_size
        print(f"{path.stat().st_size / 1e3:6.0f} kB  {path}", flush=True)

    def take_all(self, all_looks: bool) -> None:
        """Take every picture that is wanted."""
        self.talk()
        chapters = [
            link.get_attribute("href").rpartition("/")[2] for link in self.page.locator(".stepper a").all()
        ]
        for name in ("chat", *chapters):
            if name != "chat":
                self.page.set_viewport_size({"width": WIDTHS["wide"], "height": LEAST_HEIGHT["wide"]})
                self.fill(name)
            for look, kept in KEPT.items():
                if all_looks or (name in kept if kept else name != "chat"):
                    self.take(name, look)
        print(f"{self._written / 1e6:6.2f} MB in all")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [options]"
    )
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="default: docs/page")
    parser.add_argument("--all", action="store_true", help="every chapter in every look")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    expect.set_options(timeout=PATIENCE_MS)
    with demo() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        Pictures(browser, url, options.out).take_all(options.all)
        browser.close()


if __name__ == "__main__":
    main()
