"""Vision: what a model sees images with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.images.marks import Marks
from quire.images.patches import Patching
from quire.images.windows import Windows
from quire.program.program import Program


@dataclass(frozen=True, slots=True)
class Vision:
    """A vision tower: its program [T patches] -> [L, width], and how images become patches.

    Of the `width` numbers of a token of an image, the first are its embedding; as many after them are added
    to the hidden states behind each of the first layers of the text model (`num_added` times). Prompts have
    one `token` for an image, which becomes as many as it has. What templates write for an image is replaced
    by other text first if `written` says so. `row_ends` are the tokens, as the tokenizer names them, that
    follow each row of an image, and the last one. Tokens of an image see each other in the text model if
    images are `whole`, else those before them. A tower some of whose layers see only a window has `windows`.
    `marks` are the text around the parts of an image, each of which is encoded as an image of its own.
    """

    program: Program
    patching: Patching
    token: int
    num_added: int = 0
    written: tuple[str, str] | None = None
    whole: bool = False
    row_ends: tuple[str, str] | None = None
    windows: Windows | None = None
    marks: Marks | None = None

    def bounded(self, max_tokens: int) -> Vision:
        """Return this tower for images of at most so many tokens. Raises ConfigError if it cannot be."""
        return replace(self, patching=self.patching.bounded(max_tokens))
