"""Frontend: the text side of an engine. It turns prompts into requests, and outputs into text.

It needs a model's small files and none of its weights, so it can run in another process than the engine.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from typing import Any

from quire.environment import user_path
from quire.errors import ConfigError, ContextOverflow, RequestError, did_you_mean
from quire.grammar.compiler import GrammarCompiler
from quire.images.marks import Marks
from quire.images.prompt import NO_IMAGES, SEEING, Around, PromptImages, Source, given, take_images
from quire.images.work import EncodingWork
from quire.models.model import Model
from quire.models.purpose import check_task
from quire.sampling_params import SamplingParams, default_sampling_params
from quire.text.chat_template import MAX_CHARACTERS, ChatTemplate, LongConversation, PromptText
from quire.text.end_tokens import end_tokens
from quire.text.infill import Gap, Infill
from quire.text.renderer import Segment
from quire.text.tokenizer import Tokenizer, find_tokenizer
from quire.types import NewRequest, PromptImage
from quire.weights.source import ModelSource

_LOG = logging.getLogger(__name__)
UNTRUSTED = (
    "%r in a prompt is taken as plain text. Use chat() for conversations; for a text that you made by a chat "
    "template yourself, give {'prompt': text, 'trusted': True}."
)

MAX_LOGPROB_ENTRIES = 1 << 22  # maximum of one request with logprobs=-1: about half a GB
LONGEST_TOKEN = 256  # characters, in common vocabularies
CHARACTERS_PER_TOKEN = 4  # of prose, about
LONGEST_TEXT = 2 << 20  # characters of one that is counted or cut: each takes up to 250 bytes of memory
_PROMPT_KEYS = (
    "prompt",
    "prompt_token_ids",
    "trusted",
    "cache_salt",
    "tenant",
    "priority",
    "prediction",
    "multi_modal_data",
)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt as token ids, its text, and the caller's options for it.

    `predicted_token_ids` are what the caller expects of the answer. `pooling` asks for a vector instead.
    """

    token_ids: tuple[int, ...]
    text: str | None = None
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    report_drafting: bool = False
    predicted_token_ids: tuple[int, ...] = ()
    adapter: str = ""  # NewRequest.adapter
    pooling: str = ""
    images: tuple[PromptImage, ...] = ()
    block_keys: tuple[tuple[int, bytes], ...] = ()


Prompt = str | Sequence[int] | Mapping[str, Any] | Encoded


class Frontend:
    """Tokenizer, chat template and defaults of one model.

    `max_model_len` is the context a request has; `longest_context` what it would have with enough memory,
    which decides its rope frequencies. A request without a seed gets one from the engine's `seed` and the
    number of the request, so a program that sends the same requests in the same order gets the same answers.
    Of a model that sees, prompts have at most `max_images`, among them files in the folder `media`.
    """

    def __init__(
        self,
        source: ModelSource,
        model: Model,
        *,
        max_model_len: int,
        longest_context: int,
        seed: int,
        max_images: int = 0,
        media: str | None = None,
    ) -> None:
        generation = source.generation_config()
        self.model = model
        self.sentence_settings = source.sentence_settings() if model.embeds else None
        self.max_model_len = max_model_len
        self.longest_context = longest_context
        self.tokenizer = find_tokenizer(source)
        tokens = self.tokenizer.special_tokens if self.tokenizer else {}
        self.chat_template = ChatTemplate(source.chat_templates(), tokens)
        if self.tokenizer:
            self._check_tokenizer(self.tokenizer)
            self.tokenizer.chat_template = self.chat_template
        self.infill = Infill.of(self.tokenizer, model.config.vocab_size) if self.tokenizer else None
        names = self.tokenizer.control_tokens if self.tokenizer else {}
        self.grammars = GrammarCompiler(model.config.vocab_size, names)
        self.images: PromptImages | None = None
        if (vision := model.vision) is not None and max_images:
            allowed = None if media is None else user_path(media)
            work = EncodingWork(vision, model.program).of
            ends = vision.row_ends and self._token_ids(vision.row_ends)
            self.images = PromptImages(
                vision.patching,
                vision.token,
                max_images,
                allowed,
                vision.whole,
                ends,
                None if vision.marks is None else self._around(vision.marks),
                work=work,
            )
        self.default_params = default_sampling_params(generation)
        stated = generation.get("eos_token_id"), model.config.get("eos_token_id")
        self.eos_token_ids = end_tokens(*stated, self.tokenizer, model.config.vocab_size)
        self._seed = seed
        self._num_requests = 0
        self._warned = False

    def _token_ids(self, names: tuple[str, str]) -> tuple[int, int]:
        """Return the ids of tokens that images need. Raises ConfigError if the tokenizer lacks one."""
        first, second = (self.tokenizer.token_id(name) if self.tokenizer else None for name in names)
        if first is None or second is None:
            problem = f"tokenizer.json: no token {names[first is not None]}, which ends rows of images"
            raise ConfigError(problem, "does it belong to another model? max_images=0 reads text alone")
        return first, second

    def _around(self, marks: Marks) -> Around:
        """Return what encodes the text around parts of images. Raises ConfigError without a token for it."""
        tokenizer = self.tokenizer
        if tokenizer is None or tokenizer.token_id(marks.end) is None:
            problem = f"tokenizer.json: no token {marks.end}, which ends images"
            raise ConfigError(problem, "does it belong to another model? max_images=0 reads text alone")
        encode = partial(tokenizer.encode, add_special_tokens=False, parse_special=True)
        return lambda *numbers: [encode(text) for text in marks.around(*numbers)]

    @property
    def sees(self) -> bool:
        """True if prompts may have images."""
        return self.images is not None

    def _check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuse a tokenizer that adds a token to every text that is not in the model's vocabulary."""
        highest, vocab_size = max(tokenizer.encode(""), default=0), self.model.config.vocab_size
        if highest >= vocab_size:
            problem = f"every text has token {highest:,}, but the model has {vocab_size:,} tokens"
            raise ConfigError(f"tokenizer.json: {problem}", "does it belong to another model?")

    def need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            hint = "give token ids and detokenize=False, or put tokenizer.json into the model's folder"
            raise RequestError("this model has no tokenizer", hint, "prompt")
        return self.tokenizer

    def encode(self, prompt: Prompt) -> Encoded:
        """Encode a prompt: text, ids, {"prompt": ...} or {"prompt_token_ids": ...}.

        Text that looks like a control token stays text. Control tokens are recognized only in the output of
        the tokenizer's `apply_chat_template` and in text that the caller trusts: {"prompt": ..., "trusted":
        True}. A dict may also have "cache_salt", "tenant", "priority" and "prediction", the text that is
        expected of the answer. With "multi_modal_data": {"image": [...]}, a trusted text has the token of the
        model for an image once in place of each.
        """
        if isinstance(prompt, Encoded):
            return prompt
        if isinstance(prompt, PromptText):
            return Encoded(tuple(self.need_tokenizer().encode_segments(prompt.segments)), prompt)
        if isinstance(prompt, str):
            return Encoded(self._encode_text(prompt, trusted=False), prompt)
        if not isinstance(prompt, Mapping):
            return Encoded(token_ids_of(prompt))
        if unknown := [key for key in prompt if key not in _PROMPT_KEYS]:
            near = did_you_mean(str(unknown[0]), _PROMPT_KEYS) or f"known are {', '.join(_PROMPT_KEYS)}"
            raise RequestError(f"unknown prompt field {str(unknown[0])[:64]!r}", near, "prompt")
        return self._encode_mapping(prompt)

    def _encode_mapping(self, prompt: Mapping[str, Any]) -> Encoded:
        prompt = {key: value for key, value in prompt.items() if value is not None}  # None: not given
        text = prompt.get("prompt")
        if "prompt_token_ids" in prompt:
            token_ids = token_ids_of(prompt["prompt_token_ids"])
        elif isinstance(text, str):
            token_ids = self._encode_text(text, trusted=prompt.get("trusted") is True)
        else:
            hint = "give {'prompt': text} or {'prompt_token_ids': [...]}"
            raise RequestError("the prompt has neither text nor token ids", hint, "prompt")
        said = {key: prompt[key] for key in ("priority", "tenant", "cache_salt") if key in prompt}
        predicted = self.encode_prediction(prompt["prediction"]) if "prediction" in prompt else ()
        sources = given(data) if (data := prompt.get("multi_modal_data")) else ()
        return self._with_images(Encoded(token_ids, text, predicted_token_ids=predicted, **said), sources)

    def _with_images(self, prompt: Encoded, sources: Sequence[Source]) -> Encoded:
        """Return a prompt with the tokens of its images."""
        if not sources:
            return prompt
        if self.images is None:
            raise self._blind(sources)
        token_ids, images, keys = self.images.place(prompt.token_ids, sources)
        return replace(prompt, token_ids=token_ids, images=images, block_keys=keys)

    def encode_prediction(self, text: str) -> tuple[int, ...]:
        """Encode the text that a caller expects of an answer, which may be as long as the context."""
        if not isinstance(text, str):
            raise RequestError("prediction must be text", None, "prediction")
        if len(text) > self.max_model_len * LONGEST_TOKEN:
            raise self._long_prediction(f"more than {len(text) // LONGEST_TOKEN:,}")
        ids = tuple(self.need_tokenizer().encode(text, add_special_tokens=False))
        if len(ids) > self.max_model_len:
            raise self._long_prediction(f"{len(ids):,}")
        return ids

    def _long_prediction(self, size: str) -> RequestError:
        problem = f"prediction has {size} tokens, and no answer more than {self.max_model_len:,}"
        return RequestError(problem, "send the part that is expected next, or no prediction", "prediction")

    def check_length(self, text: str, what: str = "prompt") -> None:
        """Refuse early a text too long for the context however it is tokenized. `what` names the field."""
        if len(text) > self.max_model_len * LONGEST_TOKEN:
            num_tokens = -(-len(text) // LONGEST_TOKEN)
            raise ContextOverflow(self.max_model_len, f"at least {num_tokens} tokens", what)

    def _encode_text(self, text: str, trusted: bool) -> tuple[int, ...]:
        tokenizer = self.need_tokenizer()
        self.check_length(text)
        if not trusted and not self._warned and (found := tokenizer.control_token_in(text)):
            self._warned = True
            _LOG.warning(UNTRUSTED, found)
        ids = tokenizer.encode(text, parse_special=trusted)
        if trusted and ids[:2] == [tokenizer.bos_token_id] * 2:  # the text already began with one
            ids = ids[1:]
        return tuple(ids)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> Encoded:
        """Encode a conversation. User text never becomes control tokens. Parts of messages may be images."""
        check_task(self.model.pooling, "")
        tokenizer = self.need_tokenizer()
        messages, sources = take_images(messages)
        if sources and self.images is None:
            raise self._blind(sources)
        try:
            rendered = self.chat_template.render(
                messages,
                tools,
                add_generation_prompt,
                chat_template_kwargs,
                continue_final_message=continue_final_message,
            )
        except LongConversation:
            size = f"about {MAX_CHARACTERS // CHARACTERS_PER_TOKEN} tokens or more"
            raise ContextOverflow(self.max_model_len, size, "messages") from None
        self.check_length(rendered.text, "messages")
        ids = tokenizer.encode_segments(self._written(rendered.segments))
        return self._with_images(Encoded(tuple(ids), rendered.text), sources)

    def encode_infill(self, gap: Gap, room: int | None = None) -> Encoded:
        """Encode the texts around a gap; with `room`, cut to so many tokens, as `Infill.encode` does it.

        Raises RequestError if the model has no tokens for it.
        """
        if self.infill is None:
            hint = "take one with tokens such as <|fim_prefix|>, like Qwen2.5-Coder"
            problem = "suffix is not supported: this model does not fill in text between two others"
            raise RequestError(problem, hint, "suffix", "unsupported_parameter")
        if room is not None:  # what surely does not fit is not encoded
            most = room * LONGEST_TOKEN
            long = (number for number, other in enumerate(gap.files, 1) if len(other.text) > most)
            files = gap.files[max(long, default=0) :]
            gap = replace(gap, prefix=gap.prefix[-most:], suffix=gap.suffix[:most], files=files)
        for text in (gap.prefix, gap.suffix, gap.begun):
            self.check_length(text)
        return Encoded(tuple(self.infill.encode(gap, room)))

    def _blind(self, sources: Sequence[Source]) -> RequestError:
        where = sources[0].where
        return RequestError(f"{where}: {NO_IMAGES}", SEEING, where)

    def _written(self, segments: Sequence[Segment]) -> Iterable[Segment]:
        """Return the text of a template with what the model's own processor writes for each image."""
        if self.model.vision is None or (written := self.model.vision.written) is None:
            return segments
        return [own._replace(text=own.text.replace(*written)) if own.trusted else own for own in segments]

    def request(
        self, prompt: Encoded, params: SamplingParams, *, request_id: str, arrival_s: float
    ) -> NewRequest:
        """Build a request: add the seed, bad words as token ids, rope variant and grammar."""
        check_task(self.model.pooling, prompt.pooling)
        _check_types(prompt)
        params, grammar = self._complete(params), self._grammar(params)
        vocab_size, num_prompt = self.model.config.vocab_size, len(prompt.token_ids)
        params.check_vocabulary(vocab_size)
        limit = num_prompt if prompt.pooling else self.longest_context
        if params.max_tokens is not None:
            limit = min(limit, num_prompt + params.max_tokens)
        if -1 in (params.logprobs, params.prompt_logprobs) and limit * vocab_size > MAX_LOGPROB_ENTRIES:
            problem = f"logprobs of all {vocab_size:,} tokens at up to {limit:,} positions are too many"
            raise RequestError(problem, "ask for at most 20, or lower max_tokens", "logprobs")
        return NewRequest(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            params=params,
            arrival_s=arrival_s,
            tenant=prompt.tenant,
            priority=prompt.priority,
            cache_salt=prompt.cache_salt,
            eos_token_ids=self.eos_token_ids,
            context_variant=self.model.context_variant(limit),
            grammar=grammar,
            predicted_token_ids=prompt.predicted_token_ids,
            report_drafting=prompt.report_drafting,
            adapter=prompt.adapter,
            pooling=prompt.pooling,
            images=prompt.images,
            block_keys=prompt.block_keys,
        )

    def _complete(self, params: SamplingParams) -> SamplingParams:
        self._num_requests += 1
        changes: dict[str, Any] = {"structured_outputs": None}  # replaced by the request's grammar
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
        return replace(params, **changes)  # a copy: the caller may keep changing its own

    def _grammar(self, params: SamplingParams) -> str:
        """Return the grammar that the output must match; "" for none."""
        if params.structured_outputs is None:
            return ""
        replace(params)  # validate again: fields may have been assigned since
        self.need_tokenizer()
        if not any(token_id < self.model.config.vocab_size for token_id in self.eos_token_ids):
            problem = "this model has no end token, so a structured output could not end"
            raise RequestError(problem, None, "structured_outputs")
        return self.grammars.compile(params.structured_outputs)

    def close(self) -> None:
        """Stop the processes that render chat templates, compile grammars and decode images."""
        if self.images is not None:
            self.images.close()
        self.chat_template.close()
        self.grammars.close()


def _check_types(prompt: Encoded) -> None:
    """Raise RequestError for a field of another type: comparing it to others' would fail in the engine."""
    for name, kind in (("priority", Integral), ("tenant", str), ("cache_salt", str)):
        value: Any = getattr(prompt, name)
        if isinstance(value, bool) or not isinstance(value, kind):
            raise RequestError(f"{name} = {value!r:.40} is of the wrong type", None, name)


def token_ids_of(ids: Any) -> tuple[int, ...]:
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise RequestError("a prompt is text or a list of token ids", None, "prompt")
    if not all(isinstance(i, Integral) and not isinstance(i, bool) for i in ids):
        raise RequestError("the token ids of a prompt must be integers", None, "prompt")
    return tuple(map(int, ids))
