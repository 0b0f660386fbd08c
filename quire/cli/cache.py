"""`quire cache`: list, check and remove cached quantized weights, and blocks of a prefix cache."""

from __future__ import annotations

import argparse
import contextlib
import time
from itertools import groupby
from typing import TYPE_CHECKING, Any

from quire.cli.option_types import TEXT
from quire.cli.terminal import bold, complain, counted
from quire.environment import user_path
from quire.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from quire.backends.packed_cache import PackedCache, PackedFile

DESCRIPTION = """List, check or remove cached quantized weights.

The native backend keeps them in its packed format, so that a model is quantized only once. Entries
can be recreated at any time; the least recently used ones are evicted.

With --prefix-cache-dir it lists or removes the blocks of prompts and answers in that folder instead.
"""
WORDS = """ls               list all entries (default)
verify           read all entries and remove damaged ones
clear [MODEL]    remove all entries, or those of one model"""
ACTIONS = ("ls", "verify", "clear")


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "cache",
        help="list, check or remove cached quantized weights and prefixes",
        usage="quire cache [ls | verify | clear [MODEL]] [--prefix-cache-dir DIR]",
        description=DESCRIPTION,
    )
    words = parser.add_argument_group("arguments", WORDS)
    words.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    text = "list (ls) or remove (clear) what 'quire serve --prefix-cache-dir DIR' keeps"
    words.add_argument("--prefix-cache-dir", type=TEXT, metavar="DIR", help=text)
    parser.set_defaults(function=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Run the action that the first argument names."""
    action, *rest = args.words or ["ls"]
    if action not in ACTIONS:
        args.parser.refuse(f"unknown action {action[:60]!r}", did_you_mean(action[:80], ACTIONS))
    if len(rest) > (action == "clear" and args.prefix_cache_dir is None):
        args.parser.refuse_unknown(rest[-1])
    if args.prefix_cache_dir is not None:
        if action == "verify":
            args.parser.refuse("verify is for weights", "blocks are verified whenever they are read")
        return _blocks(args.prefix_cache_dir, clear=action == "clear")
    from quire.backends.packed_cache import PackedCache, packed_folder

    cache = PackedCache(packed_folder())
    if action == "clear":
        return _clear(cache, *rest)
    return _verify(cache) if action == "verify" else _list(cache)


def _list(cache: PackedCache) -> int:
    from quire.memory import gigabytes

    entries = cache.entries()
    rows = [("model", "weights", "size", "last used")]
    rows += [(_shown(e), e.quantization, gigabytes(e.nbytes), _ago(time.time() - e.used)) for e in entries]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if entries:
        for number, row in enumerate(rows):
            line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            print(line if number else bold(line))
    total = gigabytes(sum(entry.nbytes for entry in entries))
    print(f"{counted(len(entries), 'model')}, {total} in {cache.folder}")
    return 0


def _blocks(folder: str, clear: bool) -> int:
    """List the blocks in a folder by what they belong to, or remove them."""
    from quire.memory import gigabytes
    from quire.transfer.segment_folder import SegmentFolder

    path = user_path(folder)
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder")
    opened = SegmentFolder(path, 0)
    files = opened.files()
    total = gigabytes(sum(file.nbytes for file in files))
    if clear:
        for file in files:
            opened.remove(file.name)
        print(f"removed {counted(len(files), 'file')}, {total}")
        return 0
    for fingerprint, own in groupby(sorted(files), lambda file: file.name.split("-")[0]):
        some = list(own)
        used = _ago(time.time() - max(file.used_s for file in some))
        size = gigabytes(sum(file.nbytes for file in some))
        print(f"{fingerprint}  {counted(len(some), 'file')}, {size}, last used {used}")
    print(f"{counted(len(files), 'file')}, {total} in {path}")
    return 0


def _verify(cache: PackedCache) -> int:
    from quire.backends.packed_cache import Damaged, read_checked

    damaged = cache.unreadable()
    good = 0
    for entry in cache.entries():
        try:
            read_checked(entry, map)
            good += 1
        except (Damaged, OSError):
            damaged.append(entry.path)
    for path in damaged:
        complain(f"{path} was damaged and has been removed")
        with contextlib.suppress(OSError):
            path.unlink()
    print(f"{counted(good, 'model')} intact, {len(damaged)} damaged")
    return 1 if damaged else 0


def _clear(cache: PackedCache, model: str | None = None) -> int:
    from quire.memory import gigabytes

    count, nbytes = cache.clear(model)
    print(f"removed {counted(count, 'model')}, {gigabytes(nbytes)}")
    if model is not None and not count:
        complain(f"the cache has no entry for {model!r}", "quire cache ls lists all entries")
        return 1
    return 0


def _shown(entry: PackedFile) -> str:
    """Return a model's name without control characters."""
    return "".join(c if c.isprintable() else "?" for c in entry.model)


def _ago(seconds: float) -> str:
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            return f"{counted(int(seconds // size), unit)} ago"
    return "just now"
