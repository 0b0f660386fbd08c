"""Prompts for text between two others, of models trained to fill in (Bavarian et al., arXiv:2207.14255)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.text.tokenizer import Tokenizer

# Before the prefix, before the suffix, and after both: of Qwen, StarCoder, DeepSeek, GLM, Code Llama.
_TRIPLES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
_SUFFIX_FIRST = ("[SUFFIX]", "[PREFIX]")  # of Mistral: the answer follows the prefix
_PADDING = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "▁<EOT>")  # ends of what is filled in
_REPOSITORY = ("<|repo_name|>", "<repo_name>", "<reponame>", "<|fim_repo|>")
_FILE = ("<|file_sep|>", "<file_sep>", "<filename>")


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A text that the one to be filled in may refer to."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Gap:
    """The texts around one that is to be filled in, what that begins with, and other files."""

    prefix: str
    suffix: str
    begun: str = ""
    files: Sequence[OtherFile] = ()


@dataclass(frozen=True, slots=True)
class Infill:
    """The way to ask a model for the text between a prefix and a suffix: control tokens of these names.

    Without `middle` the suffix comes first. `repository` and `file` precede the names of those, if the model
    knows them. `end_ids` are tokens that end what is filled in, beside those that end every text.
    """

    tokenizer: Tokenizer
    prefix: str
    suffix: str
    middle: str | None
    repository: str | None
    file: str | None
    end_ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int) -> Infill | None:
        """Return how a model with this vocabulary is asked, or None if it has no tokens for that."""

        known = tokenizer.control_tokens.items()
        ids = {name: number for number, name in known if number < vocab_size}
        for names in (*_TRIPLES, _SUFFIX_FIRST):
            if all(name in ids for name in names):
                repository, file = (next((n for n in own if n in ids), None) for own in (_REPOSITORY, _FILE))
                prefix, suffix, middle = names if len(names) == 3 else (*names[::-1], None)
                ends = dict.fromkeys((*names, repository, file, *_PADDING))
                found = tuple(ids[name] for name in ends if name in ids)
                return cls(tokenizer, prefix, suffix, middle, repository, file, found)
        return None

    def encode(self, gap: Gap, room: int | None = None) -> list[int]:
        """Return the prompt for what is in a gap.

        Of more than `room` tokens, those farthest from the gap are left out: first files, the last ones are
        kept, then the prefix's first and the suffix's last tokens, of which a quarter of the room is kept.
        """
        bos = self.tokenizer.bos_token_id
        start = [bos] if bos is not None and self.tokenizer.encode("")[:1] == [bos] else []
        first = self._part(self.prefix, gap.prefix + ("" if self.middle else gap.begun))
        second = self._part(self.suffix, gap.suffix)
        last = self._part(self.middle, gap.begun) if self.middle else []
        if room is not None:
            free = room - len(start) - len(last)
            second = second[: max(1, free // 4, free - len(first))]
            first = first[:1] + first[max(1, len(first) + 1 - max(1, free - len(second))) :]
        own = [*first, *second, *last] if self.middle else [*second, *first]
        left = None if room is None else room - len(start) - len(own)
        return [*start, *self._beside(gap.files, left), *own]

    def _beside(self, files: Sequence[OtherFile], room: int | None) -> list[int]:
        """Return the last of other files that `room` has a place for, as models are trained to see them."""
        if not files:
            return []
        before = self._part(self.repository, "project\n") if self.repository else []
        after = self._part(self.file, "filename\n") if self.file else []
        free, kept = float("inf") if room is None else room - len(before) - len(after), list[list[int]]()
        for other in reversed(files):
            name = f"{other.name}\n" if self.file else ""
            kept.append(self._part(self.file, f"{name}{other.text}\n"))
            free -= len(kept[-1])
            if free < 0:
                kept.pop()
                break
        return [*before, *(number for one in reversed(kept) for number in one), *after] if kept else []

    def _part(self, token: str | None, text: str) -> list[int]:
        return self.tokenizer.encode_segments([*([(token, True)] if token else []), (text, False)])
