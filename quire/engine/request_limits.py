"""The limits on a single request, checked before it is queued."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.caches import BlockGroup
from quire.errors import ContextOverflow, RequestError
from quire.types import NewRequest


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits on a single request, independent of other requests."""

    max_model_len: int
    groups: tuple[BlockGroup, ...]
    block_size: int
    num_batched_tokens: int  # maximum of a step
    vocab_size: int | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of all groups."""
        return sum(group.num_blocks for group in self.groups)

    def check(self, request: NewRequest) -> None:
        """Raise RequestError unless every sequence of the request can run to completion."""
        if request.pooling:
            self._check_pooled(request)
        if request.images:
            self._check_images(request)
        self._check_prompt(request)
        self._check_lengths(request)
        if request.resumed:
            self._check_resumed(request)

    def _check_pooled(self, request: NewRequest) -> None:
        if request.params.num_sequences > 1:
            raise RequestError("pooling gives one vector per prompt", "leave out n", "n")
        if (num_prompt := len(request.prompt_token_ids)) > self.num_batched_tokens:
            raise RequestError(
                f"the prompt has {num_prompt} tokens, but pooling computes a prompt in one step, and a step "
                f"has {self.num_batched_tokens}",
                "shorten the prompt, or start the engine with a greater max_num_batched_tokens",
                "prompt",
                "context_length_exceeded",
            )

    def _check_images(self, request: NewRequest) -> None:
        """Check that images are in order, inside the prompt, and identified in the prefix cache."""
        end = 0
        for image in request.images:
            size = image.height * image.width * 3
            if not (end <= image.first < image.end and image.rows > 0 and len(image.pixels) == size):
                raise RequestError(
                    "the images of the prompt are not in order, or have other sizes than stated"
                )
            end = image.end
            if image.whole and image.num_tokens > self.num_batched_tokens:
                raise RequestError(
                    f"an image has {image.num_tokens} tokens, but this model computes it in one step, and "
                    f"a step has {self.num_batched_tokens}",
                    "start the engine with a greater max_num_batched_tokens",
                )
        if end > len(request.prompt_token_ids):
            raise RequestError("an image is not inside the prompt")
        if {image.first for image in request.images} - {position for position, _ in request.block_keys}:
            hint = "set block_keys, which identify them in the prefix cache"
            raise RequestError("images without block_keys", hint)

    def _check_prompt(self, request: NewRequest) -> None:
        token_ids, field = request.prompt_token_ids, "input" if request.pooling else "prompt"
        if not token_ids:
            raise RequestError(f"the {field} is empty", "give at least one token", field)
        if len(token_ids) + (not request.pooling) > self.max_model_len:
            raise ContextOverflow(self.max_model_len, f"{len(token_ids)} tokens")
        self._check_token_ids(token_ids + request.predicted_token_ids, field)

    def _check_token_ids(self, token_ids: tuple[int, ...], field: str) -> None:
        limit = 1 << 32 if self.vocab_size is None else self.vocab_size
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= limit:
            wrong = low if low < 0 else high
            raise RequestError(f"token id {wrong} is not in the vocabulary (0 to {limit - 1:,})", None, field)

    def _check_resumed(self, request: NewRequest) -> None:
        """Check what another engine emitted: an open sequence that it cannot have left open is refused."""
        params, resumed = request.params, request.resumed
        opened = [emitted for emitted in resumed if emitted is not None]
        longest = self.max_model_len - len(request.prompt_token_ids)
        if params.max_tokens is not None:
            longest = min(longest, params.max_tokens)
        problem = ""
        if len(resumed) != params.num_sequences:
            problem = f"{len(resumed)} sequences are resumed, but the request has {params.num_sequences}"
        elif not opened:
            problem = "all sequences of the resumed request have ended"
        elif request.pooling and any(opened):
            problem = "a request for pooling has no tokens to be resumed from"
        elif not request.pooling and max(map(len, opened)) >= longest:
            problem = "a resumed sequence has reached its length already"
        if problem:
            raise RequestError(problem, "resume only sequences without a final output", "resumed")
        if token_ids := sum(opened, ()):
            self._check_token_ids(token_ids, "resumed")

    def _check_lengths(self, request: NewRequest) -> None:
        params, num_prompt = request.params, len(request.prompt_token_ids)
        longest = self.max_model_len
        if params.max_tokens is not None:
            longest = min(longest, num_prompt + params.max_tokens)
        num_computed = num_prompt if request.pooling else longest - 1  # the last token is never computed
        fits = [
            group.num_held(num_computed, self.block_size, self.num_batched_tokens) <= group.num_blocks
            for group in self.groups
        ]
        if not all(fits):
            num_tokens = self.block_size * min(
                group.num_blocks for group, fit in zip(self.groups, fits, strict=True) if not fit
            )
            raise RequestError(
                f"The KV cache has room for {num_tokens} tokens. However, you requested {longest} tokens "
                f"({num_prompt} in the prompt, {longest - num_prompt} in the completion). "
                "Please reduce the length of the prompt or completion.",
                None,
                "max_tokens" if num_prompt <= num_tokens else "prompt",
                "context_length_exceeded",
            )
