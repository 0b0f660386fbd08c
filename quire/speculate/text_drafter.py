"""The drafter that looks up the last tokens of a sequence in its own text and in earlier answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.backends.text_index import BOUNDARY, TextIndex, continuations
from quire.program.caches import MAX_DRAFTED
from quire.speculate.store import Scope, Store
from quire.types import Draft, NewRequest, Output

# Places compared for each length by which they are looked up: with all of them drafts are hardly better.
MOST_PLACES = 16
# Tokens drafted in a call, and at least for each sequence: more would take time, and no step of so many rows
# gains by them.
ALL_DRAFTED, LEAST_DRAFTED = 256, 4


class _Request:
    """An open request: its scope, its prompt, and how many of its sequences have not ended."""

    __slots__ = ("num_open", "prompt", "prompt_token_ids", "scope")

    def __init__(self, new: NewRequest) -> None:
        self.scope: Scope = (new.cache_salt, new.adapter)
        self.num_open = new.params.num_sequences
        predicted = (*new.predicted_token_ids, BOUNDARY) if new.predicted_token_ids else ()
        self.prompt_token_ids = predicted + new.prompt_token_ids
        self.prompt: TextIndex | None = None

    def text(self) -> TextIndex:
        """Return a text for one of its sequences: the prompt, which all share, and no output yet."""
        if self.prompt is None:
            self.prompt = TextIndex()
            self.prompt.append(self.prompt_token_ids)
            self.prompt_token_ids = ()
        return TextIndex(self.prompt)


class TextDrafter:
    """Proposes what followed the longest match of a sequence's last tokens: a Drafter of the engine.

    The own text of a sequence is its prompt and its output; what the caller predicted stands before the
    prompt. An answer that was not aborted enters the store; all else of a sequence is forgotten at its end.
    """

    def __init__(self, store: Store | None = None, most_places: int = MOST_PLACES) -> None:
        self.store = Store() if store is None else store
        self._most_places = most_places
        self._requests: dict[str, _Request] = {}
        self._texts: dict[tuple[str, int], tuple[TextIndex, Scope]] = {}  # of sequences with tokens

    def __len__(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._requests)

    def add(self, request: NewRequest) -> None:
        """Take a request, before any output of it; if it is resumed, with those of the other engine."""
        opened = self._requests[request.request_id] = _Request(request)
        for index, emitted in enumerate(request.resumed):
            if emitted is None:
                opened.num_open -= 1
            elif emitted:
                self._begin((request.request_id, index))[0].append(emitted)

    def observe(self, outputs: Iterable[Output]) -> None:
        """Take new tokens of sequences, and their ends."""
        texts = self._texts
        for output in outputs:
            name = (output.request_id, output.sequence)
            found = texts.get(name)
            if output.token_ids:
                if found is None and output.request_id in self._requests:
                    found = self._begin(name)
                if found is not None:
                    found[0].append(output.token_ids)
            if output.finish_reason is not None:
                self._end(output)

    def propose(self, names: Sequence[tuple[str, int]]) -> list[tuple[Draft, ...]]:
        """Return the drafts of these sequences: by the longest match in their own text, and in the store.

        One in the store counts only if it is longer: otherwise it is right less often than the own one.
        """
        texts, find = self._texts, self.store.find
        earlier: dict[Scope, TextIndex | None] = {}
        rows = []
        for name in names:
            text, scope = texts.get(name) or self._begin(name)
            if scope not in earlier:
                earlier[scope] = find(scope)
            rows.append((text, earlier[scope]))
        most = min(MAX_DRAFTED, max(LEAST_DRAFTED, ALL_DRAFTED // len(names))) if names else 0
        return [_drafts(*row) for row in continuations(rows, most, self._most_places)]

    def _begin(self, name: tuple[str, int]) -> tuple[TextIndex, Scope]:
        """Return the text, without output yet, and the scope of a sequence of an open request."""
        request = self._requests[name[0]]
        found = self._texts[name] = (request.text(), request.scope)
        return found

    def _end(self, output: Output) -> None:
        """Forget a sequence."""
        request = self._requests.get(output.request_id)
        if request is None:
            return
        found = self._texts.pop((output.request_id, output.sequence), None)
        if found is not None and output.finish_reason in ("stop", "length"):
            self.store.add(request.scope, found[0])
        request.num_open -= 1
        if not request.num_open:
            del self._requests[output.request_id]


def _drafts(
    match: int, token_ids: tuple[int, ...], longer: int, others: tuple[int, ...]
) -> tuple[Draft, ...]:
    """Return the drafts of a row of `continuations`."""
    if not longer:
        return (Draft(token_ids, "text", match),) if match else ()
    if not match:
        return (Draft(others, "store", longer),)
    return (Draft(token_ids, "text", match), Draft(others, "store", longer))
