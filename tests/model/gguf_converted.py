"""Tiny checkpoints as GGUF files of families with states, latents or experts of their own: names, keys and
changes as llama.cpp's converters have them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf_files import F32, write
from gguf_metadata import metadata_of, rope_divisors
from safetensors import safe_open

Arrays = dict[str, np.ndarray]
Config = dict[str, Any]

# Folder of the checkpoint -> architecture in GGUF
FOLDERS = {
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "ernie4_5_moe": "ernie4_5-moe",
    "falcon_h1": "falcon-h1",
    "gemma3n": "gemma3n",
    "gemma4_dense": "gemma4",
    "gemma4_e": "gemma4",
    "gemma4_moe": "gemma4",
    "glm4_moe": "glm4moe",
    "glm4_moe_lite": "deepseek2",
    "granite4_h": "granitehybrid",
    "lfm2": "lfm2",
    "llama4": "llama4",
    "minicpm3": "minicpm3",
    "nemotron_h": "nemotron_h_moe",
    "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe",
    "qwen3_next": "qwen3next",
}
# Made of random numbers, as there is no checkpoint
MADE = {"hunyuan_moe": "hunyuan-moe", "minicpm": "minicpm", "phimoe": "phimoe", "stablelm": "stablelm"}
MADE |= {"kimi_linear": "kimi-linear", "bailing2": "bailingmoe2", "exaone3": "exaone"}
MADE |= {"deepseek_v32": "deepseek32", "glm_moe_dsa": "glm-dsa"}
MADE |= {"phi": "phi2", "nemotron": "nemotron", "deci": "deci"}
MADE |= {"arcee": "arcee", "cohere": "command-r", "granite_moe_shared": "granitemoe", "olmo": "olmo"}

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.word_embeddings": "token_embd",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "transformer.wte": "token_embd",
    "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.attention.out_proj": "attn_output",
    "backbone.embeddings": "token_embd",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "model.embedding_norm": "token_embd_norm",
    "model.final_layernorm": "output_norm",
    "model.norm": "output_norm",
    "backbone.norm_f": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "operator_norm": "attn_norm",
    "norm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "ffn_norm": "ffn_norm",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "altup.correction_coefs": "altup_correct_coef",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
    "router.proj": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.output_linear": "ffn_down_exps",
    "shared_mlp.output_linear": "ffn_down_shexp",
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
    "shared_head.head": "nextn.shared_head_head",
    "embed_tokens": "nextn.embed_tokens",
    "mtp.fc": "nextn.eh_proj",
    "mtp.pre_fc_norm_embedding": "nextn.enorm",
    "mtp.pre_fc_norm_hidden": "nextn.hnorm",
    "mtp.norm": "nextn.shared_head_norm",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
}
# The last parts of the names of modules in a layer, whatever the modules are called
LAST = {
    **{f"{part}_proj": f"attn_{part}" for part in "qkv"},
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "q_layernorm": "attn_q_norm",
    "k_layernorm": "attn_k_norm",
    "query_layernorm": "attn_q_norm",
    "key_layernorm": "attn_k_norm",
    "query_key_value": "attn_qkv",
    "fc1": "ffn_up",
    "fc2": "ffn_down",
    "c_fc_0": "ffn_gate",
    "c_fc_1": "ffn_up",
    "c_proj": "ffn_down",
    "dense": "attn_output",
    "linear_attn": "attn_output",
    "wq_b": "indexer.attn_q_b",
    "wk": "indexer.attn_k",
    "weights_proj": "indexer.proj",
    "q_a_proj": "attn_q_a",
    "q_b_proj": "attn_q_b",
    "q_a_layernorm": "attn_q_a_norm",
    "kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "kv_a_layernorm": "attn_kv_a_norm",
    **{f"{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    "w1": "ffn_gate",
    "w3": "ffn_up",
    "w2": "ffn_down",
    "gate": "ffn_gate_inp",
    "router": "ffn_gate_inp",
    "wg": "ffn_gate_inp",
    "shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"{part}_conv1d": f"ssm_conv1d_{part}" for part in "qkv"},
    **{f"{part}_proj": f"ssm_{part}" for part in ("f_a", "f_b", "g_a", "g_b")},
    "b_proj": "ssm_beta",
    "o_norm": "ssm_norm",
}
# The same in delta nets and mixers
STATES = {
    "in_proj_qkv": "attn_qkv",
    "in_proj_z": "attn_gate",
    "in_proj_a": "ssm_alpha",
    "in_proj_b": "ssm_beta",
    "in_proj_ba": "ssm_ba",
    "in_proj": "ssm_in",
    "out_proj": "ssm_out",
    "conv1d": "ssm_conv1d",
    "norm": "ssm_norm",
}
PAIRED = ("deci", "granitehybrid", "nemotron_h_moe", "minicpm", "arcee", "granitemoe", "olmo")
WHOLE = {
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "altup.correct_output_scale": "altup_correct_scale.weight",
}
_MODULES = ("linear_attn", "mamba", "mixer")


def converted(folder: Path) -> tuple[dict[str, Any], Arrays]:
    """The metadata and the tensors of a GGUF file."""
    raw = json.loads((folder / "config.json").read_text())
    config = {**raw, **raw.get("text_config", {})}
    architecture = {**FOLDERS, **MADE}[folder.name]
    stacks: dict[str, dict[int, np.ndarray]] = {}
    found: Arrays = {}
    for name, array in sorted(read(folder).items()):
        layer, rest = layer_of(name, config)
        for part, own in tensors_of(architecture, config, layer, rest, array):
            if expert := re.fullmatch(r"(.+)@(\d+)", part):
                stacks.setdefault(expert[1], {})[int(expert[2])] = own
            else:
                found[part] = own
    found |= {name: np.stack([own[i] for i in range(len(own))]) for name, own in stacks.items()}
    later = {int(name.split(".")[1]) for name in found if "nextn" in name}
    keys = metadata_of(architecture, config, len(later))
    keys = {f"{architecture}.{key}": value for key, value in keys.items() if value is not None}
    found |= rope_divisors(architecture, config)
    return {"general.architecture": architecture, "tokenizer.ggml.model": "no_vocab", **keys}, found


def written(folder: Path, path: Path, kinds: Callable[[str, np.ndarray], int]) -> Path:
    """A GGUF file of a checkpoint; `kinds` says of what type a tensor is."""
    metadata, arrays = converted(folder)
    return write(path, metadata, {name: (array, kinds(name, array)) for name, array in arrays.items()})


def in_f32(name: str, array: np.ndarray) -> int:
    return F32


def read(folder: Path) -> Arrays:
    """The tensors of the text model, under the names that it has alone."""
    found: Arrays = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118
                if not re.search("visual|vision|projector", name):
                    own = name.replace("model.language_model.", "model.")
                    found[own] = opened.get_tensor(name).astype(np.float32)
    return found


def layer_of(name: str, config: Config) -> tuple[str, str]:
    """The beginning of the name of a layer's tensor, and the rest."""
    last = config["num_hidden_layers"]
    if match := re.fullmatch(r"mtp\.layers\.(\d+)\.(.+)", name):
        return f"blk.{last + int(match[1])}.", match[2]
    if match := re.fullmatch(r"(?:(?:model|backbone)\.layers|transformer\.h)\.(\d+)\.(.+)", name):
        return f"blk.{match[1]}.", match[2]
    return (f"blk.{last}.", name) if name.startswith("mtp.") else ("", name)


def tensors_of(
    architecture: str, config: Config, layer: str, rest: str, array: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors in the file that one of the checkpoint becomes; NAME@3 is the fourth of a stack."""
    if match := re.fullmatch(r"model\.altup_(un)?(?:embed_)?projections\.(\d)\.weight", rest):
        yield f"altup_{'unembd_' if match[1] else ''}proj.weight@{match[2]}", array
    elif rest in WHOLE:
        yield layer + WHOLE[rest], array
    elif "kv_b_proj" in rest and architecture != "minicpm3":
        heads, plain = config["num_attention_heads"], config["qk_nope_head_dim"]
        both = array.reshape(heads, -1, array.shape[-1])
        yield f"{layer}attn_k_b.weight", both[:, :plain].swapaxes(1, 2)
        yield f"{layer}attn_v_b.weight", both[:, plain:]
    elif rest.endswith("kv_b_proj.weight"):
        yield f"{layer}attn_kv_b.weight", array
    elif "input_linear" in rest or rest.endswith("experts.gate_up_proj"):
        yield from _two(architecture, layer, rest, array)
    elif rest.endswith("experts.down_proj"):
        yield f"{layer}ffn_down_exps.weight", array.swapaxes(1, 2) if architecture == "llama4" else array
    elif "in_proj_qkvz" in rest:
        yield from _queries_to_gates(config, layer, array)
    elif rest.endswith(("correction_bias", "expert_bias")):
        yield f"{layer}exp_probs_b.bias", array
    elif match := re.search(r"experts\.(\d+)\.(\w+)\.weight", rest):
        yield f"{layer}{LAST[match[2]]}_exps.weight@{match[1]}", array
    elif match := re.search(r"([qk])_layernorm\.norms\.(\d+)\.weight", rest):
        yield f"{layer}attn_{match[1]}_norm.weight@{match[2]}", array
    else:
        yield _one(architecture, config, layer, rest, array)


def _two(architecture: str, layer: str, rest: str, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Gate and up of one matrix, apart but for those of Gemma 4."""
    if architecture == "gemma4":
        yield f"{layer}ffn_gate_up_exps.weight", array
        return
    array = array.swapaxes(1, 2) if architecture == "llama4" else array
    kind = "shexp" if "shared_mlp" in rest else "exps"
    for part, half in zip(("gate", "up"), np.split(array, 2, axis=-2), strict=True):
        yield f"{layer}ffn_{part}_{kind}.weight", half


def _queries_to_gates(config: Config, layer: str, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Queries, keys, values and gates of Qwen3-Next, which are side by side for each key head."""
    keys, dk = config["linear_num_key_heads"], config["linear_key_head_dim"]
    by_key = array.reshape(keys, -1, array.shape[-1])
    each = (by_key.shape[1] - 2 * dk) // 2
    parts = np.split(by_key, [dk, 2 * dk, 2 * dk + each], axis=1)
    q, k, v, z = (part.reshape(-1, array.shape[-1]) for part in parts)
    yield f"{layer}attn_qkv.weight", np.concatenate((q, k, v))
    yield f"{layer}attn_gate.weight", z


def _one(
    architecture: str, config: Config, layer: str, rest: str, array: np.ndarray
) -> tuple[str, np.ndarray]:
    module, _, suffix = rest.rpartition(".")
    part = _part(architecture, module, suffix)
    if architecture.startswith("qwen3") and part.endswith("norm") and part != "ssm_norm":
        array = array + 1
    if architecture == "nemotron" and part.endswith("norm") and suffix == "weight":
        array = array + 1
    if architecture.startswith("qwen35") and "linear_attn" in rest:
        array = _tiled(config, part, array)
    if architecture in PAIRED and part in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        heads = len(array) // config["head_dim"] if architecture == "deci" else heads
        array = array.reshape(heads, 2, -1, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
    if architecture == "falcon-h1":
        array = array * _multiplied(config, part, array)
    if part in ("ssm_conv1d", "shortconv.conv") and suffix == "weight":
        array = array[:, 0]
    if suffix == "A_log":
        array = -np.exp(array)
    if part.startswith("ssm_conv1d_"):
        array = array[None]
    is_mamba = not architecture.startswith(("qwen3", "kimi"))
    if is_mamba and suffix in ("A_log", "D"):
        array = array[:, None]
    if is_mamba and part == "ssm_norm":
        array = array.reshape(config.get("n_groups", config.get("mamba_n_groups")), -1)
    endings = {"A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias"}
    whole = endings.get(suffix, f"{part}.{suffix}")
    if architecture == "falcon-h1" and part == "ffn_norm":
        whole = "ffn_norm"
    return layer + whole, array


def _part(architecture: str, module: str, suffix: str) -> str:
    """The name of a module in the file."""
    first, last = module.partition(".")[0], module.rpartition(".")[2]
    if first in _MODULES and last in STATES and "." in module:
        return STATES[last]
    if architecture == "lfm2" and module == "self_attn.out_proj":
        return "attn_output"
    if architecture == "falcon-h1" and module == "pre_ff_layernorm":
        return "ffn_norm"
    if module == "post_attention_layernorm" and architecture in (
        "deepseek2",
        "minicpm3",
        "granitehybrid",
        "llama4",
        "ernie4_5-moe",
        *MADE.values(),
    ):
        return "ffn_norm"
    if module in NAMES:
        return NAMES[module]
    if first in (*_MODULES, "self_attn") and suffix in ("A_log", "D", "dt_bias"):
        return ""
    is_shared = re.search("shared_(expert|mlp)", module) and last != "shared_expert_gate"
    shared = "_shexp" if is_shared else ""
    return LAST[last] + shared


def _tiled(config: Config, part: str, array: np.ndarray) -> np.ndarray:
    """Value heads in the order that brings the first of all key heads together."""
    keys, heads, dim = (
        config[f"linear_{name}"] for name in ("num_key_heads", "num_value_heads", "value_head_dim")
    )
    first = 2 * keys * config["linear_key_head_dim"] if part in ("attn_qkv", "ssm_conv1d") else 0
    each = dim if part in ("attn_qkv", "ssm_conv1d", "attn_gate", "ssm_out") else 1
    if part == "ssm_norm":
        return array
    axis = 1 if part == "ssm_out" else 0
    array = np.moveaxis(array, axis, 0)
    values = array[first:].reshape(keys, heads // keys, each, *array.shape[1:])
    tiled = values.swapaxes(0, 1).reshape(-1, *array.shape[1:])
    return np.moveaxis(np.concatenate((array[:first], tiled)), 0, axis)


def _multiplied(config: Config, part: str, array: np.ndarray) -> np.ndarray | float:
    """Falcon-H1's multipliers, which files have in the weights."""
    attended = config["attention_in_multiplier"]
    of_gate, of_down = config["mlp_multipliers"]
    if part == "ssm_in":
        inner, shared = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        counts = (inner, inner, shared, shared, config["mamba_n_heads"])
        return np.repeat(config["ssm_multipliers"], counts)[:, None] * config["ssm_in_multiplier"]
    return {
        "token_embd": config["embedding_multiplier"],
        "output": config["lm_head_multiplier"],
        "attn_q": attended,
        "attn_v": attended,
        "attn_k": attended * config["key_multiplier"],
        "attn_output": config["attention_out_multiplier"],
        "ssm_out": config["ssm_out_multiplier"],
        "ffn_gate": of_gate,
        "ffn_down": of_down,
    }.get(part, 1.0)
