"""The tests that `.ci/run` leaves out: each is there, so that none is run again unseen by a new name."""

from __future__ import annotations

import re

from sources import ROOT


def test_every_test_that_is_left_out_exists() -> None:
    listed = [line for line in (ROOT / ".ci/left_out").read_text().splitlines() if line[0] != "#"]
    assert len(listed) == len(set(listed)) > 0
    for test in listed:
        file, _, name = test.partition("::")
        function = name.partition("[")[0]
        assert re.search(rf"^def {function}\(", (ROOT / file).read_text(), re.M), test
