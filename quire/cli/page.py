"""`quire page`: write the server's page, with a recording of the demo model, as files for a static site."""

from __future__ import annotations

import argparse
from typing import Any

from quire.cli.option_types import TEXT
from quire.cli.terminal import note
from quire.environment import api_keys, user_path

DESCRIPTION = """Write the page of `quire serve` as files, with a recording of the demo model in place of an
engine. Any web server for files can show it: it needs no Quire, and asks no other host.

  quire page --out site
  python3 -m http.server --directory site    then look at http://127.0.0.1:8000

The demo model is started, has a short conversation and answers what the chapters of the page ask; their
experiments are run. All of it is measured on this machine, in about a minute; run it while the machine is
idle. The page says that it shows a recording.
"""


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "page",
        help="write the server's page with a recording of the demo model, for a static site",
        usage="quire page --out DIR [flags]",
        description=DESCRIPTION,
    )
    parser.add_argument("--out", type=TEXT, metavar="DIR", help="folder to write to; made if it is not there")
    text = "write to DIR even if it is not empty; files with the names of the page's are replaced"
    parser.add_argument("--force", action="store_true", default=None, help=text)
    parser.set_defaults(function=page, parser=parser, words=[])


def page(args: argparse.Namespace) -> int:
    """Record the demo model and write the page."""
    if args.words:
        args.parser.refuse_unknown(args.words[0])
    if args.out is None:
        args.parser.refuse("--out DIR is missing", "try: quire page --out site")
    from quire.server.page.export import export

    folder = user_path(args.out)
    nbytes = export(folder, next(iter(api_keys(None)), ""), note, force=bool(args.force))
    print(f"wrote the page to {folder} ({nbytes / 1e6:.1f} MB)")
    print(f"look at it:  python3 -m http.server --directory {folder}    at http://127.0.0.1:8000")
    return 0
