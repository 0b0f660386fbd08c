"""Milliseconds to the first paint of the server's page in Chromium, for .browser/bin/python (make browser).

Prints a JSON list: for each load, in a context of its own with an empty cache, the time of the first paint
with content, from the start of the navigation.
"""

from __future__ import annotations

import json
import sys

from playwright.sync_api import sync_playwright

PAINTED = """() => new Promise((resolve) => new PerformanceObserver((list) => {
  const found = list.getEntriesByName("first-contentful-paint")[0];
  if (found) resolve(found.startTime);
}).observe({type: "paint", buffered: true}))"""


def main() -> None:
    """Arguments: the URL, the path of Chromium, how many loads."""
    url, path, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    found: list[float] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for _ in range(count):
            page = browser.new_page()
            page.goto(url)
            found.append(page.evaluate(PAINTED))
            page.close()  # and its context
        browser.close()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
