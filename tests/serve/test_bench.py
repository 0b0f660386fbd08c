"""`quire bench` as users run it: against a server, with a server of its own, and its errors."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from server import Server
from test_bench_client import DONE, HEAD, TOKENS, USAGE, Peer, chunk, whole

from quire.bench import saturation
from quire.bench.definitions import MEASURES
from quire.bench.http_client import GIVEN_UP, Client
from quire.bench.load import LoadOptions
from quire.bench.openai_api import COMPLETIONS, Api, ServedModel
from quire.bench.target import Target
from quire.bench.workload import PromptVocabulary
from quire.cli.main import main

SMALL = ("--random-input-len", "16", "--random-output-len", "4")


def call(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *argv])
    return int(ended.value.code or 0)


def test_one_load_with_all_its_files(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / f"figures.{name}" for name in ("json", "svg", "html")}
    flags = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    load = ("--num-prompts", "12", "--max-concurrency", "3", "--goodput", "ttft:60000", "tpot:60000")
    assert call("--base-url", server.url, *SMALL, *load, "--save-detailed", *flags) == 0
    text = capsys.readouterr().out
    assert "12 requests in" in text
    assert "100.0% kept it" in text
    figures = json.loads(files["json"].read_text(), parse_constant=pytest.fail)  # no NaN, no Infinity
    assert figures["options"]["request_rate"] is None
    for name, definition in MEASURES.items():
        has_figures = figures[f"mean_{name}_ms"] is not None  # no ITL where all tokens came together
        assert (f"{definition.name:6}{definition.title}" in text) == has_figures
        assert definition.meaning[:30] in text
    assert (figures["completed"], figures["failed"], figures["total_output_tokens"]) == (12, 0, 48)
    if figures["mean_itl_ms"] is not None:
        assert figures["p99_itl_ms"] >= figures["median_itl_ms"] >= 0
    assert figures["median_e2el_ms"] >= figures["median_ttft_ms"] > 0
    assert all(len(one["chunk_s"]) >= 1 for one in figures["requests"])
    assert figures["options"]["max_concurrency"] == 3
    ElementTree.fromstring(files["svg"].read_text())
    page = files["html"].read_text()
    assert "<svg" in page
    assert "12 requests in" in page


def test_several_rates(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = tmp_path / "figures.json", tmp_path / "rates.svg"
    rates = ("--rates", "20,40", "--num-prompts", "10", "--goal", "ttft_p90<60s")
    assert call("--base-url", server.url, *SMALL, *rates, "--json", str(path), "--svg", str(picture)) == 0
    text = capsys.readouterr().out
    assert "alone: TTFT" in text
    found = json.loads(path.read_text())
    for trial in found["trials"]:  # a busy machine may be saturated
        assert f"  {trial['problem'] or 'keeps the goal'}\n" in text
    assert [trial["request_rate"] for trial in found["trials"]] == [20, 40]
    assert {trial["completed"] for trial in found["trials"]} == {10}
    assert "TTFT p90" in picture.read_text() or "ttft_p90" in picture.read_text()


def test_a_goal_that_no_rate_keeps(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--base-url", server.url, *SMALL, "--goal", "ttft_mean<0.001ms") == 1
    assert "no rate keeps the goal: a request alone has ttft_mean" in capsys.readouterr().err


def test_a_search_for_a_goal(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.bench.search.MAX_TRIALS", 2)
    path = tmp_path / "figures.json"
    trial = ("--num-prompts", "5", "--repeats", "2", "--goal", "e2e<60s", "--json", str(path))
    assert call("--base-url", server.url, *SMALL, *trial) == 0
    found = json.loads(path.read_text())
    assert len(found["trials"]) == 4
    assert len(found["searches"]) == 2
    first, second, *_ = (trial["request_rate"] for trial in found["trials"])
    assert second == pytest.approx(2 * first)
    assert found["highest_request_rate"] >= second
    text = capsys.readouterr().out
    assert "highest rate that keeps e2e_p99<60s" in text
    assert "spread" in text


def test_a_server_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    load = ("--num-prompts", "3", "--max-concurrency", "1")
    assert call("demo", *SMALL, *load, "--", "--num-threads", "1", "--served-model-name", "mine") == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("mine: prompts of 16 tokens")
    assert "starting quire serve demo --num-threads 1" in printed.err


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["--base-url", "http://127.0.0.1:1"], 1, "no server answers: connection refused"),
        (["--base-url", "nonsense"], 1, "is not the address of a server"),
        (["no-such-model"], 1, "the server did not start: model 'no-such-model'"),
        (["demo", "more"], 2, "unexpected 'more'"),
        (["--base-url", "http://x", "demo"], 2, "exclude each other"),
        (["--goal", "ttft<500"], 2, "is not a goal"),
        (["--rates", "1,x"], 2, "is not a list of rates"),
        (["--rates", "1", "--request-rate", "2"], 1, "exclude each other"),
        (["--goodput", "ttft=5"], 1, "is not a goal of a request"),
        (["--goodput", "ttft:5", "--goal", "ttft<1s"], 1, "exclude each other"),
        (["--extra-body", "[]"], 2, "is not a JSON object"),
        (["--svg", "/no/such/folder/x.svg"], 1, "there is no folder"),
        (["--repeats", "0"], 1, "out of range"),
        (["--num-prompts", "0"], 1, "out of range"),
    ],
)
def test_errors_say_what_to_do(
    argv: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*argv) == status
    printed = capsys.readouterr().err
    assert message in printed
    assert "hint: " in printed


def test_a_server_that_hangs_up_instead_of_giving_its_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replies = {"/v1/models": b'{"data": [{"id": "m"}]}', "/tokenize": b'{"tokens": [1, 2]}'}

    async def answer(path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path in replies:
            writer.write(whole("200 OK", replies[path]))
        else:
            writer.close()

    async def check() -> int:
        async with Peer(answer) as peer:
            return await asyncio.to_thread(
                call, "--base-url", peer.url, "--trace", str(tmp_path / "run.pftrace")
            )

    assert asyncio.run(check()) == 1
    assert "error: no server answers: connection lost" in capsys.readouterr().err


def test_flags_come_from_a_file_too(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.yaml"
    path.write_text(f"base-url: {server.url}\nnum-prompts: 2\nrandom-output-len: 3\ngoodput: ttft:60000\n")
    assert call("--config", str(path), "--random-input-len", "8") == 0
    text = capsys.readouterr().out
    assert "answers of 3" in text
    assert "100.0% kept it" in text


def test_a_saturated_run_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that answers twenty requests a second, one after the other, is asked for two hundred."""
    monkeypatch.setattr(saturation, "_HOPELESS_AFTER_S", 0.5)
    monkeypatch.setattr(saturation, "_HOPELESS_WAIT_S", 0.2)
    monkeypatch.setattr("quire.bench.driver.POLL_S", 0.1)
    turn = asyncio.Lock()

    async def slow(path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        async with turn:
            await asyncio.sleep(0.05)
        writer.write(HEAD + b"".join(map(chunk, (*TOKENS, USAGE, DONE))) + b"0\r\n\r\n")

    async def overload() -> None:
        async with Peer(slow) as peer:
            client = Client(peer.url)
            target = Target(client, ServedModel("m"), PromptVocabulary(range(9)), Api(COMPLETIONS, "m"))
            load = LoadOptions(request_rate=200.0, num_prompts=2000)
            run = await asyncio.wait_for(target.run(load, may_stop=True), 20)
            assert run.was_abandoned
            assert len(run.timelines) < 1000
            assert {one.error for one in run.timelines} == {"", GIVEN_UP}
            assert saturation.wait_growth(run.timelines) > saturation.SATURATED
            client.close()

    asyncio.run(overload())


def test_a_server_that_refuses_ends_the_run_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saturation, "_HOPELESS_AFTER_S", 0.2)
    monkeypatch.setattr("quire.bench.driver.POLL_S", 0.1)

    async def full(path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(whole("503 Full", b"{}"))

    async def overload() -> None:
        async with Peer(full) as peer:
            client = Client(peer.url)
            target = Target(client, ServedModel("m"), PromptVocabulary(range(9)), Api(COMPLETIONS, "m"))
            run = await target.run(LoadOptions(request_rate=100.0, num_prompts=2000), may_stop=True)
            assert run.was_abandoned
            assert len(run.timelines) < 200
            client.close()

    asyncio.run(asyncio.wait_for(overload(), 20))
