"""Tiny models that see as GGUF files: a text model with its tokenizer, and the vision tower beside it, with
names, keys and changes as llama.cpp's converters have them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf_converted import converted as converted_later
from gguf_files import F32, write
from safetensors.numpy import load_file
from test_gguf_families import converted, metadata_of

Arrays = dict[str, np.ndarray]
_TOWER = re.compile(
    r"(model\.(visual|vision_(tower|model)|connector|multi_modal_projector|embed_vision)|vision_model)\."
)
_PROJECTORS = {
    "qwen2_vl": "qwen2vl_merger",
    "qwen2_5_vl": "qwen2.5vl_merger",
    "qwen3_vl": "qwen3vl_merger",
    "gemma3": "gemma3",
    "gemma4": "gemma4v",
    "mistral3": "pixtral",
    "llava": "pixtral",
    "lfm2_vl": "lfm2",
    "smolvlm": "idefics3",
    "llama4": "llama4",
}
_GEMMA4 = {
    "input_layernorm": "ln1",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ffn_post_norm",
    "self_attn.o_proj": "attn_out",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
_QWEN = {
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
    "norm": "norm",
    "linear_fc1": "fc1",
    "linear_fc2": "fc2",
}
_PIXTRAL = {
    "attention_norm": "ln1",
    **{f"attention.{part}_proj": f"attn_{part}" for part in "qkv"},
    "attention.o_proj": "attn_out",
    "ffn_norm": "ln2",
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
_SIGLIP = {
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "self_attn.out_proj": "attn_out",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
_WHOLE = {
    "model.visual.patch_embed.proj": "v.patch_embd",
    "model.visual.pos_embed": "v.position_embd",
    "model.visual.merger.norm": "v.post_ln",
    "model.visual.merger.ln_q": "v.post_ln",
    "model.visual.merger.mlp.0": "mm.0",
    "model.visual.merger.mlp.2": "mm.2",
    "model.visual.merger.linear_fc1": "mm.0",
    "model.visual.merger.linear_fc2": "mm.2",
    "model.vision_tower.embeddings.patch_embedding": "v.patch_embd",
    "model.vision_tower.embeddings.position_embedding": "v.position_embd",
    "model.vision_tower.post_layernorm": "v.post_ln",
    "model.multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm",
    "model.vision_tower.patch_embedder.input_proj": "v.patch_embd",
    "model.embed_vision.embedding_projection": "mm.input_projection",
    "model.vision_tower.patch_conv": "v.patch_embd",
    "model.vision_tower.ln_pre": "v.pre_ln",
    "model.multi_modal_projector.norm": "mm.input_norm",
    "model.multi_modal_projector.patch_merger.merging_layer": "mm.patch_merger",
    "model.multi_modal_projector.layer_norm": "mm.input_norm",
    "model.vision_model.embeddings.patch_embedding": "v.patch_embd",
    "model.vision_model.embeddings.position_embedding": "v.position_embd",
    "model.vision_model.post_layernorm": "v.post_ln",
    "model.connector.modality_projection.proj": "mm.model.fc",
    "vision_model.layernorm_pre": "v.pre_ln",
    "vision_model.layernorm_post": "v.post_ln",
    "vision_model.vision_adapter.mlp.fc1": "mm.model.mlp.1",
    "vision_model.vision_adapter.mlp.fc2": "mm.model.mlp.2",
    "model.multi_modal_projector.linear_1": "mm.1",
    "model.multi_modal_projector.linear_2": "mm.2",
}
_TEXTS = {
    "qwen3_vl_text": "qwen3vl",
    "qwen3_vl_moe_text": "qwen3vlmoe",
    "gemma3_text": "gemma3",
    "llama": "llama",
    "mistral": "llama",
    "ministral3": "mistral3",
    "qwen2_vl_text": "qwen2vl",
    "qwen2_5_vl_text": "qwen2vl",
}
_ROPE = {"rope_theta": 10000.0}
_ODD = {
    "model.multi_modal_projector.mm_input_projection_weight": "mm.input_projection.weight",
    "model.vision_tower.patch_embedder.position_embedding_table": "v.position_embd.weight",
    "vision_model.patch_embedding.linear.weight": "v.patch_embd.weight",
    "vision_model.class_embedding": "v.class_embd",
    "vision_model.positional_embedding_vlm": "v.position_embd.weight",
    "model.vision_tower.std_bias": "v.std_bias",
    "model.vision_tower.std_scale": "v.std_scale",
}


def write_both(
    folder: Path,
    into: Path,
    projector: str = "mmproj-F32.gguf",
    exchanged: bool = False,
    left_out: str = "",
    flat: str = "",
    of_text: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Write both files of a model in a folder; `changes` are those of the tower's metadata, `of_text` others.

    With `exchanged` each matrix of an MLP has the name of the other one. `left_out` is a tensor of the tower,
    `flat` one that is written as a matrix.
    """
    into.mkdir(exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    arrays = load_file(folder / "model.safetensors")
    text = {name: array for name, array in arrays.items() if not _TOWER.match(name)}
    metadata, tensors = _text_model(folder, config, text)
    path = _written(into / "model.gguf", {**metadata, **_tokenizer(folder), **(of_text or {})}, tensors)
    metadata, tensors = tower(config, {name: arrays[name] for name in arrays.keys() - text.keys()})
    if exchanged:
        other = {"up": "down", "down": "up"}
        tensors = {
            re.sub("ffn_(up|down)", lambda part: f"ffn_{other[part[1]]}", name): array
            for name, array in tensors.items()
        }
    tensors.pop(left_out, None)
    tensors |= {name: array.reshape(len(array), -1) for name, array in tensors.items() if name == flat}
    _written(into / projector, {**metadata, **changes}, tensors)
    return path


def _written(path: Path, metadata: dict[str, Any], tensors: Arrays) -> Path:
    known = {key: value for key, value in metadata.items() if value is not None}
    return write(path, known, {name: (array, F32) for name, array in tensors.items()})


def _text_model(folder: Path, config: dict[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
    kind, own = config["model_type"], config["text_config"]
    if kind in ("gemma4", "lfm2_vl", "llama4"):
        return converted_later(folder)
    architecture = _TEXTS[own["model_type"]]
    plain = {name: array for name, array in arrays.items() if ".experts." not in name}
    tensors = converted(architecture, own, plain)
    for name in arrays.keys() - plain.keys():
        layer = f"blk.{name.split('.')[2]}"
        array = arrays[name]
        if name.endswith("down_proj"):
            tensors[f"{layer}.ffn_down_exps.weight"] = array
            continue
        for part, half in zip(("gate", "up"), np.split(array, 2, axis=1), strict=True):
            tensors[f"{layer}.ffn_{part}_exps.weight"] = half
    metadata = metadata_of(architecture, {"rms_norm_eps": 1e-6, **_ROPE, **own})
    scaling = own.get("rope_scaling") or {}
    if beta := scaling.get("llama_4_scaling_beta"):
        metadata[f"{architecture}.attention.temperature_scale"] = beta
        metadata[f"{architecture}.rope.scaling.yarn_log_multiplier"] = scaling["mscale_all_dim"]
    if sections := (own.get("rope_parameters") or {}).get("mrope_section"):
        metadata[f"{architecture}.rope.dimension_sections"] = [*sections, 0]
    return metadata, tensors


def _tokenizer(folder: Path) -> dict[str, Any]:
    data = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    added = {token["id"]: token for token in data["added_tokens"]}
    tokens = {number: text for text, number in data["model"]["vocab"].items()}
    tokens |= {number: token["content"] for number, token in added.items()}
    kinds = [
        1 if number not in added else 3 if added[number]["special"] else 4 for number in range(len(tokens))
    ]
    end = next(number for number, token in added.items() if token["content"] == "<|im_end|>")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [tokens[number] for number in range(len(tokens))],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in data["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": end,
        "tokenizer.chat_template": settings["chat_template"],
    }


def tower(config: dict[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
    """The metadata and the tensors of the file of a tower."""
    own, kind = config["vision_config"], config["model_type"].removesuffix("_moe")
    tensors: Arrays = {}
    for name, array in arrays.items():
        tensors |= _tensors_of(own, name, array)
    if kind == "gemma4":  # and the tower for sound
        tensors |= dict.fromkeys(("a.blk.0.ln1.weight", "mm.a.input_projection.weight"), np.ones((4, 4)))
    keys = {
        "image_size": own.get("image_size", 224),
        "patch_size": own["patch_size"],
        "embedding_length": own.get("embed_dim", own["hidden_size"]),
        "feed_forward_length": own.get("intermediate_size", own["hidden_size"]),
        "projection_dim": config["text_config"]["hidden_size"],
        "block_count": own.get("num_hidden_layers", own.get("depth")),
        "attention.head_count": own.get("num_attention_heads", own.get("num_heads")),
        "attention.layer_norm_epsilon": 1e-6,
        "image_mean": [0.0] * 3 if kind == "gemma4" else [0.5] * 3,
        "image_std": [1.0] * 3 if kind == "gemma4" else [0.5] * 3,
        "spatial_merge_size": own.get("spatial_merge_size"),
        "is_deepstack_layers": [i in own["deepstack_visual_indexes"] for i in range(own["depth"])]
        if kind == "qwen3_vl"
        else None,
    }
    if kind in ("mistral3", "llava"):
        tensors["v.token_embd.img_break"] = np.ones(config["text_config"]["hidden_size"], np.float32)
        keys["spatial_merge_size"] = 2 if kind == "mistral3" else None
    if whole := own.get("fullatt_block_indexes"):
        keys |= {"n_wa_pattern": whole[0] + 1, "window_size": own["window_size"]}
    if kind in ("lfm2_vl", "smolvlm", "llama4"):
        keys["projector.scale_factor"] = 2
    if kind == "gemma3":
        keys["projector.scale_factor"] = own["image_size"] // own["patch_size"] // 4
    stated = {f"clip.vision.{key}": value for key, value in keys.items()}
    whose = "clip.vision.projector_type" if kind == "gemma4" else "clip.projector_type"
    return {
        "general.architecture": "clip",
        "general.type": "mmproj",
        whose: _PROJECTORS[kind],
        "clip.use_silu": own.get("hidden_act") == "silu",
        **stated,
    }, tensors


def _tensors_of(own: dict[str, Any], name: str, array: np.ndarray) -> Arrays:
    if name in _ODD:
        return {_ODD[name]: array}
    module, _, end = name.rpartition(".")
    if "projector_input_dim" in own and module.endswith("linear_1"):  # of Llama 4
        return {f"mm.model.fc.{end}": array}
    if name == "model.visual.patch_embed.proj.weight":
        return {"v.patch_embd.weight": array[:, :, 0], "v.patch_embd.weight.1": array[:, :, 1]}
    if "patch_embed" in name and name.endswith("weight") and array.ndim == 2:
        patch = own["patch_size"]
        return {"v.patch_embd.weight": array.reshape(-1, patch, patch, 3).transpose(0, 3, 1, 2)}
    if module in _WHOLE:
        return {f"{_WHOLE[module]}.{end}": array + 1 if "soft_emb_norm" in module else array}
    found = re.fullmatch(r".*(blocks|layers|deepstack_merger_list)\.(\d+)\.(.+?)(?:\.linear)?", module)
    assert found, name
    if found[3] == "attn.qkv" and "deepstack_visual_indexes" not in own:  # converters divide it
        parts = zip("qkv", np.split(array, 3), strict=True)
        return {f"v.blk.{found[2]}.attn_{part}.{end}": third for part, third in parts}
    names = {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"}
    names |= {**_GEMMA4, **_QWEN, **_SIGLIP, **_PIXTRAL}
    names |= {"post_attention_layernorm": "ln2"} if "projector_input_dim" in own else {}
    layer, part = f"v.blk.{found[2]}", names[found[3]]
    if found[3] in ("attention.q_proj", "attention.k_proj"):  # pairs that rotate together, one by one
        of_heads = array.reshape(own["num_attention_heads"], 2, -1, array.shape[1])
        array = of_heads.swapaxes(1, 2).reshape(array.shape)
    if found[1] == "deepstack_merger_list":
        layer = f"v.deepstack.{own['deepstack_visual_indexes'][int(found[2])]}"
    return {f"{layer}.{part}.{end}": array.reshape(1) if array.ndim == 0 else array}
