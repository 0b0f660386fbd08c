"""Checkpoints as GGUF files, for llama.cpp and its forks: int4 is Q4_0 and int8 is Q8_0, for every matrix.

That includes the tied embedding: 4.5 and 8.5 bits a weight.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import checkpoints
import gguf
import numpy as np
from gguf_names import NAMES

TYPES = {
    "int4": gguf.GGMLQuantizationType.Q4_0,
    "int8": gguf.GGMLQuantizationType.Q8_0,
    "bf16": gguf.GGMLQuantizationType.BF16,
}


def gguf_name(name: str) -> str:
    """The name of a tensor of a Llama checkpoint in a GGUF file."""
    if name.startswith("model.layers."):
        index, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
        return f"blk.{index}.{NAMES[part]}.weight"
    return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]


def interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q_proj or k_proj in the order of llama.cpp, whose rope turns neighbours, not halves."""
    half = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, 2, half, -1).swapaxes(1, 2).reshape(rows.shape)


@contextmanager
def _file(target: Path, architecture: str, config: dict[str, Any]) -> Iterator[gguf.GGUFWriter]:
    """A file with what all have; sizes of its architecture and tensors are added, and it is written."""
    writer = gguf.GGUFWriter(target, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    yield writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(checkpoint: Path, target: Path, kind: str) -> None:
    """Convert a checkpoint; without a vocabulary, for only token ids are used."""
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text("utf-8"))
    if "kv_lora_rank" in config:
        write_latent_gguf(checkpoint, config, target, kind)
        return
    if "linear_num_key_heads" in config:
        write_net_gguf(checkpoint, config, target, kind)
        return
    with _file(target, "llama", config) as writer:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_rope_dimension_count(config["head_dim"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        for name, bits in checkpoints.tensors(checkpoint):
            values = (bits.astype(np.uint32) << 16).view(np.float32)
            if values.ndim == 1:
                writer.add_tensor(gguf_name(name), values)
                continue
            if num_heads := heads.get(name.split(".")[-2]):
                values = interleaved(values, num_heads)
            data = gguf.quants.quantize(values, TYPES[kind])
            writer.add_tensor(gguf_name(name), data, raw_dtype=TYPES[kind])


LATENT_NAMES = {
    **{f"self_attn.{part}": f"attn_{part[:3]}" for part in ("q_a_proj", "q_b_proj")},
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.gate": "ffn_gate_inp",
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    **NAMES,
}


def write_latent_gguf(checkpoint: Path, config: dict[str, Any], target: Path, kind: str) -> None:
    """Convert a checkpoint with latent attention; keys and values have projections by head in llama.cpp."""
    with _file(target, "deepseek2", config) as writer:
        rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
        plain, values = config["qk_nope_head_dim"], config["v_head_dim"]
        heads, experts = config["num_attention_heads"], config["n_routed_experts"]
        writer.add_head_count_kv(1)
        writer.add_q_lora_rank(config["q_lora_rank"])
        writer.add_kv_lora_rank(rank)
        writer.add_key_length(rank + rotated)
        writer.add_value_length(rank)
        writer.add_key_length_mla(plain + rotated)
        writer.add_value_length_mla(values)
        writer.add_rope_dimension_count(rotated)
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_leading_dense_block_count(1)
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)

        def add(name: str, array: np.ndarray) -> None:
            if array.ndim == 1 or "ffn_gate_inp" in name:
                writer.add_tensor(name, array)
            else:
                data = gguf.quants.quantize(array, TYPES[kind])
                writer.add_tensor(name, data, raw_dtype=TYPES[kind])

        stacks: dict[str, list[np.ndarray]] = {}
        for name, bits in checkpoints.tensors(checkpoint):
            array = (bits.astype(np.uint32) << 16).view(np.float32)
            if not name.startswith("model.layers."):
                add(gguf_name(name), array)
                if "embed" in name:
                    add("output.weight", array)
                continue
            index, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
            if ".experts." in part:
                parts = stacks.setdefault(f"blk.{index}.ffn_{part.split('.')[-1][:-5]}_exps.weight", [])
                parts.append(gguf.quants.quantize(array, TYPES[kind]))
            elif part.endswith("e_score_correction_bias"):
                add(f"blk.{index}.exp_probs_b.bias", array)
            elif part == "self_attn.kv_b_proj":
                keys, of_values = np.split(array.reshape(heads, plain + values, rank), [plain], axis=1)
                add(f"blk.{index}.attn_k_b.weight", np.ascontiguousarray(keys.swapaxes(1, 2)))
                add(f"blk.{index}.attn_v_b.weight", np.ascontiguousarray(of_values))
            else:
                add(f"blk.{index}.{LATENT_NAMES[part]}.weight", array)
        for name, parts in stacks.items():
            writer.add_tensor(name, np.stack(parts), raw_dtype=TYPES[kind])


NET_NAMES = {
    **NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}


def write_net_gguf(checkpoint: Path, config: dict[str, Any], target: Path, kind: str) -> None:
    """Convert a Qwen3.5 of random weights; norms, which are stored less one, are left as they are."""
    with _file(target, "qwen35", config) as writer:
        heads, dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_rope_dimension_count(config["head_dim"] // 4)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_full_attention_interval(config["full_attention_interval"])
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_inner_size(heads * dim)
        for name, bits in checkpoints.tensors(checkpoint):
            values = (bits.astype(np.uint32) << 16).view(np.float32)
            if not name.startswith("model.layers."):
                new = gguf_name(name)
            else:
                index, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
                special = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}
                new = f"blk.{index}." + (special.get(part) or f"{NET_NAMES[part]}.weight")
            if new.endswith("ssm_a"):
                values = -np.exp(values)
            if values.ndim == 1 or "conv1d" in new:
                writer.add_tensor(new, values.squeeze())
            else:
                writer.add_tensor(new, gguf.quants.quantize(values, TYPES[kind]), raw_dtype=TYPES[kind])
