"""ModelConfig: a checkpoint's config.json, read once, in one spelling."""

from __future__ import annotations

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

    def window(self, layer: int) -> int | None:
        """How many positions a token of this layer sees, or None for all."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def rope(self, layer_type: str = FULL, *, interleaved: bool = False) -> Rope:
        """How layers of this type rotate: rope_theta and rope_scaling, or the newer rope_parameters."""
        values = self.values
        scaling = values.get("rope_parameters") or values.get("rope_scaling") or {}
        scaling = scaling.get(layer_type, scaling) if isinstance(scaling, Mapping) else {}
        partial = scaling.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
        return rope_from_config(
            dict(scaling),
            dim=int(self.head_dim * partial),
            theta=scaling.get("rope_theta") or values.get("rope_theta") or 10000.0,
            max_position=self.max_position_embeddings,
            original_max_position=values.get("original_max_position_embeddings"),
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


# Which layers have the sliding window where config.json does not list layer_types.
Slides = Callable[[Mapping[str, Any], int], bool]


def read_config(raw: Mapping[str, Any], defaults: Mapping[str, Any], slides: Slides) -> ModelConfig:
    """Read config.json over a family's `defaults`; ConfigError names a missing or impossible field."""
    values = {**defaults, **{name: value for name, value in raw.items() if value is not None}}
    for name, others in ALIASES.items():
        for other in others:
            if values.get(name) is None and values.get(other) is not None:
                values[name] = values[other]
    heads = _size(values, "num_attention_heads")
    hidden = _size(values, "hidden_size")
    layers = _size(values, "num_hidden_layers")
    return ModelConfig(
        values=values,
        vocab_size=_size(values, "vocab_size"),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=_size(values, "num_key_value_heads", heads),
        head_dim=_size(values, "head_dim", hidden // heads),
        intermediate_size=_size(values, "intermediate_size", 4 * hidden),
        max_position_embeddings=_size(values, "max_position_embeddings", 2048),
        norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        hidden_act=str(values.get("hidden_act", "silu")),
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        layer_types=_layer_types(values, layers, slides),
        sliding_window=values.get("sliding_window"),
    )


def _size(values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
        problem = "is missing" if value is None else f"= {value!r} is not a size"
        raise ConfigError(f"config.json: {name} {problem}", "is this a decoder-only language model?")
    return value


def _layer_types(values: Mapping[str, Any], layers: int, slides: Slides) -> tuple[str, ...]:
    """What each layer's attention sees: stated, or by the family's rule for older configs."""
    if values.get("sliding_window") is None or values.get("use_sliding_window") is False:
        return (FULL,) * layers
    if stated := values.get("layer_types"):
        if len(stated) < layers:
            raise ConfigError(f"config.json: {len(stated)} layer_types for {layers} layers")
        return tuple(stated[:layers])
    return tuple(SLIDING if slides(values, layer) else FULL for layer in range(layers))
