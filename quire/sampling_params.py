"""SamplingParams: the parameters of sampling. Names and meanings follow vLLM's offline API.

Every field states its range once, where it is declared; a value outside raises a RequestError that names
the field and the range. Standard library only: this module is loaded by `import quire`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any

from quire.errors import ConfigError, RequestError, did_you_mean

MAX_INT32 = (1 << 31) - 1
MIN_INT64, MAX_INT64 = -(1 << 63), (1 << 63) - 1
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 64, 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_BIASED_TOKENS = 4096
MAX_ALLOWED_TOKENS = 1 << 18  # that of the largest common vocabularies
MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS = 128, 256
MAX_BAD_SEQUENCES, MAX_BAD_SEQUENCE_TOKENS = 256, 1024  # a word with and without a leading space

# Takes the name and value of a field; returns the value in canonical form, or raises RequestError.
Check = Callable[[str, Any], Any]


def _shown(value: object) -> str:
    """Format `value` for an error message: short, with control characters escaped."""
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int):
        return repr(value) if abs(value) < 10**20 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, str | bytes):
        return repr(value[:40]) + ("..." if len(value) > 40 else "")
    if isinstance(value, list | tuple | dict | set | frozenset):
        return f"a {type(value).__name__} of length {len(value)}"
    return f"a value of type {type(value).__name__}"


def _refuse(name: str, where: str, expected: str, value: object) -> RequestError:
    return RequestError(f"{name}{where} must be {expected}, got {_shown(value)}", param=name)


def _is_integer(value: object) -> bool:
    """Return True for integers, NumPy's included; False for bool."""
    return type(value) is int or (not isinstance(value, bool) and isinstance(value, Integral))


def _is_number(value: object) -> bool:
    return type(value) is float or (not isinstance(value, bool) and isinstance(value, Real))


def _option(default: Any, check: Check, range: str, help: str) -> Any:
    return field(default=default, metadata={"check": check, "range": range, "help": help})


def _integer(
    default: int | None, low: int, high: int, help: str, note: str = "", optional: bool = False
) -> Any:
    """Declare an integer in [low, high], or -1 where that has a meaning; with `optional`, or None."""
    expected = f"an integer from {low:,} to {high:,}{note}" + (", or None" if optional else "")

    def check(name: str, value: Any) -> int | None:
        if value is None and optional:
            return None
        if _is_integer(value) and (low <= value <= high or (value == -1 and name in _OFF)):
            return int(value)
        raise _refuse(name, "", expected, value)

    return _option(default, check, expected, help)


def _number(default: float, low: float, high: float, help: str, above: bool = False) -> Any:
    """Declare a number in [low, high], or in (low, high] with `above`. NaN is in no range."""
    expected = f"a number above {low:g}, at most {high:g}" if above else f"a number from {low:g} to {high:g}"

    def check(name: str, value: Any) -> float:
        if _is_number(value) and low <= value <= high:
            # A tiny fraction may round to the bound itself: check again after the conversion.
            number = float(value)
            if number > low or not above:
                return number
        raise _refuse(name, "", expected, value)

    return _option(default, check, expected, help)


def _flag(default: bool, help: str) -> Any:
    def check(name: str, value: Any) -> bool:
        if value is True or value is False:
            return bool(value)
        raise _refuse(name, "", "True or False", value)

    return _option(default, check, "True or False", help)


def _strings(count: int, characters: int, help: str) -> Any:
    """Declare a string or a collection of them, kept as a tuple without duplicates."""
    expected = f"a string or a list of at most {count:,} strings of 1 to {characters:,} characters"

    def check(name: str, value: Any) -> tuple[str, ...]:
        if value is None:
            return ()
        words = [value] if isinstance(value, str) else value
        if not isinstance(words, list | tuple) or len(words) > count:
            raise _refuse(name, "", expected, value)
        for i, word in enumerate(words):
            if not isinstance(word, str) or not 0 < len(word) <= characters:
                raise _refuse(name, f"[{i}]", f"a string of 1 to {characters:,} characters", word)
        return tuple(dict.fromkeys(words))

    return _option((), check, expected, help)


def _token_id(name: str, where: str, value: Any) -> int:
    if _is_integer(value) and 0 <= value <= MAX_INT32:
        return int(value)
    raise _refuse(name, where, f"a token id from 0 to {MAX_INT32:,}", value)


def _token_ids(default: tuple[int, ...] | None, count: int, help: str) -> Any:
    """Declare token ids, kept as a tuple without duplicates. If None is the default, () is an error."""
    low = 1 if default is None else 0
    expected = f"a list of {low} to {count:,} token ids, or None"

    def check(name: str, value: Any) -> tuple[int, ...] | None:
        if value is None:
            return default
        if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
            raise _refuse(name, "", expected, value)
        if not low <= len(value) <= count:
            raise _refuse(name, "", expected, value)
        return tuple(dict.fromkeys(_token_id(name, f"[{i}]", v) for i, v in enumerate(value)))

    return _option(default, check, expected, help)


MAX_GRAMMAR_CHARACTERS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """A constraint on the output: exactly one of these fields. Raises RequestError.

    `json`: a JSON schema, as a dictionary, as text, or True (any JSON). `json_object`: any JSON object.
    `regex`: an expression that the whole output matches. `choice`: one of these texts. `grammar`: Lark in
    llguidance's syntax, GBNF, or llguidance's own JSON, {"grammars": [...]}.
    """

    json: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}
        if len(given) != 1:
            known = ", ".join(f.name for f in fields(self))
            problem = f"structured_outputs must have exactly one of {known}, got {len(given)}"
            raise RequestError(problem, param="structured_outputs")
        ((name, value),) = given.items()
        wanted, right = _STRUCTURES[name]
        if not right(value):
            raise _refuse("structured_outputs", f".{name}", wanted, value)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StructuredOutputsParams:
        """Build from a dictionary; an unknown name is a RequestError that suggests the nearest one."""
        for name in values:
            if name not in _STRUCTURES:
                near = did_you_mean(str(name)[:64], _STRUCTURES) or f"known are {', '.join(_STRUCTURES)}"
                problem = f"structured_outputs has no {_shown(name)}"
                raise RequestError(problem, near, "structured_outputs")
        return cls(**values)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_GRAMMAR_CHARACTERS


def _is_choice(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(map(_is_text, value))


_TEXT = f"text of 1 to {MAX_GRAMMAR_CHARACTERS:,} characters"
_STRUCTURES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "json": ("a JSON schema: a dictionary, text, or True", lambda v: v is True or isinstance(v, dict | str)),
    "regex": (_TEXT, _is_text),
    "choice": (f"a list of texts of 1 to {MAX_GRAMMAR_CHARACTERS:,} characters", _is_choice),
    "grammar": (_TEXT, _is_text),
    "json_object": ("True", lambda v: v is True),
}


_STRUCTURED = "StructuredOutputsParams, a dictionary of its fields, or None"


def _check_structured(name: str, value: Any) -> StructuredOutputsParams | None:
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if isinstance(value, Mapping):
        return StructuredOutputsParams.from_dict(value)
    raise _refuse(name, "", _STRUCTURED, value)


_SEQUENCES = f"a list of at most {MAX_BAD_SEQUENCES} lists of 1 to {MAX_BAD_SEQUENCE_TOKENS:,} token ids"


def _check_sequences(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list | tuple) or len(value) > MAX_BAD_SEQUENCES:
        raise _refuse(name, "", _SEQUENCES, value)
    for i, ids in enumerate(value):
        if not isinstance(ids, list | tuple) or not 0 < len(ids) <= MAX_BAD_SEQUENCE_TOKENS:
            raise _refuse(name, f"[{i}]", f"a list of 1 to {MAX_BAD_SEQUENCE_TOKENS:,} token ids", ids)
    return tuple(tuple(_token_id(name, f"[{i}]", v) for v in ids) for i, ids in enumerate(value))


_BIASES = f"a dictionary of at most {MAX_BIASED_TOKENS:,} token ids and numbers from -100 to 100"


def _check_biases(name: str, value: Any) -> dict[int, float]:
    """Check logit biases. Keys may be strings of digits, as in JSON."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or len(value) > MAX_BIASED_TOKENS:
        raise _refuse(name, "", _BIASES, value)
    biases: dict[int, float] = {}
    for key, bias in value.items():
        digits = isinstance(key, str) and len(key) <= 10 and key.isascii() and key.isdigit()
        token_id = _token_id(name, " key", int(key) if digits else key)
        if not (_is_number(bias) and -100 <= bias <= 100):
            raise _refuse(name, f"[{token_id}]", "a number from -100 to 100", bias)
        if token_id in biases:
            raise RequestError(f"{name} gives token id {token_id} more than once", param=name)
        biases[token_id] = float(bias)
    return biases


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request: how its tokens are chosen, and when it ends.

    Raises RequestError, with `param` naming the field, for values out of range and for fields that contradict
    each other. Fields may be assigned later, as scripts for vLLM do, and are checked then; a request keeps a
    copy. Values are normalized: a single stop string becomes a tuple, `top_k` -1 becomes 0, an integer for a
    float field becomes a float. docs/sampling.md describes the order in which the fields apply.
    """

    n: int = _integer(1, 1, MAX_CHOICES, "choices generated from one prompt")
    temperature: float = _number(1.0, 0, 2, "logits are divided by it; 0 always takes the most likely token")
    top_p: float = _number(1.0, 0, 1, "keep the most likely tokens that reach this probability", above=True)
    top_k: int = _integer(0, -1, MAX_INT32, "keep this many most likely tokens", note=" (0 and -1: all)")
    min_p: float = _number(0.0, 0, 1, "keep tokens at least this probable relative to the most likely one")
    max_tokens: int | None = _integer(
        16, 1, MAX_INT32, "tokens generated at most; None: up to max_model_len", " (-1: None)", optional=True
    )
    min_tokens: int = _integer(0, 0, MAX_INT32, "tokens generated before an end or stop token may be")
    stop: str | Sequence[str] = _strings(MAX_STOP_STRINGS, MAX_STOP_CHARACTERS, "texts that end the output")
    stop_token_ids: Sequence[int] = _token_ids((), MAX_STOP_TOKEN_IDS, "token ids that end the output")
    ignore_eos: bool = _flag(False, "go on after the model's own end token")
    seed: int | None = _integer(
        None, MIN_INT64, MAX_INT64, "of the random draws; -1 and None: the engine's", optional=True
    )
    logprobs: int | None = _integer(
        None, -1, MAX_LOGPROBS, "likeliest tokens to report at each output position", " (-1: all)", True
    )
    prompt_logprobs: int | None = _integer(
        None, -1, MAX_LOGPROBS, "likeliest tokens to report at each prompt position", " (-1: all)", True
    )
    presence_penalty: float = _number(0.0, -2, 2, "subtracted from logits of tokens in the output")
    frequency_penalty: float = _number(0.0, -2, 2, "subtracted for each time a token is in the output")
    repetition_penalty: float = _number(1.0, 0, 2, "divides the logits of tokens in the text", above=True)
    logit_bias: dict[int, float] = field(
        default_factory=dict,
        metadata={"check": _check_biases, "range": _BIASES, "help": "added to the logits of these tokens"},
    )
    allowed_token_ids: Sequence[int] | None = _token_ids(None, MAX_ALLOWED_TOKENS, "no others are chosen")
    bad_words: Sequence[str] = _strings(MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS, "texts never completed")
    bad_words_token_ids: Sequence[Sequence[int]] = _option(
        (), _check_sequences, _SEQUENCES, "sequences never completed; filled from bad_words by the tokenizer"
    )
    structured_outputs: StructuredOutputsParams | None = field(
        default=None,
        metadata={"check": _check_structured, "range": _STRUCTURED, "help": "what the output must be"},
    )
    include_stop_str_in_output: bool = _flag(False, "keep the stop string at the end of the text")
    skip_special_tokens: bool = _flag(True, "leave special tokens out of the text")
    detokenize: bool = _flag(True, "turn token ids into text")

    def __new__(cls, **values: Any) -> SamplingParams:
        if not values.keys() <= _CHECKS.keys():
            _refuse_unknown(values)
        return object.__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _CHECKS:
            default, check = _CHECKS[name]
            value = value if value is default else check(name, value)
            if value == -1 and name in _OFF:
                value = _OFF[name]
        object.__setattr__(self, name, value)

    def __post_init__(self) -> None:
        """Check constraints between fields."""
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refuse("min_tokens", "", f"at most max_tokens = {self.max_tokens:,}", self.min_tokens)
        if self.stop and not self.detokenize:
            raise RequestError("stop needs the text: it must be empty when detokenize is False", param="stop")
        if self.structured_outputs is not None and self.ignore_eos:
            problem = "ignore_eos must be False with structured_outputs: a structure has an end"
            raise RequestError(problem, param="ignore_eos")

    @property
    def num_sequences(self) -> int:
        """Number of sequences to compute: one if temperature is 0, since all `n` would be bitwise equal."""
        return 1 if self.temperature == 0 else self.n

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
    ) -> SamplingParams:
        """Build from a request's `values` over the model's `defaults` (see default_sampling_params).

        A value of None means "not given", as in the JSON of clients. An unknown name is a RequestError that
        suggests the nearest one.
        """
        given = dict(defaults or {})
        given.update((name, value) for name, value in values.items() if value is not None)
        if not given.keys() <= _CHECKS.keys():
            _refuse_unknown(given)  # here too: a name that is not a string cannot be a keyword
        return cls(**given)

    def clone(self) -> SamplingParams:
        """Return an independent copy."""
        return replace(self)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise RequestError for a token id outside the vocabulary of `vocab_size` tokens."""
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            self._check_ids(name, getattr(self, name) or (), vocab_size)
        for ids in self.bad_words_token_ids:
            self._check_ids("bad_words_token_ids", ids, vocab_size)

    def _check_ids(self, name: str, ids: Collection[int], vocab_size: int) -> None:
        if ids and max(ids) >= vocab_size:
            raise _refuse(name, "", f"token ids from 0 to {vocab_size - 1:,} for this model", max(ids))


_CHECKS: dict[str, tuple[Any, Check]] = {
    f.name: (f.default, f.metadata["check"]) for f in fields(SamplingParams)
}
_OFF = {"top_k": 0, "seed": None, "max_tokens": None}  # the meaning of -1
_NAMES = tuple(_CHECKS)


def _refuse_unknown(values: Mapping[str, Any]) -> None:
    """Raise RequestError for the first unknown field name, suggesting the closest known one."""
    name = next(name for name in values if name not in _CHECKS)
    near = did_you_mean(str(name)[:64], _NAMES) or f"known names: {', '.join(_NAMES)}"
    raise RequestError(f"unknown sampling parameter {_shown(name)}", near, param=str(name)[:64])


# Names in generation_config.json and the fields they set.
_GENERATION_CONFIG = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def default_sampling_params(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields set by a model's generation_config.json, for SamplingParams(**...) and `from_dict`.

    As in vLLM, `do_sample` is ignored: a file without a temperature means 1, not greedy. Raises ConfigError
    if the file has a value that would be invalid in a request.
    """
    defaults = {
        name: generation_config[source]
        for source, name in _GENERATION_CONFIG.items()
        if generation_config.get(source) is not None
    }
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        hint = "correct the file, or remove the entry from it"
        raise ConfigError(f"generation_config.json: {error.message}", hint) from error
    return defaults
