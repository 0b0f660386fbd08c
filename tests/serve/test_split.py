"""Prefill apart from decode: the bits of one engine, whatever happens to the link between two."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from remote_engines import DEMO, follow, local, request, run, running, until
from requests_over_http import wait_for
from server import Server
from server import running as serving

from quire.cli.main import main
from quire.cluster import link, prefill, split
from quire.cluster.link import LinkAddress, LinkConnection, read_key
from quire.cluster.link_messages import Blocks, Prefilled
from quire.cluster.prefill import PrefillService
from quire.cluster.split import SplitEngine
from quire.engine.open_request import OpenRequest
from quire.errors import ConfigError, RequestError
from quire.server.remote import RemoteEngine
from quire.transfer import parcels
from quire.types import NewRequest, Output

KEY = b"a key of enough bytes"
LENGTH = 200
PROMPT = tuple(5 + number % 300 for number in range(LENGTH))
SCHEMA = '{"grammars": [{"lark_grammar": "start: /[a-z ]{20,40}/"}]}'
REQUESTS = [
    request("greedy", *PROMPT, max_tokens=12),
    request("logprobs", *PROMPT, logprobs=5, prompt_logprobs=2, temperature=1, seed=9),
    request("sequences", *PROMPT, n=3, temperature=1, logprobs=1),
    request("penalties", *PROMPT, repetition_penalty=1.3, presence_penalty=0.5, temperature=0.8),
    request("least", *PROMPT, min_tokens=9, temperature=1, stop_token_ids=list(range(0, 400, 2))),
    request("stops", *PROMPT, temperature=1, stop_token_ids=list(range(400))),
    replace(request("grammar", *PROMPT, temperature=1, max_tokens=30), grammar=SCHEMA),
    replace(request("drafts", *PROMPT, max_tokens=12), report_drafting=True),
]


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "MIN_TOKENS", 100)
    monkeypatch.setattr(split, "FIRST_DELAY_S", 0.01)


@asynccontextmanager
async def apart(address: LinkAddress, key: bytes = KEY) -> AsyncIterator[tuple[SplitEngine, PrefillService]]:
    """A decode engine and a prefill engine with a link between them."""
    async with running(DEMO) as computing, running(DEMO) as engine:
        service = PrefillService(computing, KEY)
        await service.start(address)
        if not address.path:
            address = LinkAddress(host=address.host, port=service.port)
        client = SplitEngine(engine, [address], key)
        client.start()
        try:
            yield client, service
        finally:
            await client.close()
            await service.close()


async def connected(client: SplitEngine) -> None:
    await until(lambda: client._links[0].connection is not None)


def outcomes(client: SplitEngine) -> tuple[int, int, int]:
    """Prompts that the prefill engine computed, that were lost with the link, and that it refused."""
    [counts] = client.counts.values()
    return counts.num_computed, counts.num_lost, counts.num_refused


def joined(outputs: list[Output], num_sequences: int) -> list[Any]:
    """Everything of each sequence that must not depend on where it was computed."""
    found = []
    for index in range(num_sequences):
        own = [output for output in outputs if output.sequence == index]
        tokens = [token for output in own for token in output.token_ids]
        logprobs = [one for output in own for one in output.logprobs]
        prompt = [one for output in own for one in output.prompt_logprobs]
        found.append((tokens, logprobs, prompt, own[-1].finish_reason, own[-1].stop_reason))
    return found


async def ask(client: SplitEngine | RemoteEngine, asked: NewRequest) -> list[Output]:
    stream = client.submit(replace(asked, arrival_s=time.monotonic()))
    return await follow(stream, asked.params.num_sequences)


@pytest.mark.parametrize("shared", [False, True])
def test_answers_are_those_of_one_engine(shared: bool, tmp_path: Path) -> None:
    expected = local(DEMO, REQUESTS)
    address = LinkAddress(path=str(tmp_path / "link")) if shared else LinkAddress(host="127.0.0.1")

    async def check() -> None:
        async with apart(address) as (client, service):
            await connected(client)
            for asked in REQUESTS:
                number, salted = asked.params.num_sequences, replace(asked, cache_salt=asked.request_id)
                outputs = await ask(client, salted)
                assert joined(outputs, number) == joined(expected[asked.request_id], number), asked.request_id
                for index in range(number):
                    last = [output for output in outputs if output.sequence == index][-1]
                    times = last.metrics
                    assert times is not None
                    assert times.first_token_s is not None
                    assert times.finished_s is not None
                    assert times.arrival_s <= times.first_token_s <= times.finished_s
            assert service.num_prompts == len(REQUESTS)
            assert outcomes(client) == (len(REQUESTS), 0, 0)
            [of_link] = client.counts.values()
            assert of_link.num_block_bytes > 0
            assert min(of_link.prompt_s, of_link.block_s) > 0
            assert sum(record.num_loaded_tokens for record in client.status.records) > LENGTH

    run(check())


def test_short_and_cached_prompts_stay_here() -> None:
    async def check() -> None:
        async with apart(LinkAddress(host="127.0.0.1")) as (client, service):
            await connected(client)
            await ask(client, request("short", 5, 6, 7))
            await ask(client, request("one token", *PROMPT, max_tokens=1))
            assert service.num_prompts == 0
            await until(lambda: len(client._cached) >= LENGTH // DEMO.block_size)
            await ask(client, request("cached", *PROMPT, max_tokens=4))
            assert service.num_prompts == 0
            await ask(client, replace(request("another salt", *PROMPT, max_tokens=4), cache_salt="other"))
            assert service.num_prompts == 1

    run(check())


@pytest.mark.parametrize("when", ["before", "after the token", "silent"])
def test_a_lost_link_loses_no_request(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "ALIVE_S", 0.02)
    asked = request("lost", *PROMPT, max_tokens=20, temperature=1, logprobs=2)
    expected = joined(local(DEMO, [asked])["lost"], 1)

    async def check() -> None:
        async with apart(LinkAddress(host="127.0.0.1")) as (client, service):
            await connected(client)
            sent = LinkConnection.send

            def cut(self: LinkConnection, message: Any) -> None:
                kind = type(message).__name__
                if self in service._connections and when == "silent":
                    return  # as a host that lost its power
                if self in service._connections and (when == "before" or kind != "Prefilled"):
                    self.close()
                else:
                    sent(self, message)

            monkeypatch.setattr(LinkConnection, "send", cut)
            outputs = await ask(client, asked)
            assert joined(outputs, 1) == expected
            assert outcomes(client) == (0, 1, 0)
            monkeypatch.setattr(LinkConnection, "send", sent)
            await connected(client)
            outputs = await ask(client, replace(asked, cache_salt="again"))
            assert joined(outputs, 1) == expected
            assert outcomes(client) == (1, 1, 0)

    run(check())


def test_a_dead_prefill_engine_loses_no_request() -> None:
    asked = request("dead", *PROMPT, max_tokens=20, temperature=1)
    expected = joined(local(DEMO, [asked])["dead"], 1)

    async def check() -> None:
        async with apart(LinkAddress(host="127.0.0.1")) as (client, service):
            await connected(client)
            computing = service._engine
            assert isinstance(computing, RemoteEngine)
            await computing.close()
            assert joined(await ask(client, asked), 1) == expected
            assert outcomes(client) == (0, 0, 1)

    run(check())


def test_a_request_that_cannot_run_is_refused_once() -> None:
    async def check() -> None:
        async with apart(LinkAddress(host="127.0.0.1")) as (client, _):
            await connected(client)
            wrong = request("wrong", *PROMPT[:-1], 10**9)
            with pytest.raises(RequestError, match="token"):
                await ask(client, wrong)

    run(check())


def test_an_abort_ends_a_prompt_there() -> None:
    async def check() -> None:
        async with apart(LinkAddress(host="127.0.0.1")) as (client, service):
            await connected(client)
            stream = client.submit(request("aborted", *PROMPT, n=2, temperature=1, max_tokens=300))
            stream.abort()
            outputs = await follow(stream, 2)
            assert {output.finish_reason for output in outputs} == {"abort"}
            await until(lambda: not service._tasks)
            assert not client._links[0].asked
            dropped = client.submit(request("dropped", *PROMPT, max_tokens=300))
            del dropped
            await until(lambda: not client._requests and not client._links[0].asked)

    run(check())


def test_blocks_of_an_aborted_prompt_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that came before the abort, and those that come after it."""
    monkeypatch.setattr(parcels, "_FOLDER", tmp_path)

    def block() -> Blocks:
        (parcel,) = parcels.SharedTransport().pack(bytes(32), [(bytes(32), {0: b"content"})])
        return Blocks("aborted", parcel)

    async def check() -> None:
        async with apart(LinkAddress(host="127.0.0.1")) as (client, _):
            await connected(client)
            [link] = client._links
            stream = client.submit(request("aborted", *PROMPT, max_tokens=300))
            client._receive(link, block())
            assert len(list(tmp_path.iterdir())) == 1
            stream.abort()
            assert list(tmp_path.iterdir()) == []
            client._receive(link, block())
            assert list(tmp_path.iterdir()) == []

    run(check())


@pytest.mark.parametrize("ends", ["abort", "close"])
def test_blocks_of_a_request_that_no_engine_gets_are_not_kept(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for an engine that is started again, and ends before that."""
    monkeypatch.setattr(parcels, "_FOLDER", tmp_path)

    async def check() -> None:
        async with running(DEMO) as engine:
            own = OpenRequest(request("waiting", *PROMPT), engine)
            own.brought = [*parcels.SharedTransport().pack(bytes(32), [(bytes(32), {0: b"content"})])]
            engine.status.state = "restarting"
            engine.adopt(own)
            assert len(list(tmp_path.iterdir())) == 1
            if ends == "abort":
                engine.abort("waiting")
            else:
                await engine.close()
            assert own.ended
            assert list(tmp_path.iterdir()) == []

    run(check())


def test_blocks_of_an_answer_that_ends_with_its_first_token_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parcels, "_FOLDER", tmp_path)

    async def check() -> None:
        async with apart(LinkAddress(host="127.0.0.1")) as (client, _):
            await connected(client)
            [link] = client._links
            stream = client.submit(request("ended", *PROMPT, max_tokens=300))
            [parcel] = parcels.SharedTransport().pack(bytes(32), [(bytes(32), {0: b"content"})])
            first = Output("ended", 0, token_ids=(7,), finish_reason="stop")
            client._receive(link, Prefilled("ended", [first], time.monotonic(), "fingerprint"))
            assert await follow(stream) == [first]
            client._receive(link, Blocks("ended", parcel))
            client._receive(link, Blocks("ended", None))
            assert list(tmp_path.iterdir()) == []
            assert not link.asked
            assert outcomes(client) == (1, 0, 0)

    run(check())


def test_blocks_that_nobody_waits_for_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have been read when the prompt is abandoned, and those that are read after it."""
    monkeypatch.setattr(parcels, "_FOLDER", tmp_path)
    monkeypatch.setattr(prefill, "MAX_UNSENT_BYTES", -1)  # nothing is sent

    def parcel() -> parcels.AnyParcel:
        (one,) = parcels.SharedTransport().pack(bytes(32), [(bytes(32), {0: b"content"})])
        return one

    async def check() -> None:
        async with apart(LinkAddress(host="127.0.0.1")) as (client, service):
            await connected(client)
            receivers: list[Any] = []
            monkeypatch.setattr(service._engine, "read_blocks", lambda *args: receivers.append(args[-1]))
            stream = client.submit(request("abandoned", *PROMPT, max_tokens=300))
            await until(lambda: receivers)
            receivers[0](parcel())
            receivers[0](parcel())
            await asyncio.sleep(0.01)
            assert len(list(tmp_path.iterdir())) == 2
            stream.abort()
            await until(lambda: not service._tasks)
            receivers[0](parcel())
            receivers[0](None)
            assert list(tmp_path.iterdir()) == []

    run(check())


def test_another_key_gets_nothing() -> None:
    async def check() -> None:
        async with apart(LinkAddress(host="127.0.0.1"), b"another key, as long") as (client, service):
            outputs = await ask(client, request("here", *PROMPT, max_tokens=3))
            assert sum(len(output.token_ids) for output in outputs) == 3
            await asyncio.sleep(0.1)
            assert client._links[0].connection is None
            assert service.num_prompts == 0
            with socket.create_connection(("127.0.0.1", service.port)) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                reader = asyncio.to_thread(stranger.recv, 1000)
                assert len(await reader) <= 40  # the greeting, and then the end
                assert await asyncio.to_thread(stranger.recv, 1000) == b""

    run(check())


def test_another_key_is_tried_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[float] = []

    class Watched:
        """asyncio, whose waiting is only noted."""

        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio, name)

        async def sleep(self, delay_s: float) -> None:
            delays.append(delay_s)
            await asyncio.sleep(0)

    async def check() -> None:
        monkeypatch.setattr(split, "asyncio", Watched())
        async with apart(LinkAddress(host="127.0.0.1"), b"another key, as long"):
            await until(lambda: len(delays) > 12)
        assert delays[:3] == [0.01, 0.02, 0.04]
        assert delays[12] == split.LONGEST_DELAY_S

    run(check())


def test_a_host_that_cannot_be_one_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        client = SplitEngine(RemoteEngine(DEMO), [LinkAddress(host="a..b", port=1)], KEY)
        client.start()
        await until(lambda: "link a..b:1: " in caplog.text, 10)
        assert not client._tasks[0].done()
        await client.close()

    run(check())


def test_addresses_and_keys_are_checked(tmp_path: Path) -> None:
    assert LinkAddress.of("unix:/run/link").shared
    assert LinkAddress.of("[::1]:9000") == LinkAddress(host="::1", port=9000)
    assert [LinkAddress.of(text).is_loopback for text in ("127.0.0.1:1", "localhost:1", "10.0.0.1:1")] == [
        True,
        True,
        False,
    ]
    for text in ("", "unix:", "host", "host:port", ":1", "host:70000"):
        with pytest.raises(ConfigError, match="no address"):
            LinkAddress.of(text)
    path = tmp_path / "key"
    path.write_bytes(KEY + b"\n")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="read by others"):
        read_key(str(path))
    path.chmod(0o600)
    assert read_key(str(path)) == KEY
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="5 bytes"):
        read_key(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key(str(tmp_path / "none"))


def test_two_servers_answer_as_one(tmp_path: Path) -> None:
    key = tmp_path / "link.key"
    key.write_bytes(KEY)
    key.chmod(0o600)
    link = ("--link", f"unix:{tmp_path / 'link'}", "--link-key-file", str(key))
    body = {
        "messages": [{"role": "user", "content": "Tell me a story about a boat. " * 80}],
        "temperature": 1,
        "seed": 5,
        "max_tokens": 40,
    }

    def answer(server: Server) -> tuple[str, int]:
        with server.client() as client:
            said = client.post("/v1/chat/completions", json=body).json()
        return said["choices"][0]["message"]["content"], said["usage"]["prompt_tokens"]

    with serving() as alone:
        expected, num_tokens = answer(alone)
    assert 512 < num_tokens < 900
    with serving("--role", "prefill", *link) as prefill, serving("--role", "decode", *link) as decode:
        wait_for(lambda: "are computed there" in decode.log, 60, "the link")
        assert answer(decode)[0] == expected
        with decode.client() as client:
            steps = client.get("/steps").json()["steps"]
            metrics = client.get("/metrics").text
        assert 'outcome="computed"} 1.0' in metrics
        assert sum(step["num_loaded_tokens"] for step in steps) > num_tokens - 32
        assert prefill.stop() == 0
        wait_for(lambda: "until it is back" in decode.log, 60, "the end of the link")
        assert answer(decode)[0] == expected


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--role", "decode"], "needs an address and a key"),
        (["--link", "unix:/tmp/x"], "link without role"),
        (
            ["--role", "prefill", "--replicas", "2", "--link", "a:1", "--link-key-file", "k"],
            "several replicas",
        ),
        (["--role", "prefill", "--link", "a:1", "--link", "b:1", "--link-key-file", "k"], "has one link"),
    ],
)
def test_roles_are_checked(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1"):
        main(["serve", *flags])
    assert words in capsys.readouterr().err
