"""The text side of models that give embeddings or scores: texts become prompts, vectors become results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from quire.errors import RequestError
from quire.frontend import LONGEST_TEXT, LONGEST_TOKEN, Encoded, Frontend, token_ids_of
from quire.models.purpose import Pooling, no_vectors

# What Qwen3's rerankers were trained on (Qwen3 Embedding, arXiv:2506.05176).
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
Text = str | Sequence[int]


class PooledTexts:
    """Encodes texts for a model that gives vectors, and reads its vectors.

    Raises RequestError, also for a model that generates text.
    """

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._settings = frontend.sentence_settings

    @property
    def pooling(self) -> Pooling:
        """The vectors that the model gives. Raises RequestError for one that generates text."""
        found = self._frontend.model.pooling
        if found is None:
            raise no_vectors()
        return found

    def check_task(self, task: Literal["embed"]) -> None:
        """Raise RequestError unless the model is for this."""
        if self.pooling.task != task:
            problem = "this model gives scores of pairs, no embeddings"
            raise RequestError(problem, "use /rerank, /score or LLM.score", "model")

    def encode(self, text: Text, *, prompt_name: str | None = None, truncate: int | None = None) -> Encoded:
        """Encode one text for its embedding, or token ids as they are.

        The model's prompt of this name, or its default one, is put before a text. `truncate` is the number
        of tokens that are kept, -1: as many as the model reads; without it a longer text is an error.
        """
        self.check_task("embed")
        limit, before = self._limit(truncate), self._prompt(prompt_name)
        if not isinstance(text, str):
            ids = token_ids_of(text)
            return self._checked(Encoded(ids if limit is None else ids[:limit], pooling="embed"), "input")
        shown = before + self._cut(text, limit, "input")
        if self._settings is not None and self._settings.lower_case:
            shown = shown.lower()
        ids = tuple(self._frontend.need_tokenizer().encode_whole(shown, None, limit))
        return self._checked(Encoded(ids, text, pooling="embed"), "input")

    def encode_pair(
        self, query: str, document: str, *, instruction: str | None = None, truncate: int | None = None
    ) -> Encoded:
        """Encode a query and a document for their score, by a model that reads both together."""
        pooling, tokenizer, limit = self.pooling, self._frontend.need_tokenizer(), self._limit(truncate)
        query, document = self._cut(query, limit, "query"), self._cut(document, limit, "documents")
        if pooling.answers is None:
            if instruction is not None:
                problem = "this model reads no instruction"
                raise RequestError(problem, "include it in the query, or leave it out", "instruction")
            return self._checked(
                Encoded(tuple(tokenizer.encode_whole(query, document, limit)), pooling="score"), "documents"
            )
        middle = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        ids = tokenizer.encode_segments([(_BEFORE, True), (middle, False), (_AFTER, True)])
        if limit is not None and len(ids) > limit:
            num_after = len(tokenizer.encode_segments([(_AFTER, True)]))
            if limit <= num_after:
                problem = f"truncate_prompt_tokens = {limit} leaves no room for the texts"
                raise RequestError(problem, None, "truncate_prompt_tokens")
            ids = [*ids[: limit - num_after], *ids[-num_after:]]
        return self._checked(Encoded(tuple(ids), pooling="score"), "documents")

    def score(self, vector: Sequence[float], *, activate: bool = True) -> float:
        """Return the score in the result for a pair; without `activate` the number before the sigmoid."""
        pooling = self.pooling
        value = vector[0] if pooling.answers is None else vector[1] - vector[0]
        return sigmoid(value) if activate and pooling.sigmoid else value

    def embedding(self, vector: Sequence[float], dimensions: int | None = None) -> list[float]:
        """Return an embedding, or its first `dimensions` numbers, scaled as those of the model are."""
        if dimensions is None or dimensions == len(vector):
            return list(vector)
        if not 0 < dimensions < len(vector):
            problem = f"dimensions = {dimensions}, and embeddings of this model have {len(vector)} numbers"
            raise RequestError(problem, f"give 1 to {len(vector)}, or leave it out", "dimensions")
        part = list(vector[:dimensions])
        return scaled(part) if self.pooling.normalized else part

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise RequestError for a number of dimensions that embeddings do not have."""
        if dimensions is not None:
            self.embedding((0.0,) * self._frontend.model.program.output.width, dimensions)

    def _prompt(self, name: str | None) -> str:
        settings = self._settings
        known = settings.prompts if settings else {}
        if name is None:
            default = settings.default_prompt if settings else None
            return known[default] if default is not None else ""
        if name not in known:
            hint = f"known are {', '.join(known)}" if known else "this model has none"
            raise RequestError(f"there is no prompt {name[:64]!r}", hint, "prompt_name")
        return known[name]

    def _limit(self, truncate: int | None) -> int | None:
        most = self._frontend.max_model_len
        if truncate is None:
            return None
        if truncate != -1 and not 0 < truncate <= most:
            problem = f"truncate_prompt_tokens = {truncate} is not a length"
            raise RequestError(problem, f"give 1 to {most}, or -1 for {most}", "truncate_prompt_tokens")
        return most if truncate == -1 else truncate

    def _cut(self, text: str, limit: int | None, what: str) -> str:
        """Return a text as far as it is encoded. Raises RequestError for a longer one without a limit."""
        if limit is not None:
            return text[: max(LONGEST_TEXT, limit * LONGEST_TOKEN)]
        self._frontend.check_length(text, what)
        return text

    def _checked(self, encoded: Encoded, what: str) -> Encoded:
        if len(encoded.token_ids) > self._frontend.max_model_len:
            most = self._frontend.max_model_len
            problem = f"a text has {len(encoded.token_ids)} tokens, and the model reads at most {most} tokens"
            hint = "give truncate_prompt_tokens = -1 to have it cut"
            if most < (self._frontend.model.longest or most):
                hint += ", or start the model with a greater max_num_batched_tokens"
            raise RequestError(problem, hint, what, "context_length_exceeded")
        return encoded


def pairs_of(first: str | Sequence[str], second: str | Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of one text with each of several, or of as many texts on both sides."""
    one, other = ([texts] if isinstance(texts, str) else list(texts) for texts in (first, second))
    if not one or not other or not all(isinstance(text, str) for text in (*one, *other)):
        raise RequestError("a score is that of two texts", "give texts on both sides", "text_2")
    if len(one) == 1:
        one *= len(other)
    if len(one) != len(other):
        problem = f"{len(one)} texts cannot be paired with {len(other)}"
        raise RequestError(problem, "give one text, or as many as on the other side", "text_1")
    return list(zip(one, other, strict=True))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def scaled(vector: Sequence[float]) -> list[float]:
    """Return a vector scaled to length 1; one of zeros unchanged."""
    length = math.sqrt(math.fsum(x * x for x in vector))
    return [x / length for x in vector] if length else list(vector)


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the cosine of the angle between two vectors, 0 if one of them is zeros."""
    return math.fsum(x * y for x, y in zip(scaled(a), scaled(b), strict=True))


def text_of(prompt: Any) -> Any:
    """Return the text or the token ids of a prompt."""
    if isinstance(prompt, Mapping):
        return prompt.get("prompt_token_ids", prompt.get("prompt", ()))
    return prompt
