"""The store: the last tokens of earlier answers, from which later ones are drafted."""

from __future__ import annotations

from collections import OrderedDict

from quire.backends.text_index import TextIndex

Scope = tuple[str, str]  # the cache salt and the adapter of a request
SCOPE_TOKENS = 1 << 18  # 7 MB with their index
STORE_BYTES = 32 << 20


class Store:
    """Answers by scope: each scope has a text of its own, so no answer is found from another one.

    A scope keeps its last `scope_tokens` tokens, a power of two. When all together take more than
    `most_bytes`, the scopes that were not used for longest are dropped.
    """

    def __init__(self, scope_tokens: int = SCOPE_TOKENS, most_bytes: int = STORE_BYTES) -> None:
        self.nbytes = 0
        self._scope_tokens, self._most_bytes = scope_tokens, most_bytes
        self._texts: OrderedDict[Scope, TextIndex] = OrderedDict()  # the one used last at the end

    def find(self, scope: Scope) -> TextIndex | None:
        """Return the text of a scope, if there is any."""
        text = self._texts.get(scope)
        if text is not None:
            self._texts.move_to_end(scope)
        return text

    def add(self, scope: Scope, answer: TextIndex) -> None:
        """Append an answer to the text of its scope."""
        text = self.find(scope)
        if text is None:
            text = self._texts[scope] = TextIndex(None, self._scope_tokens)
        self.nbytes -= text.nbytes
        text.append_text(answer)
        self.nbytes += text.nbytes
        while self.nbytes > self._most_bytes and len(self._texts) > 1:
            self.nbytes -= self._texts.popitem(last=False)[1].nbytes
