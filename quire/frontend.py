"""Frontend: the text side of an engine. Prompts become requests, outputs become text.

It needs a model's folder and none of its weights, so it can live in another process than the engine.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.errors import RequestError
from quire.models import Model
from quire.outputs import CompletionOutput, Logprob, Logprobs, RequestOutput
from quire.sampling_params import SamplingParams, default_sampling_params
from quire.text.chat import ChatTemplate
from quire.text.detokenize import Detokenizer
from quire.text.stop import StopStrings
from quire.text.tokenizer import Tokenizer, find_tokenizer
from quire.types import NewRequest, Output, PositionLogprobs
from quire.weights.folder import ModelFolder

_LOG = logging.getLogger(__name__)
UNTRUSTED = (
    "%r in a prompt is taken as plain text. Use chat() for conversations; for a text that you made by a chat "
    "template yourself, give {'prompt': text, 'trusted': True}."
)

Prompt = str | Sequence[int] | Mapping[str, Any]


class Frontend:
    """Tokenizer, chat template and defaults of one model.

    A request without a seed gets one from the engine's `seed` and the request's number, so a program
    that asks the same in the same order gets the same.
    """

    def __init__(self, folder: ModelFolder, model: Model, *, max_model_len: int, seed: int) -> None:
        generation = folder.generation_config()
        self.model = model
        self.max_model_len = max_model_len
        self.tokenizer = find_tokenizer(folder.path)
        tokens = self.tokenizer.special_tokens if self.tokenizer else {}
        self.chat_template = ChatTemplate.from_folder(folder.path, tokens)
        self.default_params = default_sampling_params(generation)
        self.eos_token_ids = self._find_eos(generation)
        self._seed = seed
        self._num_requests = 0
        self._warned = False

    def _find_eos(self, generation: Mapping[str, Any]) -> tuple[int, ...]:
        """End tokens: of generation_config.json, else config.json, and the tokenizer's own."""
        stated = generation.get("eos_token_id", self.model.config.get("eos_token_id"))
        ids = stated if isinstance(stated, list) else [stated]
        if self.tokenizer:
            ids = [*ids, self.tokenizer.eos_token_id]
        return tuple(dict.fromkeys(i for i in ids if isinstance(i, int)))

    def need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            hint = "give token ids and detokenize=False, or put tokenizer.json into the model's folder"
            raise RequestError("this model has no tokenizer", hint, "prompt")
        return self.tokenizer

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """A prompt as (text or None, token ids): text, ids, {"prompt": ...} or {"prompt_token_ids": ...}.

        What reads like a control token in a text is text. A caller who wrote the text himself, with
        `apply_chat_template` say, and wants control tokens made of it gives {"prompt": ..., "trusted": True}.
        """
        if isinstance(prompt, str):
            return prompt, self._encode_text(prompt, trusted=False)
        if not isinstance(prompt, Mapping):
            return None, _token_ids(prompt)
        text = prompt.get("prompt")
        if "prompt_token_ids" in prompt:
            return text, _token_ids(prompt["prompt_token_ids"])
        if not isinstance(text, str):
            hint = "give {'prompt': text} or {'prompt_token_ids': [...]}"
            raise RequestError("the prompt has neither text nor token ids", hint, "prompt")
        return text, self._encode_text(text, trusted=prompt.get("trusted") is True)

    def _encode_text(self, text: str, trusted: bool) -> list[int]:
        tokenizer = self.need_tokenizer()
        if not trusted and not self._warned and (found := tokenizer.control_token_in(text)):
            self._warned = True
            _LOG.warning(UNTRUSTED, found)
        return tokenizer.encode(text, parse_special=trusted)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[int]]:
        """A conversation as (rendered text, token ids). Text of users never becomes control tokens."""
        tokenizer = self.need_tokenizer()
        rendered = self.chat_template.render(messages, tools, add_generation_prompt, chat_template_kwargs)
        return rendered.text, tokenizer.encode_segments(rendered.segments)

    def request(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        arrival_s: float,
        tenant: str = "",
        priority: int = 0,
        cache_salt: str = "",
    ) -> NewRequest:
        """Complete what a caller asked: seed, bad words as token ids, rope variant."""
        params = self._complete(params)
        params.check_vocabulary(self.model.config.vocab_size)
        limit = self.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(token_ids) + params.max_tokens)
        return NewRequest(
            request_id=request_id,
            prompt_token_ids=tuple(token_ids),
            params=params,
            arrival_s=arrival_s,
            tenant=tenant,
            priority=priority,
            cache_salt=cache_salt,
            eos_token_ids=self.eos_token_ids,
            context_variant=self.model.context_variant(limit),
        )

    def _complete(self, params: SamplingParams) -> SamplingParams:
        self._num_requests += 1
        changes: dict[str, Any] = {}
        if params.seed is None:
            number = f"{self._seed} {self._num_requests}".encode()
            digest = hashlib.blake2b(number, digest_size=8).digest()
            changes["seed"] = int.from_bytes(digest, "little", signed=True)
        if params.detokenize:
            self.need_tokenizer()
        if params.bad_words:
            encode = self.need_tokenizer().encode
            words = [w for word in params.bad_words for w in (word.lstrip(), " " + word.lstrip())]
            found = (tuple(encode(word, add_special_tokens=False)) for word in words)
            sequences = dict.fromkeys(ids for ids in found if ids)
            changes["bad_words_token_ids"] = (*params.bad_words_token_ids, *sequences)
        return replace(params, **changes)  # a copy: the caller may go on changing its own

    def read(self, request: NewRequest, prompt: str | None) -> RequestReader:
        """What turns this request's outputs into text."""
        return RequestReader(request, prompt, self.tokenizer)


def _token_ids(ids: Any) -> list[int]:
    ids = list(ids) if isinstance(ids, Sequence) and not isinstance(ids, str | bytes) else None
    if ids is None or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise RequestError("a prompt is text or a list of token ids (whole numbers)", None, "prompt")
    return ids


class RequestReader:
    """Follows one request: engine outputs in, a RequestOutput kept up to date.

    `advanced` is set when something is new, for whoever waits for it to clear.
    """

    def __init__(self, request: NewRequest, prompt: str | None, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.advanced = False
        self._tokenizer = tokenizer
        self._choices = [_ChoiceReader(request, i, tokenizer) for i in range(request.params.n)]
        self.output = RequestOutput(
            request.request_id, prompt, list(request.prompt_token_ids), [c.output for c in self._choices]
        )

    def push(self, output: Output) -> bool:
        """Take an output of one choice in. True when its text met a stop string: abort the choice then."""
        self.advanced = True
        if output.prompt_logprobs and self.output.prompt_logprobs is None:
            named = (_named(position, self._tokenizer) for position in output.prompt_logprobs)
            self.output.prompt_logprobs = [None, *named]
        self.output.num_cached_tokens = max(self.output.num_cached_tokens, output.num_cached_tokens)
        stopped = self._choices[output.choice].push(output)
        if output.finish_reason is not None:
            self.output.finished = all(c.output.finish_reason for c in self._choices)
            self.output.metrics = output.metrics
        return stopped

    def take_deltas(self) -> None:
        """Set every choice's delta to the text that came since this was last called."""
        for choice in self._choices:
            choice.output.delta = choice.output.text[choice.taken :]
            choice.taken = len(choice.output.text)


class _ChoiceReader:
    """One choice: its tokens to text, up to a stop string. It ends with the engine's final output."""

    def __init__(self, request: NewRequest, index: int, tokenizer: Tokenizer | None) -> None:
        self.params = request.params
        self.output = CompletionOutput(index)
        self.taken = 0  # characters that deltas have given
        self._tokenizer = tokenizer
        self._text: Detokenizer | None = None
        if tokenizer is not None and self.params.detokenize:
            skip = self.params.skip_special_tokens
            self._text = Detokenizer(tokenizer, request.prompt_token_ids, skip)
        self._stops = StopStrings(self.params.stop, self.params.include_stop_str_in_output)
        if self.params.logprobs is not None:
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0

    def push(self, output: Output) -> bool:
        """Token by token, so that a stop string cuts the tokens where it is completed."""
        hidden = output.finish_reason == "stop" and not self.params.include_stop_str_in_output
        for number, token_id in enumerate(output.token_ids):
            if self._stops.matched is not None:
                break
            self.output.token_ids.append(token_id)
            if output.logprobs:
                self._take_logprobs(output.logprobs[number])
            if not (hidden and number == len(output.token_ids) - 1):
                self._show(self._text.push((token_id,)) if self._text else "")
        if output.finish_reason is not None:
            self._finish(output)
            return False
        return self._stops.matched is not None

    def _show(self, text: str) -> None:
        early = len(self.output.token_ids) <= self.params.min_tokens
        shown, _ = self._stops.push(text, ignore=early)
        self.output.text += shown

    def _finish(self, output: Output) -> None:
        if self._text is not None:
            self._show(self._text.finish())
        stop = self._stops.matched
        if stop is None:
            self.output.text += self._stops.flush()
        self.output.finish_reason = output.finish_reason if stop is None else "stop"
        self.output.stop_reason = output.stop_reason if stop is None else stop
        self.output.error = output.error
        self.output.metrics = output.metrics

    def _take_logprobs(self, position: PositionLogprobs) -> None:
        if self.output.logprobs is not None and self.output.cumulative_logprob is not None:
            self.output.logprobs.append(_named(position, self._tokenizer))
            self.output.cumulative_logprob += position[0].logprob


def _named(position: PositionLogprobs, tokenizer: Tokenizer | None) -> Logprobs:
    """Token id -> Logprob; the chosen token first."""
    text = tokenizer.token_text if tokenizer else lambda token_id: None
    return {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id)) for entry in position}
