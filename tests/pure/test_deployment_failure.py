"""What users are told when a deployment does not start."""

from __future__ import annotations

import socket
import traceback

import pytest

from quire.cluster.deployment_failure import check_reachable, why_failed
from quire.errors import ConfigError, EngineDead


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (ConfigError("no such model", "name another"), "no such model\nhint: name another"),
        (EngineDead("out of memory"), "out of memory"),
        (KeyError("rows\nhint: none"), "the deployment 'engines' could not start: KeyError: 'rows"),
        (AssertionError(), "the deployment 'engines' could not start: AssertionError\n"),
    ],
)
def test_an_engine_that_does_not_start_says_why(raised: Exception, told: str) -> None:
    def fail() -> None:
        try:
            raise raised
        except Exception:
            raise RuntimeError(traceback.format_exc()) from None  # as Serve does

    try:
        fail()
    except RuntimeError:
        message = f"The deployment failed to start 1 times in a row. Error:\n{traceback.format_exc()}"
    words = {"front": "", "engines": message}
    assert str(why_failed(words, RuntimeError("failed"))).startswith(told)


def test_without_a_word_of_a_part_the_error_is_told() -> None:
    assert "Failed to update" in str(why_failed({"front": ""}, RuntimeError("Failed to update")))
    traceback = (
        "ray::ProxyActor.ready() (pid=1)\n  File a, line 1\nRuntimeError: Failed to bind to address ':1'.\n"
    )
    told = str(why_failed({}, RuntimeError(traceback)))
    assert told.startswith(
        "cannot listen: RuntimeError: Failed to bind to address ':1'.\nhint: give another --port"
    )


def test_an_address_where_nothing_listens_is_refused_at_once() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(ConfigError, match="no Ray cluster at 127"):
            check_reachable(address)
        listening.listen()
        check_reachable(address)
    with pytest.raises(ConfigError, match="no Ray cluster"):
        check_reachable("127.0.0.1:99999999")
    for other in ("auto", "ray://127.0.0.1:1", "local"):
        check_reachable(other)
