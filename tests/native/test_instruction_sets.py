"""Which of the kernels of a build a device takes, and what is said where none can run."""

import pytest

from quire.backends.native import _core
from quire.backends.native.device import NativeDevice
from quire.errors import ConfigError


def test_the_best_that_runs_here_is_taken_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_ISA", raising=False)
    assert NativeDevice("m", 1).isa == _core.isas()[0]
    monkeypatch.setenv("QUIRE_ISA", _core.isas()[-1])
    assert NativeDevice("m", 1).isa == _core.isas()[-1]


def test_a_set_that_was_not_built_is_refused_with_those_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ISA", "avx1024")
    with pytest.raises(ConfigError, match="avx1024") as caught:
        NativeDevice("m", 1)
    assert caught.value.hint is not None
    assert ", ".join(_core.isas()) in caught.value.hint


def test_a_build_for_other_processors_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_ISA", raising=False)
    monkeypatch.setattr(_core, "isas", list)
    with pytest.raises(ConfigError, match="built for another processor"):
        NativeDevice("m", 1)
