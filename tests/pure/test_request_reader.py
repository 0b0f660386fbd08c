"""Texts of requests that one thread reads while another one adds to them."""

from __future__ import annotations

from typing import cast

from quire.outputs import CompletionOutput
from quire.request_reader import RequestReader
from quire.sampling_params import SamplingParams
from quire.types import NewRequest


class Growing:
    """A choice whose text grows between any two looks at it."""

    index, delta, num_looks = 0, "", 0

    @property
    def text(self) -> str:
        self.num_looks += 1
        return "".join(map(str, range(self.num_looks)))


def test_deltas_are_the_whole_text_whenever_it_grows() -> None:
    reader = RequestReader(NewRequest("0", (1, 2), SamplingParams(), 0.0), None, None)
    growing, deltas = Growing(), ""
    reader._sequences[0].output = cast(CompletionOutput, growing)
    for _ in range(5):
        reader.take_deltas()
        deltas += growing.delta
    assert deltas == growing.text[: len(deltas)] != ""
