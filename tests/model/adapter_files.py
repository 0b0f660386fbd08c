"""Tiny models and adapters (LoRA) in folders, as PEFT writes them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tiny import CONFIGS, random_weights, tiny

from quire.quantize.kinds import DTYPES

Arrays = dict[str, np.ndarray]
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
LAYERS = 2  # of tiny("llama")


def write_model(folder: Path, changed: Mapping[str, np.ndarray] | None = None) -> Path:
    """Write tiny("llama") with random weights, some of them replaced."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    save_file({**weights(), **(changed or {})}, folder / "model.safetensors")
    return folder


def weights() -> Arrays:
    return {name: weight.array for name, weight in random_weights(tiny("llama").program).items()}


def config(**changed: Any) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none", "target_modules": None, **changed}


def tensors(
    ranks: Mapping[str, int], seed: int, layers: tuple[int, ...] = (0, 1), dtype: str = "f32"
) -> Arrays:
    """The matrices of an adapter with these ranks of modules, large enough to change every answer."""
    rng, found, own = np.random.default_rng(seed), {}, weights()
    for layer in layers:
        for module, rank in ranks.items():
            name = f"model.layers.{layer}.{module}"
            out, width = own[f"{name}.weight"].shape
            for part, shape in (("lora_A", (rank, width)), ("lora_B", (out, rank))):
                array = rng.standard_normal(shape) * 0.7 / math.sqrt(shape[1])
                found[f"base_model.model.{name}.{part}.weight"] = array.astype(DTYPES[dtype])
    return found


def write_adapter(folder: Path, config: Mapping[str, Any], arrays: Arrays) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(arrays, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def write_three(folder: Path) -> Path:
    """Write adapters of different modules, ranks, scales and formats."""
    write_adapter(
        folder / "a",
        config(target_modules=["q_proj", "v_proj"]),
        tensors(dict.fromkeys(ATTENTION[::2], 4), 1),
    )
    everything = dict.fromkeys(ATTENTION + MLP, 2)
    write_adapter(
        folder / "b", config(r=2, lora_alpha=3, use_rslora=True), tensors(everything, 2, dtype="bf16")
    )
    patterns = {
        "rank_pattern": {"o_proj": 3, "^model.layers.1.mlp.up_proj": 5},
        "alpha_pattern": {"self_attn.o_proj": 9},
    }
    ranks = {"self_attn.o_proj": 3, "mlp.up_proj": 5, "mlp.down_proj": 4}
    write_adapter(folder / "c", config(layers_to_transform=[1], **patterns), tensors(ranks, 3, (1,)))
    return folder


# What PEFT multiplies the products of the three by
SCALES = {"a": lambda module: 1.5, "b": lambda module: 3 / math.sqrt(2)}
SCALES["c"] = lambda module: {"o_proj": 3.0, "up_proj": 1.2, "down_proj": 1.5}[module]


def merged(folder: Path, name: str) -> Arrays:
    """The weights of the model that an adapter changes, with it."""
    from safetensors import safe_open

    own, found = weights(), {}
    with safe_open(folder / name / "adapter_model.safetensors", "np") as file:
        for down in (key for key in file.keys() if ".lora_A." in key):  # noqa: SIM118  no mapping
            module = down.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            scale = SCALES[name](module.rpartition(".")[2])
            up = file.get_tensor(down.replace("lora_A", "lora_B")).astype(np.float32)
            delta = up @ file.get_tensor(down).astype(np.float32)
            found[f"{module}.weight"] = own[f"{module}.weight"] + np.float32(scale) * delta
    return found
