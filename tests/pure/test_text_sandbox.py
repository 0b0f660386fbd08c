"""The render process: hostile templates cost one request and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.errors import RequestError
from quire.text.sandbox import Sandbox

ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''.__class__ }}",
    "{{ ''['__class__']['__mro__'][1]['__subclasses__']() }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('touch CANARY').read() }}",
    "{{ lipsum.__globals__ }}",
    "{{ lipsum.__globals__['os'].system('touch CANARY') }}",
    "{{ joiner | attr('__init__') | attr('__globals__') }}",
    "{{ '' | attr('__class__') }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{x.__class__}'.format_map({'x': ''}) }}",
    "{{ ('{0.__cla' + 'ss__}').format(messages) }}",
    "{{ self.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__closure__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ messages.append(1) }}",
    "{% set a %}x{% endset %}{{ a._mask }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
]
CPU_BOMB = "{% for a in range(1000) %}" * 3 + "{% endfor %}" * 3
DOUBLE = "{% set n = namespace(s='xxxxxxxx') %}{% for i in range(40) %}{% set n.s = n.s OP n.s %}{% endfor %}"
MEMORY_BOMBS = [
    DOUBLE.replace("OP", "+") + "{{ n.s | length }}",
    DOUBLE.replace("OP", "~") + "{{ n.s }}",
    "{{ 'x' * 10000000000 }}",
    "{{ '%9999999999s' % 'x' }}",
    "{% for i in range(9000) %}{% for j in range(9000) %}" + "x" * 200 + "{% endfor %}{% endfor %}",
]


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as made:
        yield made


def text(sandbox: Sandbox, source: str, **context: object) -> str:
    return "".join(segment.text for segment in sandbox.render(source, context))


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_templates_cannot_reach_python(sandbox: Sandbox, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for source in ESCAPES:
        with pytest.raises(RequestError):
            text(sandbox, source, messages=[{"role": "user", "content": "x"}])
    assert list(tmp_path.iterdir()) == []
    assert text(sandbox, "{{ 1 + 1 }}") == "2"


def test_the_process_has_no_files_and_no_network(sandbox: Sandbox) -> None:
    text(sandbox, "x")
    assert sandbox._process is not None
    limits = Path(f"/proc/{sandbox._process.pid}/limits").read_text().splitlines()
    files = next(line for line in limits if line.startswith("Max open files"))
    assert files.split()[3:5] == ["3", "3"]


def test_an_endless_loop_ends_in_time(sandbox: Sandbox) -> None:
    text(sandbox, "warm")
    start = time.perf_counter()
    with pytest.raises(RequestError, match="did not finish in 2 s") as caught:
        text(sandbox, CPU_BOMB)
    assert 1.5 < time.perf_counter() - start < 2.9
    assert caught.value.hint
    assert text(sandbox, "usable again") == "usable again"


@pytest.mark.parametrize("bomb", MEMORY_BOMBS)
def test_a_string_that_doubles_costs_no_memory(sandbox: Sandbox, bomb: str) -> None:
    before = rss_bytes()
    sandbox.time_limit_s = 20
    with pytest.raises(RequestError, match="more than 256 MiB"):
        text(sandbox, bomb)
    assert rss_bytes() - before < 256 << 20
    assert text(sandbox, "usable again") == "usable again"


def test_a_dead_process_is_replaced(sandbox: Sandbox) -> None:
    text(sandbox, "x")
    assert sandbox._process is not None
    os.kill(sandbox._process.pid, signal.SIGKILL)
    sandbox._process.wait()
    assert text(sandbox, "again") == "again"


def test_an_interrupt_of_the_terminal_does_not_reach_it(sandbox: Sandbox) -> None:
    text(sandbox, "x")
    assert sandbox._process is not None
    assert os.getsid(sandbox._process.pid) != os.getsid(0)
    os.kill(sandbox._process.pid, signal.SIGINT)
    process = sandbox._process
    assert text(sandbox, "same") == "same"
    assert sandbox._process is process


def test_large_conversations_pass(sandbox: Sandbox) -> None:
    content = "漢字🙂 and text " * 40_000
    assert text(sandbox, "{{ content }}", content=content) == content


def test_start_is_fast_and_ahead() -> None:
    with Sandbox() as sandbox:
        start = time.perf_counter()
        sandbox.start()
        assert time.perf_counter() - start < 0.5
        text(sandbox, "x")
        first_s = time.perf_counter() - start
        start = time.perf_counter()
        for _ in range(20):
            text(sandbox, "{{ a }}", a="b")
        assert time.perf_counter() - start < 1
    assert first_s < 3  # a tenth of a second on an idle machine


def test_the_process_loads_nothing_of_the_engine() -> None:
    code = (
        "import sys, types; sys.path[:] = %r; folder = %r\n"
        "for name, path in (('quire', folder), ('quire.text', folder + '/text')):\n"
        "    sys.modules[name] = types.ModuleType(name); sys.modules[name].__path__ = [path]\n"
        "import quire.text.render_worker\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "print(sorted(loaded & {'numpy', 'tokenizers', 'socket', 'asyncio'}))\n"
    )
    package = str(Path(sys.modules["quire"].__file__ or "").parent)
    filled = code % ([path for path in sys.path if path], package)
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", filled], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_threads_take_turns(sandbox: Sandbox) -> None:
    wrong: list[str] = []

    def ask(name: str) -> None:
        for _ in range(20):
            if text(sandbox, "{{ name }}", name=name) != name:
                wrong.append(name)

    threads = [threading.Thread(target=ask, args=(f"t{i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_the_process_ends_with_its_parent(how: signal.Signals) -> None:
    code = (
        "import time; from quire.text.sandbox import Sandbox\n"
        "s = Sandbox(); s.render('x', {}); print(s._process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stdout is not None
        child = Path(f"/proc/{int(parent.stdout.readline())}")
        assert child.exists()
        parent.send_signal(how)
        parent.wait(10)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and _runs(child):
        time.sleep(0.02)
    assert not _runs(child)


def _runs(process: Path) -> bool:
    try:
        return ") Z" not in (process / "stat").read_text()
    except OSError:
        return False


def test_what_json_has_not_is_refused(sandbox: Sandbox) -> None:
    for value in (float("nan"), {1, 2}, object()):
        with pytest.raises(RequestError, match="JSON"):
            text(sandbox, "x", a=value)
