"""Frames on the engine's socket: whole messages come out however the bytes came, and nothing else does."""

from __future__ import annotations

import math
import socket
import struct
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from remote_engines import NULL, request

from quire import SamplingParams
from quire.config import EngineConfig
from quire.engine.caches import BlockGroup
from quire.engine.request_limits import RequestLimits
from quire.engine.status import Facts, ModelFacts, StepReport
from quire.engine.step_law import Stage, StepLaw
from quire.program.features import Feature
from quire.server import engine_messages as messages
from quire.server import engine_process
from quire.server.engine_child import COMMAND
from quire.server.engine_messages import (
    Abort,
    BadFrame,
    EngineMessage,
    Failed,
    Ready,
    Start,
    Stepped,
    Submit,
    encode,
    encode_step,
    engine_reader,
    server_reader,
)
from quire.step_record import Record
from quire.types import Admission, Failure, NewRequest, Output, RequestMetrics, TokenLogprob

RECORD = Record(7, 2, 65, 3, 100, 16, 1, 0.1 + 0.2)
STAGE = Stage((0.1, 0.2), (0.3, 0.4), "products", "cache", "int8")
LAW = StepLaw((Feature("one"), Feature("experts", 0, 2, 8)), (STAGE,), (0.5, 0.0), (STAGE,), 0.1 + 0.2, 1.5)
REPORT = StepReport(RECORD, 2, 3, 100, LAW)
LIMITS = RequestLimits(64, (BlockGroup(10), BlockGroup(5, 32)), 16, 64, 500)
MODEL = ModelFacts(
    "LlamaForCausalLM", 4, 256, 8, 4, 32, 2048, 10**6, 10**7, 4096, 1024, None, "int8", [512, None]
)
FACTS = Facts({"isa": "avx2"}, LIMITS, 128, "f", {"memory": 1e9}, LAW, MODEL)
PICKLE = b"cposix\nsystem\n(S'touch canary'\ntR."


def output(name: str = "a", *floats: float) -> Output:
    logprobs = tuple((TokenLogprob(i, x, i + 1),) for i, x in enumerate(floats))
    return Output(
        name, 0, tuple(range(len(floats))), logprobs, logprobs, "stop", 5, None, 3, RequestMetrics(1.5)
    )


def frame(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


@given(st.lists(st.floats(allow_nan=False), max_size=5), st.integers(1, 40))
def test_outputs_arrive_bit_for_bit(floats: list[float], size: int) -> None:
    failed = output("c")._replace(finish_reason="error", error=Failure("no", by_request=True))
    sent = [output("a", *floats), output("b"), failed]
    data = b"".join([*encode_step(sent, REPORT), encode(Failed("x"))])
    reader, received = server_reader(), list[Any]()
    for begin in range(0, len(data), size):
        received += list(reader.feed(data[begin : begin + size]))
    assert received == [Stepped(sent, REPORT), Failed("x")]
    got = [entry.logprob for position in received[0].outputs[0].logprobs for entry in position]
    assert [x.hex() for x in got] == [x.hex() for x in floats]
    assert type(received[0].outputs[0]) is Output
    assert type(received[0].outputs[2].error) is Failure
    assert type(received[0].report.record) is Record


def test_an_engine_that_is_ready_makes_ready_for_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(engine_process, "_make_collections_rare", lambda: None)
    built = SimpleNamespace(
        engine="the engine",
        runner=SimpleNamespace(prepare_grammars=lambda: told.append("grammars")),
        facts=FACTS,
    )
    server: Any = SimpleNamespace(send=told.append)
    start = messages.Start(EngineConfig())
    assert engine_process._load(server, start, lambda *_, **__: built) is built  # type: ignore[arg-type,return-value,comparison-overlap]
    assert told == [messages.Ready(FACTS), "grammars"]


def test_what_is_no_number_arrives_too() -> None:
    (received,) = server_reader().feed(bytes(encode(Stepped([output("a", math.nan, -math.inf)], None))))
    nan, infinite = (position[0].logprob for position in received.outputs[0].logprobs)
    assert math.isnan(nan)
    assert infinite == -math.inf


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1, None, 0])
def test_requests_arrive_as_they_were(seed: int | None) -> None:
    one = request(
        "ünï\x00 code",
        *range(300),
        seed=seed,
        temperature=0.1 + 0.2,
        stop_token_ids=(2, 1),
        logit_bias={7: -0.5, 8: 100},
        bad_words=("a",),
        bad_words_token_ids=((1, 2), (3,)),
        allowed_token_ids=(5, 6),
        max_tokens=None,
        prompt_logprobs=-1,
    )
    sent = NewRequest(
        one.request_id, one.prompt_token_ids, one.params, 0.1, "tenant", -7, "salt", (1, 2), 3, "start: /a+/"
    )
    (received,) = engine_reader().feed(bytes(encode(Submit(sent))))
    assert isinstance(received, Submit)
    assert received.checked() == sent
    assert isinstance(received.checked().params, SamplingParams)
    assert (received.checked().params.stop_token_ids, one.params.stop_token_ids) == ((2, 1), (2, 1))


def test_a_configuration_arrives_as_it_was() -> None:
    assert list(engine_reader().feed(bytes(encode(Start(NULL)) + encode(Abort("a", 2))))) == [
        Start(NULL),
        Abort("a", 2),
    ]


def test_a_long_step_takes_several_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = [output(str(i), *range(20)) for i in range(10)]
    monkeypatch.setattr(messages, "MAX_FRAME_BYTES", 1200)
    frames = list(encode_step(outputs, REPORT))
    assert len(frames) == 10
    received = list(server_reader().feed(b"".join(frames)))
    assert [one for step in received for one in step.outputs] == outputs  # type: ignore[union-attr]
    assert [step.report for step in received] == [None] * 9 + [REPORT]  # type: ignore[union-attr]
    with pytest.raises(BadFrame, match="at most 1,200 are sent"):
        list(encode_step([output("a", *range(100))], REPORT))


BAD = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "too long": b"\xff\xff\xff\xff",
    "pickle": frame(PICKLE),
    "json": frame(b'["Submit", {"request_id": "a"}]'),
    "nothing": frame(b""),
    "unknown": frame(b"\x92\xa3Run\xa2rm"),
    "truncated": frame(b"\x92\xa6Submit"),
    "huge array": frame(b"\x93\xa7Stepped\xdd\xff\xff\xff\xff"),
    "nested": frame(b"\x91" * 100_000),
    "wrong type": frame(b"\x93\xa5Abort\x01\xc0"),
    "not utf-8": frame(b"\x93\xa5Abort\xa2\xff\xfe\xc0"),
    "of the other side": bytes(encode(Ready(FACTS))),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(BadFrame):
        list(engine_reader().feed(data))


@given(st.binary(max_size=200))
def test_any_bytes_are_messages_or_refused(data: bytes) -> None:
    for reader in (engine_reader(), server_reader()):
        try:
            received = list(reader.feed(frame(data)))
        except BadFrame:
            continue
        assert all(isinstance(message, EngineMessage) for message in received)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (BAD["http"], "a frame of 1,195,725,856 bytes"),
        (BAD["pickle"], "a frame that contains no message"),
        (bytes(encode(Abort("a"))), "the server sent Abort before Start"),
        (bytes(encode(Start(NULL)) * 2), "a second Start"),
    ],
    ids=["http", "pickle", "abort", "twice"],
)
def test_the_engine_ends_with_one_error(data: bytes, problem: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = (*COMMAND, str(theirs.fileno()))
        with subprocess.Popen(command, pass_fds=(theirs.fileno(),), stderr=subprocess.PIPE) as process:
            theirs.close()
            ours.sendall(data)
            received = _read_all(ours)
            assert process.stderr is not None
            assert process.wait(10) == 1
            errors = process.stderr.read().decode()
    last = received[-1]
    assert isinstance(last, Failed)
    assert problem in last.message
    assert problem in errors
    assert "Traceback" not in errors


def _read_all(connection: socket.socket) -> list[Any]:
    reader, received = server_reader(), list[Any]()
    while data := connection.recv(1 << 16):
        received += list(reader.feed(data))
    return received


def test_the_engine_ends_when_nobody_speaks() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen((*COMMAND, str(theirs.fileno())), pass_fds=(theirs.fileno(),))
    ours.close()
    assert process.wait(10) == 0


def test_a_step_does_not_fail_because_the_server_has_closed() -> None:
    """What is said within a step is lost; the engine finds the end when it next reads."""
    ours, theirs = socket.socketpair()
    with theirs:
        ours.close()
        server = engine_process.ServerSocket(theirs)
        engine_process._tell_admitted(server, (Admission(0, "r", 0, SamplingParams(), (), 1),))
        with pytest.raises((EOFError, ConnectionError)):
            server.receive(0.0)


def test_the_current_directory_is_no_place_for_modules(tmp_path: Any) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit('taken from here')")
    code = (*COMMAND[:-2], "-c", "import msgspec")
    assert subprocess.run(code, cwd=tmp_path).returncode == 0
    assert subprocess.run((sys.executable, "-c", "import msgspec"), cwd=tmp_path).returncode == 1
