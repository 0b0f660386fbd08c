"""The kinds of vision towers in GGUF files: their tensors, and what config.json would say of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.errors import ConfigError
from quire.weights.gguf import tables
from quire.weights.gguf.changes import Alteration
from quire.weights.gguf.keys import Keys
from quire.weights.gguf.tower_names import (
    GEMMA3,
    GEMMA4,
    IDEFICS3,
    LFM2,
    LLAMA4,
    PIXTRAL,
    QWEN2_5_VL,
    QWEN2_VL,
    VISUAL,
)

Fields = Callable[[Keys, Keys], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class TowerKind:
    """A kind of towers.

    `composites` are the architectures of whole models by those of their text models, unless `fields` says
    another one, `experts` the names of experts in those that have them in other tensors than the text model
    alone. `token` stands for images in their vocabularies. `names` are those of modules and tensors, with *
    for the number of a layer. `last` is the matrix that gives embeddings of the text model, and its axis of
    their numbers. `fields` makes those of config.json from the metadata of a tower and of a text model, with
    text_config what it adds to that.
    `processor` tells from the former how images are resized. `changes` are those of tensors; in `paired`
    ones, numbers of queries and keys that rotate together follow one another. `unused` are tensors that
    nothing needs.
    """

    composites: Mapping[str, str]
    token: str
    names: Mapping[str, str]
    last: tuple[str, int]
    fields: Fields
    processor: Callable[[Keys], Mapping[str, Any]] = lambda tower: {}
    changes: Mapping[str, Alteration] = field(default_factory=dict)
    experts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    paired: bool = False
    unused: frozenset[str] = frozenset()


def _gemma3(tower: Keys, text: Keys) -> dict[str, Any]:
    size, patch = tower.size("image_size"), tower.size("patch_size")
    side = size // patch // tower.size("projector.scale_factor", 4)
    vision = {**_sizes_of_siglip(tower), "image_size": size}
    return {"vision_config": vision, "mm_tokens_per_image": side**2, "text_config": {}}


def _idefics3(tower: Keys, text: Keys) -> dict[str, Any]:
    vision = {**_sizes_of_siglip(tower), "image_size": tower.size("image_size")}
    merge = tower.size("projector.scale_factor", 2)
    return {"vision_config": vision, "scale_factor": merge, "text_config": {"model_type": "llama"}}


def _tiles_of_idefics3(tower: Keys) -> dict[str, Any]:
    side = tower.size("image_size")  # where files state nothing else, images are four tiles long
    longest = tower.size("preproc_image_size", 4 * side)
    return {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": side}}


def _llama4(tower: Keys, text: Keys) -> dict[str, Any]:
    vision = {
        **_sizes_of_siglip(tower),
        "image_size": tower.size("image_size"),
        "pixel_shuffle_ratio": 1 / tower.size("projector.scale_factor", 2),
        "projector_input_dim": tower.rows("mm.model.mlp.1.weight"),
        "projector_output_dim": tower.rows("mm.model.mlp.2.weight"),
    }
    return {"vision_config": vision, "text_config": {}}


def _lfm2(tower: Keys, text: Keys) -> dict[str, Any]:
    positions = tower.rows("v.position_embd.weight")
    return {
        "vision_config": {**_sizes_of_siglip(tower), "num_patches": positions},
        "downsample_factor": tower.size("projector.scale_factor", 2),
        "projector_hidden_size": tower.rows("mm.1.weight"),
        "projector_bias": "mm.1.bias" in tower.tensors,
        "projector_use_layernorm": "mm.input_norm.weight" in tower.tensors,
        "text_config": {"model_type": {"lfm2moe": "lfm2_moe"}.get(text.prefix, text.prefix)},
    }


def _sizes_of_siglip(tower: Keys) -> dict[str, Any]:
    return {
        "hidden_size": tower.size("embedding_length"),
        "intermediate_size": tower.size("feed_forward_length"),
        "num_hidden_layers": tower.layers,
        "num_attention_heads": tower.heads,
        "patch_size": tower.size("patch_size"),
        "layer_norm_eps": tower.number("attention.layer_norm_epsilon"),
    }


def _qwen3_vl(tower: Keys, text: Keys) -> dict[str, Any]:
    vision = {
        "depth": tower.layers,
        "hidden_size": tower.size("embedding_length"),
        "intermediate_size": tower.size("feed_forward_length"),
        "num_heads": tower.heads,
        "patch_size": tower.size("patch_size"),
        "spatial_merge_size": tower.size("spatial_merge_size", 2),
        "temporal_patch_size": 2,
        "out_hidden_size": text.size("embedding_length"),
        "num_position_embeddings": tower.rows("v.position_embd.weight"),
        "deepstack_visual_indexes": deep_layers(tower),
    }
    return {"vision_config": vision, "text_config": {}}


def _qwen2_vl(tower: Keys, text: Keys) -> dict[str, Any]:
    width = tower.size("embedding_length")
    # The length of the feed-forward that files state is another: the width of the text model
    inner = max(tower.rows(f"v.blk.0.ffn_{part}.weight") or 0 for part in ("up", "down"))
    vision = {
        **_sizes_of_qwen2(tower),
        "embed_dim": width,
        "hidden_size": text.size("embedding_length"),
        "mlp_ratio": inner / width,
    }
    return {"vision_config": vision, "text_config": {}}


def _qwen2_5_vl(tower: Keys, text: Keys) -> dict[str, Any]:
    every = tower.optional_size("n_wa_pattern") or 1  # layers, of which the last sees all of an image
    vision = {
        **_sizes_of_qwen2(tower),
        "hidden_size": tower.size("embedding_length"),
        "intermediate_size": tower.size("feed_forward_length"),
        "out_hidden_size": text.size("embedding_length"),
        "window_size": tower.size("window_size", 112),
        "fullatt_block_indexes": [*range(every - 1, tower.layers, every)],
    }
    return {"vision_config": vision, "text_config": {}}


def _sizes_of_qwen2(tower: Keys) -> dict[str, Any]:
    return {
        "depth": tower.layers,
        "num_heads": tower.heads,
        "patch_size": tower.size("patch_size"),
        "spatial_merge_size": tower.size("spatial_merge_size", 2),
    }


def _gemma4(tower: Keys, text: Keys) -> dict[str, Any]:
    heads, positions = tower.heads, tower.tensors.get("v.position_embd.weight")
    queries, keys = (tower.rows(f"v.blk.0.attn_{part}.weight") for part in "qk")
    if positions is None or len(positions.shape) != 3 or not queries or not keys or queries % heads:
        raise ConfigError(f"{tower.metadata.where}: has no positions, queries or keys", "is it complete?")
    vision = {
        "hidden_size": tower.size("embedding_length"),
        "intermediate_size": tower.size("feed_forward_length"),
        "num_hidden_layers": tower.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, keys * heads // queries),
        "head_dim": queries // heads,
        "rms_norm_eps": tower.number("attention.layer_norm_epsilon"),
        "patch_size": tower.size("patch_size"),
        "pooling_kernel_size": tower.size("projector.scale_factor", 3),
        "position_embedding_size": positions.shape[1],
        "standardize": "v.std_bias" in tower.tensors,
        "use_clipped_linears": any(name.endswith(".input_max") for name in tower.tensors),
    }
    # What no file states: in the models with inputs of each layer, tokens of an image see those before them
    seen = None if text.optional_size("embedding_length_per_layer_input") else "vision"
    return {"vision_config": vision, "text_config": {"use_bidirectional_attention": seen}}


_PIXTRAL_12B = {  # which merges no patches
    "architectures": ["LlavaForConditionalGeneration"],
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}


def _pixtral(tower: Keys, text: Keys) -> dict[str, Any]:
    vision = {
        "model_type": "pixtral",
        "hidden_size": tower.size("embedding_length"),
        "intermediate_size": tower.size("feed_forward_length"),
        "num_hidden_layers": tower.layers,
        "num_attention_heads": tower.heads,
        "image_size": tower.size("image_size"),
        "patch_size": tower.size("patch_size"),
        "hidden_act": "silu" if tower.metadata.flag("clip.use_silu") else "gelu",
    }
    grows = text.prefix == "mistral3" and text.number("attention.temperature_scale")
    window = {"sliding_window": text.optional_size("attention.sliding_window")}
    merge = tower.optional_size("spatial_merge_size")
    return {
        "vision_config": vision,
        "multimodal_projector_bias": "mm.1.bias" in tower.tensors,
        "text_config": {"model_type": "ministral3"} if grows else {"model_type": "mistral", **window},
        **({"spatial_merge_size": merge} if merge else _PIXTRAL_12B),
    }


def deep_layers(tower: Keys) -> list[int]:
    """Return the layers of Qwen's tower that also give something to the first layers of the text model."""
    return [layer for layer in range(tower.layers) if f"v.deepstack.{layer}.fc1.weight" in tower.tensors]


_FRAMES, _PIXELS = ({"v.patch_embd.weight": Alteration(form=form)} for form in ("frames", "pixels"))


def _pixels(least: int, most: int) -> Callable[[Keys], Mapping[str, Any]]:
    """Return what says the least and most pixels of an image, as of the published models."""
    return lambda tower: {"size": {"shortest_edge": least, "longest_edge": most}}


_PIXELS_OF_QWEN2 = _pixels(56 * 56, 28 * 28 << 14)
# By what a file calls its projector
KINDS = {
    "gemma3": TowerKind(
        {"gemma3": "Gemma3ForConditionalGeneration"},
        "<image_soft_token>",
        GEMMA3,
        ("mm.input_projection.weight", 1),
        _gemma3,
        changes={"mm.soft_emb_norm.weight": Alteration(numbers="plus one")},
    ),
    "qwen2vl_merger": TowerKind(
        {"qwen2vl": "Qwen2VLForConditionalGeneration"},
        "<|image_pad|>",
        QWEN2_VL,
        ("mm.2.weight", 0),
        _qwen2_vl,
        _PIXELS_OF_QWEN2,
        _FRAMES,
    ),
    "qwen2.5vl_merger": TowerKind(
        {"qwen2vl": "Qwen2_5_VLForConditionalGeneration"},
        "<|image_pad|>",
        QWEN2_5_VL,
        ("mm.2.weight", 0),
        _qwen2_5_vl,
        _PIXELS_OF_QWEN2,
        _FRAMES,
    ),
    "qwen3vl_merger": TowerKind(
        {
            "qwen3vl": "Qwen3VLForConditionalGeneration",
            "qwen3vlmoe": "Qwen3VLMoeForConditionalGeneration",
            "qwen35": "Qwen3_5ForConditionalGeneration",
            "qwen35moe": "Qwen3_5MoeForConditionalGeneration",
        },
        "<|image_pad|>",
        VISUAL,
        ("mm.2.weight", 0),
        _qwen3_vl,
        _pixels(1 << 16, 1 << 24),
        _FRAMES,
        {"qwen3vlmoe": tables.QWEN3_VL_MOE},
    ),
    "gemma4v": TowerKind(
        {"gemma4": "Gemma4ForConditionalGeneration"},
        "<|image|>",
        GEMMA4,
        ("mm.input_projection.weight", 0),
        _gemma4,
        changes=_PIXELS,
    ),
    "idefics3": TowerKind(
        {"llama": "Idefics3ForConditionalGeneration"},
        "<image>",
        IDEFICS3,
        ("mm.model.fc.weight", 0),
        _idefics3,
        _tiles_of_idefics3,
    ),
    "lfm2": TowerKind(
        dict.fromkeys(("lfm2", "lfm2moe"), "Lfm2VlForConditionalGeneration"),
        "<image>",
        LFM2,
        ("mm.2.weight", 0),
        _lfm2,
        changes=_PIXELS,
    ),
    "llama4": TowerKind(
        {"llama4": "Llama4ForConditionalGeneration"},
        "<|patch|>",
        LLAMA4,
        ("mm.model.fc.weight", 0),
        _llama4,
    ),
    "pixtral": TowerKind(
        dict.fromkeys(("llama", "mistral3"), "Mistral3ForConditionalGeneration"),
        "[IMG]",
        PIXTRAL,
        ("mm.2.weight", 0),
        _pixtral,
        paired=True,
        unused=frozenset({"v.token_embd.img_break"}),  # a row of the text model's
    ),
}
