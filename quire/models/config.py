"""ModelConfig: a checkpoint's config.json, read once, in one spelling."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import ConfigError
from quire.program.rope import Rope, rope_from_config

# Older spellings of a field: name here -> names there.
ALIASES = {
    "hidden_size": ("n_embd",),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "max_position_embeddings": ("n_positions",),
    "intermediate_size": ("n_inner",),
    "hidden_act": ("hidden_activation", "activation_function"),
    "rms_norm_eps": ("layer_norm_eps", "layer_norm_epsilon"),
    "num_experts": ("num_local_experts",),
}
FULL, SLIDING = "full_attention", "sliding_attention"
MAX_LAYERS = MAX_EXPERTS = 1 << 12  # far above any model: a program names the weights of each


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes and options of a model. `values` holds every field of config.json over the family's
    defaults; the attributes are those that all families share, under Hugging Face's names.
    """

    values: Mapping[str, Any]
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
        """The checkpoint's name of the output matrix."""
        return "model.embed_tokens" if self.tie_word_embeddings else "lm_head"

    @property
    def num_experts(self) -> int:
        return read_size(self.values, "num_experts", most=MAX_EXPERTS)

    def window(self, layer: int) -> int | None:
        """How many positions a token of this layer sees, or None for all."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def rope(self, layer_type: str = FULL, *, interleaved: bool = False) -> Rope:
        """How layers of this type rotate: rope_theta and rope_scaling, or the newer rope_parameters."""
        values = self.values
        scaling = values.get("rope_parameters") or values.get("rope_scaling") or {}
        if isinstance(scaling, Mapping) and (FULL in scaling or SLIDING in scaling):
            scaling = scaling.get(layer_type)
        if not isinstance(scaling, Mapping):
            raise ConfigError(f"config.json: the rope parameters of {layer_type} layers are not an object")
        fields = {**values, **{name: value for name, value in scaling.items() if value is not None}}
        return rope_from_config(
            dict(scaling),
            dim=int(self.head_dim * _number(fields, "partial_rotary_factor", 1.0)),
            theta=_number(fields, "rope_theta", 10000.0),
            max_position=self.max_position_embeddings,
            original_max_position=_optional_size(values, "original_max_position_embeddings"),
            interleaved=interleaved,
        )

    def __getitem__(self, name: str) -> Any:
        """A field that only some families have; a missing one is an error that names it."""
        if self.values.get(name) is None:
            family = self.values.get("model_type")
            raise ConfigError(f"config.json lacks {name!r}", f"a {family} model needs it")
        return self.values[name]

    def get(self, name: str, default: Any = None) -> Any:
        """A field of one family, `default` when absent or null."""
        value = self.values.get(name)
        return default if value is None else value

    def size(self, name: str) -> int:
        """A positive integer that the family cannot do without."""
        return read_size(self.values, name)

    def number(self, name: str, default: float) -> float:
        """A finite number, `default` when absent or null."""
        return _number(self.values, name, default)

    def positive(self, name: str) -> float | None:
        """A positive number, or None when absent, null or 0."""
        value = _number(self.values, name, 0.0)
        if value < 0:
            raise ConfigError(f"config.json: {name} = {value!r} is not positive")
        return value or None

    def flag(self, name: str) -> bool:
        """True or false, false when absent or null."""
        return _flag(self.values, name)

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers, empty when absent or null."""
        stated = self.get(name, ())
        if not isinstance(stated, list | tuple) or not all(isinstance(n, int) for n in stated):
            raise ConfigError(f"config.json: {name} = {stated!r} is not a list of integers")
        return tuple(stated)


# Which layers have the sliding window where config.json does not list layer_types.
Slides = Callable[[Mapping[str, Any], int], bool]


def read_config(raw: Mapping[str, Any], defaults: Mapping[str, Any], slides: Slides) -> ModelConfig:
    """Read config.json over a family's `defaults`; ConfigError names a missing or impossible field."""
    stated = {name: value for name, value in raw.items() if value is not None}
    for name, others in ALIASES.items():
        for other in others:
            if other in stated:
                stated.setdefault(name, stated[other])
    if "hidden_activation" in stated:  # Gemma's own field; hidden_act beside it may be a leftover
        stated["hidden_act"] = stated["hidden_activation"]
    values = {**defaults, **stated}
    heads = read_size(values, "num_attention_heads")
    hidden = read_size(values, "hidden_size")
    layers = read_size(values, "num_hidden_layers", most=MAX_LAYERS)
    act = values.get("hidden_act", "silu")
    if not isinstance(act, str):
        raise ConfigError(f"config.json: hidden_act = {act!r} is not a name")
    return ModelConfig(
        values=values,
        vocab_size=read_size(values, "vocab_size"),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=read_size(values, "num_key_value_heads", heads),
        head_dim=read_size(values, "head_dim", hidden // heads),
        intermediate_size=read_size(values, "intermediate_size", 4 * hidden),
        max_position_embeddings=read_size(values, "max_position_embeddings", 2048),
        norm_eps=_number(values, "rms_norm_eps", 1e-6),
        hidden_act=act,
        tie_word_embeddings=_flag(values, "tie_word_embeddings"),
        layer_types=_layer_types(values, layers, slides),
        sliding_window=_optional_size(values, "sliding_window"),
    )


def read_size(
    values: Mapping[str, Any], name: str, default: int | None = None, most: int = (1 << 31) - 1
) -> int:
    """A positive integer; ConfigError when it is something else, or missing without a default."""
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        problem = "is missing" if value is None else f"= {value!r} is not a size"
        raise ConfigError(f"config.json: {name} {problem}", "is this a decoder-only language model?")
    return value


def _optional_size(values: Mapping[str, Any], name: str) -> int | None:
    return None if values.get(name) is None else read_size(values, name)


def _number(values: Mapping[str, Any], name: str, default: float) -> float:
    value = values.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"config.json: {name} = {value!r} is not a number")
    return float(value)


def _flag(values: Mapping[str, Any], name: str) -> bool:
    value = values.get(name)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"config.json: {name} = {value!r} is neither true nor false")
    return bool(value)


def _layer_types(values: Mapping[str, Any], layers: int, slides: Slides) -> tuple[str, ...]:
    """What each layer's attention sees: stated, or by the family's rule for older configs."""
    stated = values.get("layer_types") or []
    if not isinstance(stated, list) or any(kind not in (FULL, SLIDING) for kind in stated):
        raise ConfigError(f"config.json: layer_types = {stated!r}", f"only {FULL} and {SLIDING} are known")
    if stated and len(stated) < layers:
        raise ConfigError(f"config.json: {len(stated)} layer_types for {layers} layers")
    used = values.get("use_sliding_window") is None or _flag(values, "use_sliding_window")
    if values.get("sliding_window") is None or not used:
        return (FULL,) * layers
    if stated:
        return tuple(stated[:layers])
    return tuple(SLIDING if slides(values, layer) else FULL for layer in range(layers))
