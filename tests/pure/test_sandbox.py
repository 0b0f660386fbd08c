"""Sandboxes: a hostile template costs one request and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from quire.errors import RequestError
from quire.grammar import compile_job
from quire.sandbox import job, process
from quire.text import render_job
from quire.text.renderer import TemplateRenderer

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
def renderer() -> Iterator[TemplateRenderer]:
    with closing(TemplateRenderer()) as made:
        yield made


def text(renderer: TemplateRenderer, source: str, **context: object) -> str:
    return "".join(segment.text for segment in renderer.render(source, context))


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_templates_cannot_reach_python(renderer: TemplateRenderer, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for source in ESCAPES:
        with pytest.raises(RequestError):
            text(renderer, source, messages=[{"role": "user", "content": "x"}])
    assert list(tmp_path.iterdir()) == []
    assert text(renderer, "{{ 1 + 1 }}") == "2"


def test_the_process_has_no_files_and_no_network(renderer: TemplateRenderer) -> None:
    text(renderer, "x")
    assert renderer._process is not None
    limits = Path(f"/proc/{renderer._process.pid}/limits").read_text().splitlines()
    files = next(line for line in limits if line.startswith("Max open files"))
    assert files.split()[3:5] == ["3", "3"]


def test_an_endless_loop_ends_in_time(renderer: TemplateRenderer) -> None:
    text(renderer, "warm")
    start = time.perf_counter()
    with pytest.raises(RequestError, match="did not finish in 2 s") as caught:
        text(renderer, CPU_BOMB)
    assert 1.5 < time.perf_counter() - start < 2.9
    assert caught.value.hint
    assert text(renderer, "usable again") == "usable again"


@pytest.mark.parametrize("bomb", MEMORY_BOMBS)
def test_a_string_that_doubles_costs_no_memory(renderer: TemplateRenderer, bomb: str) -> None:
    before = rss_bytes()
    renderer.time_limit_s = 20
    with pytest.raises(RequestError, match="more than 256 MiB"):
        text(renderer, bomb)
    assert rss_bytes() - before < 256 << 20
    assert text(renderer, "usable again") == "usable again"


def test_a_dead_process_is_replaced(renderer: TemplateRenderer) -> None:
    text(renderer, "x")
    assert renderer._process is not None
    os.kill(renderer._process.pid, signal.SIGKILL)
    renderer._process.wait()
    assert text(renderer, "again") == "again"


def test_an_interrupt_of_the_terminal_does_not_reach_it(renderer: TemplateRenderer) -> None:
    text(renderer, "x")
    assert renderer._process is not None
    assert os.getsid(renderer._process.pid) != os.getsid(0)
    os.kill(renderer._process.pid, signal.SIGINT)
    same = renderer._process
    assert text(renderer, "same") == "same"
    assert renderer._process is same


def test_large_conversations_pass(renderer: TemplateRenderer) -> None:
    content = "漢字🙂 and text " * 40_000
    assert text(renderer, "{{ content }}", content=content) == content


def test_start_is_fast_and_ahead() -> None:
    with closing(TemplateRenderer()) as renderer:
        start = time.perf_counter()
        renderer.start()
        assert time.perf_counter() - start < 0.5
        text(renderer, "x")
        first_s = time.perf_counter() - start
        start = time.perf_counter()
        for _ in range(20):
            text(renderer, "{{ a }}", a="b")
        assert time.perf_counter() - start < 1
    assert first_s < 3  # a tenth of a second on an idle machine


JOBS = {"quire.text.render_job": render_job.JOB, "quire.grammar.compile_job": compile_job.JOB}
LOADED = {
    "quire.text.render_job": {"traced"},
    "quire.grammar.compile_job": {"json_schema", "matcher", "wording", "socket"},  # llguidance imports socket
}


@pytest.mark.parametrize("module", JOBS)
def test_a_process_loads_its_job_alone(module: str) -> None:
    boot = process._BOOT.format(module=module).removesuffix("main(JOB)\n")
    boot += "print(json.dumps([*sys.modules]))"
    paths = json.dumps([path for path in sys.path if path])
    package = str(Path(process.__file__).parent.parent)
    command = [sys.executable, "-I", "-S", "-c", boot, paths, package]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = set(json.loads(result.stdout))
    part = module.rpartition(".")[0]
    ours = {name for name in loaded if name.startswith("quire.")}
    ours -= {"quire.sandbox", "quire.sandbox.job", part, module}
    large = loaded & {"numpy", "tokenizers", "socket", "asyncio", "subprocess"}
    assert {name.removeprefix(f"{part}.") for name in ours} | large == LOADED[module]


@pytest.mark.parametrize("module", JOBS)
def test_a_warm_up_is_answered(module: str) -> None:
    line = json.dumps(JOBS[module].warm_up).encode()
    assert "error" not in json.loads(job._reply(JOBS[module], line))


def test_threads_take_turns(renderer: TemplateRenderer) -> None:
    wrong: list[str] = []

    def ask(name: str) -> None:
        for _ in range(20):
            if text(renderer, "{{ name }}", name=name) != name:
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
        "import time; from quire.text.renderer import TemplateRenderer\n"
        "s = TemplateRenderer(); s.render('x', {}); print(s._process.pid, flush=True); time.sleep(60)"
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


def test_values_that_json_lacks_are_refused(renderer: TemplateRenderer) -> None:
    for value in (float("nan"), {1, 2}, object()):
        with pytest.raises(RequestError, match="JSON"):
            text(renderer, "x", a=value)
