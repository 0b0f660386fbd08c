"""Reading images that callers send: from a data URL, base64, a file that the operator allows, or bytes."""

from __future__ import annotations

import base64
import binascii
import json
import re
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from quire.errors import ConfigError, RequestError
from quire.images.patches import Patching
from quire.regular_file import read_limited
from quire.sandbox.process import SandboxProcess

MAX_BYTES = 20 << 20  # of a file
MAX_PIXELS = 64_000_000  # of a picture before it is resized
TIME_LIMIT_S = 20.0
MEMORY_LIMIT_BYTES = 1 << 30
_DATA_URL = re.compile(r"data:image/[\w.+-]{1,32};base64,", re.ASCII)
_FORMATS = "give a picture in PNG, JPEG, WebP or GIF"


@dataclass(frozen=True, slots=True)
class Pixels:
    """A part of a decoded image, in the size that the model takes: `values` are height x width x 3 bytes."""

    height: int
    width: int
    values: bytes


class Parts(NamedTuple):
    """A decoded image: `rows` x `columns` tiles, row by row, and after them maybe all of it, smaller."""

    rows: int
    columns: int
    parts: tuple[Pixels, ...]


class ImageReader:
    """Decodes images in a process of their own, for a model with this patching.

    `allowed` is the folder whose files may be named; None: no file.
    """

    def __init__(self, patching: Patching, allowed: Path | None = None) -> None:
        self._patching, self._allowed = patching, allowed
        self._sandbox = SandboxProcess(
            "quire.images.decode_job", time_limit_s=TIME_LIMIT_S, memory_limit_bytes=MEMORY_LIMIT_BYTES
        )

    def close(self) -> None:
        """End the process."""
        self._sandbox.close()

    def read(self, source: str | bytes, where: str) -> Parts:
        """Decode the image in a file, or at a data: or file: URL. `where` names the field of the request.

        Raises RequestError for what is no image, or too large.
        """
        if isinstance(source, str):
            source = self._fetched(source, where)
        if len(source) > MAX_BYTES:
            raise _too_large(where)
        return self._decoded(source, where)

    def _fetched(self, url: str, where: str) -> bytes:
        """Return the file at a URL."""
        if match := _DATA_URL.match(url):
            return _from_base64(url[match.end() :], where)
        scheme = url[:16].partition(":")[0].lower() if ":" in url[:16] else ""
        if scheme == "file":
            return self._file(url, where)
        if scheme in ("http", "https"):
            problem = f"{where}: this server fetches nothing from the network"
            raise RequestError(problem, "send the image itself: data:image/png;base64,...", where)
        raise RequestError(f"{where}: this is not an image", "send data:image/png;base64,...", where)

    def _decoded(self, data: bytes, where: str) -> Parts:
        size = self._patching.size
        request = {
            "data": base64.b64encode(data).decode(),
            "max_pixels": MAX_PIXELS,
            "size": [type(size).__name__, astuple(size)],
            "resample": self._patching.resample,
        }
        reply = self._sandbox.ask(json.dumps(request).encode() + b"\n")
        if "parts" not in reply:
            raise _refusal(reply, where)
        parts = (Pixels(p["height"], p["width"], base64.b64decode(p["pixels"])) for p in reply["parts"])
        return Parts(reply["rows"], reply["columns"], tuple(parts))

    def _file(self, url: str, where: str) -> bytes:
        """Return the content of a file, which must be in the allowed folder, links followed."""
        host, slash, name = url[len("file:") :].removeprefix("//").partition("/")
        hint = "send the image itself, or start the server with --allowed-local-media-path FOLDER"
        if self._allowed is None or host not in ("", "localhost"):
            raise RequestError(f"{where}: files of the server may not be named", hint, where)
        try:
            path = Path(unquote(slash + name)).resolve()
            data = read_limited(path, MAX_BYTES) if path.is_relative_to(self._allowed.resolve()) else None
        except (ConfigError, OSError, RuntimeError, ValueError):  # of names: a loop of links, a zero byte
            raise RequestError(f"{where}: the file cannot be read", "does it exist?", where) from None
        if data is None:
            raise RequestError(f"{where}: this file is not in the folder that may be named", hint, where)
        return data


def _from_base64(text: str, where: str) -> bytes:
    text = text.replace("\r", "").replace("\n", "")  # some encoders write lines
    if len(text) > MAX_BYTES * 4 // 3 + 4:
        raise _too_large(where)
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise RequestError(f"{where}: the image is not valid base64", None, where) from None


def _too_large(where: str) -> RequestError:
    return RequestError(f"{where}: an image may have {MAX_BYTES >> 20} MiB", "send a smaller one", where)


def _refusal(reply: dict[str, Any], where: str) -> RequestError:
    if "error" in reply:
        return RequestError(f"{where}: {reply['error']}", _FORMATS, where)
    kinds = {"time": f"it took more than {TIME_LIMIT_S:g} s", "memory": "it took too much memory"}
    why = kinds.get(reply["kind"], "its decoder failed")
    return RequestError(f"{where}: the image could not be decoded: {why}", "send a smaller one", where)
