"""ModelConfig: a checkpoint's config.json, with normalized names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import ConfigError, quoted
from quire.program.rope import THETA, Rope, rope_from_config

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
# Far above any model. The total number of tensors is bounded when a program is recorded.
MAX_LAYERS, MAX_EXPERTS, MAX_HEAD_DIM, MAX_KERNEL = 1 << 10, 1 << 12, 1 << 12, 64
_LARGE, _SMALL = 1e6, 1e-6  # beyond any plausible factor, and well within float32

# Aliases of field names, which take precedence: the attribute maps of transformers.
SYNONYMS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "num_experts": "num_local_experts",
    "num_local_experts": "num_experts",
}


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of config.json that a family defines, each with its value or the family's default.

    A field that the family does not define is absent, even if config.json has it.
    """

    values: Mapping[str, Any]

    def get(self, name: str) -> Any:
        """Return a field unchanged, None if absent or null."""
        return self.values.get(name)

    def size(self, name: str, most: int = (1 << 31) - 1) -> int:
        """Return a positive integer. Raises ConfigError for anything else."""
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            problem = "is missing" if value is None else f"= {quoted(value)} is not a size"
            raise ConfigError(f"config.json: {name} {problem}", "is this a decoder-only language model?")
        return value

    def optional_size(self, name: str) -> int | None:
        """Return a positive integer, or None if absent or null."""
        return None if self.values.get(name) is None else self.size(name)

    def number(self, name: str, low: float = -_LARGE, high: float = _LARGE) -> float:
        """Return a number from `low` to `high`."""
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            problem = f"{name} = {quoted(value)} is not a number from {low:g} to {high:g}"
            raise ConfigError(f"config.json: {problem}")
        return float(value)

    def positive(self, name: str) -> float:
        """Return a positive number, neither so small nor so large that results overflow."""
        return self.number(name, _SMALL, _LARGE)

    def optional_positive(self, name: str) -> float | None:
        """Return the same, or None if absent or null."""
        return None if self.values.get(name) is None else self.positive(name)

    def flag(self, name: str) -> bool:
        """Return a boolean, False if absent or null."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"config.json: {name} = {quoted(value)} is not a boolean")
        return bool(value)

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a list of integers, empty if absent or null."""
        stated = self.values.get(name)
        stated = [] if stated is None else stated
        if not isinstance(stated, list | tuple) or len(stated) > MAX_LAYERS:
            raise ConfigError(f"config.json: {name} is not a list of at most {MAX_LAYERS:,} integers")
        if not all(isinstance(n, int) for n in stated):
            raise ConfigError(f"config.json: {name} = {quoted(stated)} is not a list of integers")
        return tuple(stated)


# Tells which layers have the sliding window if config.json does not list layer_types.
Slides = Callable[[Fields, int], bool]


@dataclass(frozen=True, slots=True)
class ModelConfig(Fields):
    """Sizes and options of a model: those common to all families as attributes, under Hugging Face's names;
    those of its family through the methods of Fields.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    layer_types: tuple[str, ...]
    sliding_window: int | None

    @property
    def lm_head(self) -> str:
        """The name of the output matrix in the checkpoint."""
        return "model.embed_tokens" if self.tie_word_embeddings else "lm_head"

    @property
    def num_experts(self) -> int:
        return self.size("num_experts", most=MAX_EXPERTS)

    def window(self, layer: int) -> int | None:
        """Return the number of positions that a token of this layer sees, or None for all."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def rope_parameters(self) -> Mapping[str, Any]:
        """Return rope_scaling, or the newer rope_parameters, of config.json; may be empty."""
        stated = self.get("rope_scaling") or self.get("rope_parameters") or {}
        if not isinstance(stated, Mapping):
            raise ConfigError(f"config.json: rope_scaling = {quoted(stated)} is not an object")
        return stated

    def rope(
        self,
        given: Mapping[str, Any] | None = None,
        *,
        base: str = "rope_theta",
        interleaved: bool = False,
        dim: int | None = None,
    ) -> Rope:
        """Return the rotary embedding with the parameters `given`, or those of config.json.

        `dim` numbers of each head are rotated, or the stated part of head_dim.
        Missing parameters are taken from config.json itself: the base from the field `base`.
        """
        given = self.rope_parameters() if given is None else given
        if FULL in given or SLIDING in given:
            raise ConfigError(
                "config.json: rope parameters by layer type are not supported for this architecture"
            )
        stated = {name: value for name, value in given.items() if value is not None}
        fields = Fields({**self.values, "rope_theta": self.get(base), **stated})
        part = 1.0
        if dim is None and "partial_rotary_factor" in self.values:
            part = fields.number("partial_rotary_factor", 0, 1)
        return rope_from_config(
            dict(given),
            dim=dim or int(self.head_dim * part),
            theta=fields.number("rope_theta", *THETA),
            max_position=self.max_position_embeddings,
            original_max_position=self.optional_size("original_max_position_embeddings"),
            interleaved=interleaved,
        )


def rope_of_type(stated: Any, layer_type: str) -> Mapping[str, Any]:
    """Return the rope parameters of a type of layers. Raises ConfigError unless some are stated."""
    if not isinstance(stated, Mapping) or not isinstance(own := stated.get(layer_type), Mapping):
        problem = f"rope_parameters is not an object with parameters of {layer_type}"
        raise ConfigError(f"config.json: {problem}")
    return own


def read_fields(
    raw: Mapping[str, Any],
    defaults: Mapping[str, Any],
    spelled: Mapping[str, str],
    older: Mapping[str, str],
) -> Fields:
    """Read the keys in `defaults` from config.json; `spelled` are the family's own names for some, `older`
    are names that take precedence.

    A missing key takes its default. A null one stays null, which only some keys may be.
    """
    values = {}
    for name, default in defaults.items():
        own = spelled.get(name, name)
        usual = SYNONYMS.get(own, own)
        stated = [raw[key] for key in (older.get(name, usual), usual, own) if key in raw]
        values[name] = next((value for value in stated if value is not None), None) if stated else default
    return Fields(values)


def read_config(
    fields: Fields, slides: Slides, kinds: tuple[str, ...] = (), listed: tuple[str, ...] = ()
) -> ModelConfig:
    """Read the fields common to all families. Raises ConfigError for an impossible value.

    `kinds` are the types of layers that the family has besides attention with and without a window; `listed`
    are those of all layers where the family lists them in its own way.
    """
    heads, hidden = fields.size("num_attention_heads"), fields.size("hidden_size")
    layers = len(listed) or fields.size("num_hidden_layers", most=MAX_LAYERS)
    act = fields.values.get("hidden_act", "silu")
    if not isinstance(act, str):
        raise ConfigError(f"config.json: hidden_act = {quoted(act)} is not a name")
    dim = fields.get("head_dim")
    return ModelConfig(
        values=fields.values,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=fields.optional_size("num_key_value_heads") or heads,
        head_dim=Fields({"head_dim": hidden // heads if dim is None else dim}).size("head_dim", MAX_HEAD_DIM),
        intermediate_size=fields.optional_size("intermediate_size") or 4 * hidden,
        max_position_embeddings=fields.size("max_position_embeddings"),
        norm_eps=_norm_eps(fields),
        hidden_act=act,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        layer_types=listed or _layer_types(fields, layers, slides, kinds),
        sliding_window=fields.optional_size("sliding_window"),
    )


def _norm_eps(fields: Fields) -> float:
    """Return the epsilon of norms; a family whose config.json has none has its own."""
    if "rms_norm_eps" not in fields.values:
        return 1e-5
    return fields.number("rms_norm_eps", 1e-20, 1)  # the smallest float32 is 1e-45


def _layer_types(fields: Fields, layers: int, slides: Slides, kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Return the type of each layer: as stated, or by the family's rule for older configs."""
    stated, known = fields.get("layer_types") or [], (FULL, SLIDING, *kinds)
    if not isinstance(stated, list) or any(kind not in known for kind in stated):
        raise ConfigError(f"config.json: layer_types = {quoted(stated)}", f"known are {', '.join(known)}")
    if stated and len(stated) < layers:
        raise ConfigError(f"config.json: {len(stated)} layer_types for {layers} layers")
    if any(kind in kinds for kind in stated):
        return tuple(stated[:layers])
    if fields.get("sliding_window") is None:
        return (FULL,) * layers
    if "use_sliding_window" in fields.values and not fields.flag("use_sliding_window"):
        if SLIDING in stated[:layers]:
            raise ConfigError(f"config.json: layer_types has {SLIDING}, but use_sliding_window is false")
        return (FULL,) * layers
    if stated:
        return tuple(stated[:layers])
    return tuple(SLIDING if slides(fields, layer) else FULL for layer in range(layers))
