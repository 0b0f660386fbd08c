"""Every family as a GGUF file: published tiny checkpoints, rewritten as llama.cpp's converters do it, must
give the logits that transformers gives. Names of tensors are those of gguf-py's tables.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_converted import FOLDERS as CONVERTED
from gguf_converted import MADE
from gguf_files import F16, F32, Q8_0, write
from gguf_pooled import ENCODERS
from safetensors import safe_open
from test_goldens import check_tiny_random
from tiny import Dense as Numbers
from tiny import Paged

from quire.models import read_model
from quire.models.registry import FAMILIES
from quire.program.passes import fuse
from quire.weights.gguf.architectures import ARCHITECTURES, DEEPSEEK_V2, MISTRAL, MIXTRAL, OLMO3
from quire.weights.gguf.model import GgufModel
from quire.weights.load import load
from quire.weights.plan import plan

# Folder of the checkpoint -> architecture in GGUF
FOLDERS = {
    "cohere2": "cohere2",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "glm4": "glm4",
    "gpt2": "gpt2",
    "gpt_oss": "gpt-oss",
    "granite": "granite",
    "llama": "llama",
    "llama-bias-headdim": "llama",
    "llama-rope-llama3": "llama",
    "llama-rope-yarn": "llama",
    "llama-tied": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "olmo2": "olmo2",
    "olmoe": "olmoe",
    "phi3": "phi3",
    "phi3-longrope": "phi3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "smollm3": "smollm3",
}
FOLDERS_2 = {name: name for name in ("ernie4_5", "gemma", "starcoder2")}  # of tiny-random-2
FOLDERS_2 |= {"qwen2_moe": "qwen2moe", "minimax_m2": "minimax-m2"}
# What a file cannot state: the converters know these sizes from the published models.
UNSTATED = {"gemma2": ("query_pre_attn_scalar",), "gemma3": ("query_pre_attn_scalar",)}
PAIRED = ("llama", "granite", "smollm3", "mistral3")

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
AFTER = {"post_attention_layernorm": "post_attention_norm"}  # of gemma2, gemma3, olmo2 and gpt-oss
EXPERTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
Arrays = dict[str, np.ndarray]


def metadata_of(architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    """The metadata that a converter writes for a config.json."""
    get = config.get
    scaling = get("rope_scaling") or {}
    heads, hidden = get("num_attention_heads", get("n_head")), get("hidden_size", get("n_embd"))
    dim = get("head_dim") or hidden // heads
    keys = {
        "context_length": get("max_position_embeddings", get("n_positions")),
        "embedding_length": hidden,
        "block_count": get("num_hidden_layers", get("n_layer")),
        "feed_forward_length": get("intermediate_size", 4 * hidden),
        "attention.head_count": heads,
        "attention.head_count_kv": get("num_key_value_heads", heads),
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.layer_norm_rms_epsilon": get("rms_norm_eps"),
        "attention.layer_norm_epsilon": get("layer_norm_eps", get("layer_norm_epsilon", get("norm_epsilon"))),
        "attention.sliding_window": get("sliding_window") if get("use_sliding_window") is None else None,
        "rope.freq_base": get("rope_theta"),
        "rope.dimension_count": get("rotary_dim") or int(dim * get("partial_rotary_factor", 1.0)),
        "rope.freq_base_swa": get("rope_local_base_freq"),
        "attn_logit_softcapping": get("attn_logit_softcapping"),
        "final_logit_softcapping": get("final_logit_softcapping"),
        "expert_count": get("num_experts", get("num_local_experts")),
        "expert_shared_feed_forward_length": get("shared_expert_intermediate_size"),
        "expert_used_count": get("num_experts_per_tok"),
        "expert_feed_forward_length": get("moe_intermediate_size", get("intermediate_size")),
        "logit_scale": get("logit_scale", get("logits_scaling")),
        "attention.scale": get("attention_multiplier"),
        "embedding_scale": get("embedding_multiplier"),
        "residual_scale": get("residual_multiplier"),
    }
    if scaling.get("rope_type") in ("linear", "yarn"):
        keys |= {"rope.scaling.type": scaling["rope_type"], "rope.scaling.factor": scaling["factor"]}
        keys["rope.scaling.original_context_length"] = scaling.get("original_max_position_embeddings")
    if get("original_max_position_embeddings"):
        keys["rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
    kinds = get("layer_types") or []
    if architecture in ("gemma3", "gemma2", "cohere2", "gpt-oss") and kinds:
        keys["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in kinds]
    stated = {f"{architecture}.{key}": value for key, value in keys.items() if value is not None}
    return {"general.architecture": architecture, "tokenizer.ggml.model": "no_vocab", **stated}


def read(folder: Path) -> Arrays:
    found: Arrays = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="np") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def in_pairs(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head in pairs, as the converter permutes them."""
    half = array.shape[0] // heads // 2
    return array.reshape(heads, 2, half, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def converted(architecture: str, config: dict[str, Any], tensors: Arrays) -> Arrays:
    """The tensors of a GGUF file."""
    found: Arrays = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    names = {**NAMES, **(AFTER if architecture in ("gemma2", "gemma3", "olmo2", "gpt-oss") else {})}
    for name, array in tensors.items():
        layer, rest = layer_of(name)
        module, _, suffix = rest.rpartition(".")
        if expert := re.fullmatch(r".*experts\.(\d+)\.(\w+)", module):
            stack = stacks.setdefault(f"{layer}ffn_{EXPERTS[expert[2]]}_exps.weight", {})
            stack[int(expert[1])] = array
            continue
        if module == "mlp.experts" or suffix == "sinks":
            found |= {layer + part: own for part, own in of_gpt_oss(suffix, array).items()}
            continue
        if suffix == "e_score_correction_bias":
            found[f"{layer}exp_probs_b.bias"] = array
            continue
        part = names[module]
        if architecture == "gpt2" and array.ndim == 2 and layer:
            array = array.T
        if architecture in ("gemma", "gemma2", "gemma3") and part.endswith("norm"):
            array = array.astype(np.float32) + 1
        if architecture in PAIRED and part in ("attn_q", "attn_k"):
            heads = "num_attention_heads" if part == "attn_q" else "num_key_value_heads"
            array = in_pairs(array, config[heads])
        found[f"{layer}{part}.{suffix}"] = array
    found |= {name: np.stack([own[i] for i in range(len(own))]) for name, own in stacks.items()}
    return found | rope_factors(config)


def layer_of(name: str) -> tuple[str, str]:
    if match := re.fullmatch(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+)", name):
        return f"blk.{match[1]}.", match[2]
    return "", name


def of_gpt_oss(name: str, array: np.ndarray) -> Arrays:
    """Sinks; experts apart, gate and up apart, matrices [out, in]."""
    if name == "sinks":
        return {"attn_sinks.weight": array}
    suffix = "bias" if name.endswith("_bias") else "weight"
    if suffix == "weight":
        array = array.swapaxes(1, 2)
    if name.startswith("down"):
        return {f"ffn_down_exps.{suffix}": array}
    return {f"ffn_gate_exps.{suffix}": array[:, ::2], f"ffn_up_exps.{suffix}": array[:, 1::2]}


def rope_factors(config: dict[str, Any]) -> Arrays:
    """Llama 3's divisors of each frequency, by the formula of Meta's code; LongRoPE's as stated."""
    scaling = config.get("rope_scaling") or {}
    if "short_factor" in scaling:
        return {
            "rope_factors_short.weight": np.array(scaling["short_factor"]),
            "rope_factors_long.weight": np.array(scaling["long_factor"]),
        }
    if scaling.get("rope_type") != "llama3":
        return {}
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    wavelengths = 2 * np.pi * config["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    low, high, length = (
        scaling[key] for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    smooth = np.clip((length / wavelengths - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": 1 / ((1 - smooth) / scaling["factor"] + smooth)}


# Families whose GGUF files are refused, or whose files are read as those of a family that computes the same.
NOT_IN_GGUF = {"Mistral4ForCausalLM", "Glm4MoeLiteForCausalLM", "Gemma4UnifiedForCausalLM"}
NOT_IN_GGUF |= {"ApertusForCausalLM"}
NOT_IN_GGUF |= {"Lfm3ForCausalLM", "HYV3ForCausalLM", "Dots1ForCausalLM", "SolarOpenForCausalLM"}
NOT_IN_GGUF |= {"OlmoHybridForCausalLM", "SarvamMoEForCausalLM", "SarvamMLAForCausalLM"}
NOT_IN_GGUF |= {f"{name}ForCausalLM" for name in ("VaultGemma", "FlexOlmo", "NanoChat", "IQuestCoder")}
NOT_IN_GGUF |= {f"{name}ForCausalLM" for name in ("Falcon", "GPTBigCode", "GPTNeo", "GPTJ", "CodeGen")}
NOT_IN_GGUF |= {"ExaoneMoeForCausalLM", "Cohere2MoeForCausalLM", "MiMoV2FlashForCausalLM", "BambaForCausalLM"}
# GraniteMoe is read as GraniteMoeShared without a shared expert.
NOT_IN_GGUF |= {f"{name}ForCausalLM" for name in ("Afmoe", "Cwm", "GPTNeoX", "Glm", "GraniteMoe", "Mellum")}
NOT_IN_GGUF |= {f"{name}ForCausalLM" for name in ("Youtu", "BitNet", "Helium")}
NOT_IN_GGUF |= {f"{name}ForCausalLM" for name in ("GraniteSWA", "GraniteMoeSWA", "HyperCLOVAX", "Jais2")}
NOT_IN_GGUF |= {f"{name}ForCausalLM" for name in ("BailingMoe", "DeepseekV4", "InternLM2", "InternLM3")}
NOT_IN_GGUF |= {"MinistralForCausalLM"}  # such files say llama
# Not compared with a checkpoint: there is none.
WITHOUT_CHECKPOINT = {"qwen2vl", "qwen3vl", "qwen3vlmoe", "mistral3", "lfm2moe", "nemotron_h"}
WITHOUT_CHECKPOINT |= {"exaone4", "hunyuan-dense", "seed_oss", "internlm2"}


def test_every_architecture_is_tested() -> None:
    compared = {*FOLDERS.values(), *FOLDERS_2.values(), *CONVERTED.values(), *MADE.values()}
    encoders = {name for name, architecture in ARCHITECTURES.items() if architecture.encoder}
    assert encoders == {name for name, _ in ENCODERS.values()} | {"gemma-embedding"}
    assert compared | WITHOUT_CHECKPOINT | encoders == set(ARCHITECTURES)
    variants = (MISTRAL, MIXTRAL, OLMO3, DEEPSEEK_V2)
    decoders = [architecture for name, architecture in ARCHITECTURES.items() if name not in encoders]
    names = {architecture.name for architecture in (*decoders, *variants)}
    assert names == set(FAMILIES) - NOT_IN_GGUF


def opened(folder: Path, tmp_path: Path, kind: int = F32) -> GgufModel:
    architecture = {**FOLDERS, **FOLDERS_2}[folder.name]
    config = json.loads((folder / "config.json").read_text())
    arrays = converted(architecture, config, read(folder))
    tensors = {}
    for name, array in arrays.items():
        plain = array.ndim < 2 or array.shape[-1] % 32 or "embd" in name or name.endswith(".bias")
        tensors[name] = (array, F32 if plain else kind)
    return GgufModel(write(tmp_path / f"{kind}.gguf", metadata_of(architecture, config), tensors))


def test_olmo_with_windows_is_the_third(shared_data: Path, tmp_path: Path) -> None:
    folder = shared_data / "models" / "tiny-random" / "olmo2"
    config = json.loads((folder / "config.json").read_text())
    arrays = {name: (array, F32) for name, array in converted("olmo2", config, read(folder)).items()}
    metadata = metadata_of("olmo2", config) | {"olmo2.attention.sliding_window": 24}
    stated = GgufModel(write(tmp_path / "olmo.gguf", metadata, arrays)).config()
    assert (stated["architectures"], stated["sliding_window"]) == (["Olmo3ForCausalLM"], 24)
    read_model(stated)


def test_internlm2_is_llama(shared_data: Path, tmp_path: Path) -> None:
    folder = shared_data / "models" / "tiny-random" / "llama"
    config = json.loads((folder / "config.json").read_text())
    arrays = {name: (array, F32) for name, array in converted("llama", config, read(folder)).items()}
    of_both = [
        GgufModel(write(tmp_path / f"{name}.gguf", metadata_of(name, config), arrays))
        for name in ("llama", "internlm2")
    ]
    one, other = (source.config() for source in of_both)
    assert one == other
    program = read_model(one).program
    weights = [load(plan(program.weights(), source.tensors())) for source in of_both]
    for name, weight in weights[0].items():
        np.testing.assert_array_equal(weight.dense(), weights[1][name].dense())


def test_heads_of_glm4_are_in_halves_with_sections(shared_data: Path, tmp_path: Path) -> None:
    """Those of GLM-4.1V and 4.6V-Flash: of the numbers that rotate, the even ones, then the odd ones."""
    folder = shared_data / "models" / "tiny-random" / "glm4"
    config = json.loads((folder / "config.json").read_text())
    arrays, dim = converted("glm4", config, read(folder)), config["head_dim"]
    turned = dim // 2
    order = [*range(0, turned, 2), *range(1, turned, 2), *range(turned, dim)]
    for name, array in arrays.items():
        if ".attn_q." in name or ".attn_k." in name:
            heads = array.reshape(-1, dim, *array.shape[1:])
            arrays[name] = heads[:, order].reshape(array.shape)
    metadata = metadata_of("glm4", config) | {"glm4.rope.dimension_sections": [1, 1, turned // 2 - 2, 0]}
    tensors = {name: (array, F32) for name, array in arrays.items()}
    source, plain = GgufModel(write(tmp_path / "halves.gguf", metadata, tensors)), opened(folder, tmp_path)
    specs = read_model(source.config()).program.weights()
    found, expected = (load(plan(specs, own.tensors(), ignored=())) for own in (source, plain))
    assert any(name.endswith("q_proj.bias") for name in specs)
    for name in specs:
        assert np.array_equal(found[name].dense(), expected[name].dense()), name


@pytest.mark.parametrize(("architecture", "name"), [("mistral3", "Mistral"), ("exaone4", "Exaone4")])
def test_a_file_that_states_no_window_has_none(architecture: str, name: str, tmp_path: Path) -> None:
    sizes = {
        "context_length": 8192,
        "embedding_length": 32,
        "block_count": 2,
        "feed_forward_length": 64,
        "attention.head_count": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    metadata = {f"{architecture}.{key}": value for key, value in sizes.items()}
    metadata |= {"general.architecture": architecture, "tokenizer.ggml.model": "no_vocab"}
    table = {"token_embd.weight": (np.zeros((64, 32), np.float32), F32)}
    stated = GgufModel(write(tmp_path / "model.gguf", metadata, table)).config()
    assert stated["architectures"] == [f"{name}ForCausalLM"]
    config = read_model(stated).config
    assert [config.window(layer) for layer in range(2)] == [None, None]
    assert config.sliding_window is None


@pytest.mark.parametrize("name", [*FOLDERS, *FOLDERS_2])
def test_logits(name: str, shared_data: Path, tmp_path: Path) -> None:
    folder = shared_data / "models" / ("tiny-random-2" if name in FOLDERS_2 else "tiny-random") / name
    source = opened(folder, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    unstated = {key: config[key] for key in UNSTATED.get(FOLDERS.get(name, name), ())}
    model = read_model(source.config() | unstated)
    assert model.architecture == config["architectures"][0]
    program = fuse(model.program)
    loaded = load(plan(program.weights(), source.tensors(), ignored=()))
    weights = {key: Numbers(weight.dense()) for key, weight in loaded.items()}
    check_tiny_random(folder, model, Paged(program, weights, num_blocks=300))


@pytest.mark.parametrize("kind", [F16, Q8_0])
@pytest.mark.parametrize("name", ["gpt_oss", "gpt2", "mixtral", "llama-bias-headdim"])
def test_other_types(name: str, kind: int, shared_data: Path, tmp_path: Path) -> None:
    """Experts, rows in pairs and transposed matrices are the same numbers, whatever their type."""
    folder = shared_data / "models" / "tiny-random" / name
    source = opened(folder, tmp_path)
    program = fuse(read_model(source.config()).program)
    exact = load(plan(program.weights(), source.tensors(), ignored=()))
    source = opened(folder, tmp_path, kind)
    rounded = load(plan(program.weights(), source.tensors(), ignored=()))
    kinds = set()
    for key, weight in rounded.items():
        kinds.add(weight.storage.kind)
        expected = exact[key].dense()
        largest = np.abs(expected).max()
        assert np.abs(weight.dense() - expected).max() <= largest / (250 if kind == Q8_0 else 2000), key
    assert kinds == {"f32", "q8_0" if kind == Q8_0 else "f16"}
