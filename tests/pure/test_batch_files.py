"""Files of a batch: what a line of the input must be, and an output that a later run can go on with."""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from quire.cli import batch_input
from quire.cli.batch_input import Answered, BatchRequest, LineError, digest, items, parse, read_ahead
from quire.cli.batch_output import FileOutput, OutputLine, OutputResponse, StreamOutput, open_output
from quire.errors import ConfigError

CHAT = "/v1/chat/completions"


def line(custom_id: object = "a", method: str = "POST", url: str = CHAT, body: object = None) -> bytes:
    fields = {"custom_id": custom_id, "method": method, "url": url, "body": {} if body is None else body}
    return json.dumps(fields).encode() + b"\n"


def answer(custom_id: str, status: int = 200) -> OutputLine:
    error = None if status == 200 else {"code": "invalid_request", "message": "no"}
    response = OutputResponse(status, "req-1", msgspec.Raw(b'{"text":"\\u00e9"}'))
    return OutputLine(f"batch_req_{custom_id}", custom_id, response, error)


def test_a_body_is_kept_byte_for_byte() -> None:
    body = b'{"prompt" : "a\\u00e9", "x":1.0}'
    raw = b'{"url": "/v1/completions", "body": %b, "method":"POST","custom_id":"7"}' % body
    assert parse(raw, 3) == BatchRequest(3, "7", "/v1/completions", body)


@pytest.mark.parametrize(
    ("raw", "code", "param", "words"),
    [
        (b"\n", "empty_line", None, "line 4: empty"),
        (b"nope\n", "invalid_json_line", None, "not JSON"),
        (b"[1]\n", "invalid_json_line", None, "not a JSON object"),
        (b'{"custom_id": "\xff"}\n', "invalid_field", "custom_id", "must be a non-empty string"),
        (b"[" * 100_000, "invalid_json_line", None, "not"),
        (b'{"method": "POST"}', "missing_field", "custom_id", "custom_id is missing"),
        (line(custom_id=7), "invalid_field", "custom_id", "custom_id must be a non-empty string"),
        (line(custom_id=""), "invalid_field", "custom_id", "non-empty"),
        (line(method="GET"), "invalid_method", "method", "method 'GET' is not supported; use POST"),
        (line(url="/v1/images"), "invalid_url", "url", "'/v1/images' is not one of /v1/chat/comp"),
        (line(url="/v1/chat/completion"), "invalid_url", "url", "did you mean '/v1/chat/completions'?"),
        (line().replace(b', "body": {}', b""), "missing_field", "body", "body is missing"),
        (line(body={"stream": True}), "stream_not_supported", "body.stream", "body.stream is true"),
        (None, "line_too_long", None, "longer than"),
    ],
)
def test_a_wrong_line_is_one_error(raw: bytes | None, code: str, param: str | None, words: str) -> None:
    with pytest.raises(LineError) as wrong:
        parse(raw, 4)
    assert (wrong.value.line, wrong.value.code, wrong.value.param) == (4, code, param)
    assert words in wrong.value.message
    has_id = raw is not None and b'"custom_id": "a"' in raw
    assert wrong.value.custom_id == ("a" if has_id else None)


def test_what_the_server_would_say_is_left_to_it() -> None:
    for body in ([1], "text", None, {"stream": "yes"}, {"stream": False}, {"stream": 1}):
        assert parse(line(body=body) if body is not None else line().replace(b"{}}", b"null}"), 1).url == CHAT


def test_a_file_with_a_mark_and_windows_ends() -> None:
    found = list(items(io.BytesIO(b"\xef\xbb\xbf" + line("a").replace(b"\n", b"\r\n") + line("b")[:-1]), ()))
    assert [one.custom_id for one in found if isinstance(one, BatchRequest)] == ["a", "b"]


def test_answered_and_repeated_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_input, "MAX_LINE_BYTES", 400)
    file = io.BytesIO(b"".join((line("a"), line("b"), line("a"), line("c" * 3000), b"{}\n", line("d"))))
    found = list(items(file, {digest("b")}))
    assert [type(one) for one in found] == [
        *(BatchRequest, Answered, LineError, LineError, LineError, BatchRequest)
    ]
    assert [one.line for one in found] == [1, 2, 3, 4, 5, 6]
    assert [one.code for one in found if isinstance(one, LineError)] == [
        *("duplicate_custom_id", "line_too_long", "missing_field")
    ]


def test_reading_ahead_is_bounded_and_raises_what_went_wrong() -> None:
    taken = 0

    def source() -> Iterator[int]:
        nonlocal taken
        for number in range(100):
            taken = number
            yield number
        raise OSError("the disk is gone")

    found = []

    async def read() -> None:
        async for item in read_ahead(source()):
            found.append(item)
            await asyncio.sleep(0)
            assert taken <= item + batch_input.READ_AHEAD + 1

    with pytest.raises(OSError, match="the disk is gone"):
        asyncio.run(read())
    assert found == list(range(100))


def test_an_interrupted_run_does_not_wait_for_a_pipe() -> None:
    reader, writer = os.pipe()
    file = os.fdopen(reader, "rb")

    async def read() -> None:
        async with asyncio.timeout(0.05):
            async for _ in read_ahead(items(file, ())):
                raise AssertionError

    with pytest.raises(TimeoutError):
        asyncio.run(read())  # comes back although the pipe is open
    os.close(writer)
    file.close()


def lines_of(path: Path) -> list[dict[str, object]]:
    assert path.read_bytes().endswith(b"\n")
    return [json.loads(one) for one in path.read_bytes().splitlines()]


def run(path: Path, *more: OutputLine, overwrite: bool = False) -> StreamOutput:
    output = open_output(str(path), overwrite, "-")
    try:
        output.begin()
        for one in more:
            output.write(one)
    finally:
        output.close()
    return output


def test_answers_stay_and_errors_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    run(path, answer("a"), answer("b", status=400), OutputLine("batch_req_x", None, None, {"code": "x"}))
    first = path.read_bytes().splitlines()[0]
    again = open_output(str(path), False, "-")
    assert (again.done, again.num_errors) == ({digest("a")}, 2)
    again.close()
    assert len(lines_of(path)) == 3  # nothing changes before the run begins
    run(path, answer("b"))
    assert path.read_bytes().splitlines()[0] == first
    assert [one["custom_id"] for one in lines_of(path)] == ["a", "b"]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("keep", [1, 8, 30, 100])
def test_a_line_that_was_cut_is_repaired(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "out.jsonl"
    run(path, answer("a"), answer("b"))
    whole = path.read_bytes()
    first = whole.splitlines(keepends=True)[0]
    path.write_bytes(first + whole[len(first) :][:keep])
    assert run(path, answer("b")).done == {digest("a")}
    assert [one["custom_id"] for one in lines_of(path)] == ["a", "b"]


def test_a_last_line_without_its_end_stays(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    run(path, answer("a"))
    path.write_bytes(path.read_bytes().rstrip())
    run(path, answer("b"))
    assert [one["custom_id"] for one in lines_of(path)] == ["a", "b"]


@pytest.mark.parametrize("text", [b"notes\n", b"notes", b'{"a": 1}\n', b"\n", b'{"id":"x","custom_id":1}\n'])
def test_a_file_that_is_something_else_is_not_touched(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match="line 1 is not a line of a batch's output"):
        run(path, answer("a"))
    assert path.read_bytes() == text
    run(path, answer("a"), overwrite=True)  # which asks for it
    assert [one["custom_id"] for one in lines_of(path)] == ["a"]


def test_overwriting_begins_with_the_run(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    run(path, answer("a"))
    output = open_output(str(path), True, "-")
    output.close()  # the model could not be loaded, say
    assert len(lines_of(path)) == 1


def test_the_input_is_never_the_output(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(line())
    (tmp_path / "link").symlink_to(path)
    for name in (path, tmp_path / "link"):
        with pytest.raises(ConfigError, match="is also the input"):
            open_output(str(name), True, str(path))
    with pytest.raises(ConfigError, match="is a folder"):
        open_output(str(tmp_path), False, str(path))


def test_two_runs_do_not_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    run(path, answer("a", status=500))
    first = open_output(str(path), False, "-")
    for _ in range(2):
        with pytest.raises(ConfigError, match="is being written by another"):
            open_output(str(path), False, "-")
        first.begin()  # puts another file in its place
    first.close()
    run(path)


def test_a_link_to_the_output_stays_one(tmp_path: Path) -> None:
    path, link = tmp_path / "out.jsonl", tmp_path / "link"
    run(path, answer("a", status=500))
    path.chmod(0o640)
    link.symlink_to(path)
    run(link, answer("a"))
    assert link.is_symlink()
    assert [one["custom_id"] for one in lines_of(path)] == ["a"]
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_named() -> None:
    output = open_output("/dev/full", False, "-")
    assert not isinstance(output, FileOutput)
    with pytest.raises(OSError, match=r"No space left.*/dev/full"):
        output.write(answer("a"))
    output.close()
