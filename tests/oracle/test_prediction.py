"""Prediction layers against their published formula, with transformers' classes for the layer itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import read_weights
from oracle import torch, transformers
from safetensors.torch import load_file

from quire.backends.reference import ReferenceBackend
from quire.models import read_model, read_prediction
from quire.models.left_out import in_use
from quire.program.batch import Batch
from quire.program.passes import fuse

# By folder: the class, beginnings of names in the layer and beside it, and what norms add to weights
CASES = {
    "qwen3_next": ("Qwen3Next", "mtp.layers.0.", "mtp.", 1.0),
    "qwen3_5": ("Qwen3_5", "mtp.layers.0.", "mtp.", 1.0),
    "deepseek_v3": ("DeepseekV3", "model.layers.3.", "model.layers.3.", 0.0),
    "glm4_moe": ("Glm4Moe", "model.layers.3.", "model.layers.3.", 0.0),
    "glm4_moe_lite": ("Glm4MoeLite", "model.layers.3.", "model.layers.3.", 0.0),
}
QWEN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm")


@pytest.mark.parametrize("name", CASES)
def test_a_prediction_layer(name: str, shared_data: Path) -> None:
    folder = shared_data / "models" / "tiny-random-2" / name
    ids = np.random.default_rng(0).integers(3, 200, 40)
    hidden = np.random.default_rng(1).standard_normal((40, 64)).astype(np.float32)
    hidden[0] = 0
    assert np.abs(_ours(folder, ids, hidden) - _theirs(folder, name, ids, hidden)).max() < 1e-3


def _ours(folder: Path, ids: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    raw = json.loads((folder / "config.json").read_text())
    layer, left_out = read_prediction(raw, lambda tensor: False), read_model(raw).program.left_out
    assert layer is not None
    layer = replace(fuse(layer), ignored=("*",), left_out=in_use(left_out))
    backend = ReferenceBackend(layer, read_weights(folder, layer), num_blocks=[3], block_size=16)
    return backend.execute(
        Batch(
            token_ids=ids,
            positions=np.arange(40),
            row_offsets=np.array([0, 40]),
            block_tables=(np.arange(3)[None],),
            context_lens=np.array([40]),
            slots=np.array([0]),
            variants=np.array([0]),
            logit_rows=np.arange(40),
            block_size=16,
            hidden=hidden,
        )
    )


def _theirs(folder: Path, name: str, ids: np.ndarray, hidden: np.ndarray) -> Any:
    kind, prefix, outer, offset = CASES[name]
    module = __import__(f"transformers.models.{name}.modeling_{name}", fromlist=["x"])
    config = transformers.AutoConfig.from_pretrained(folder)
    config = getattr(config, "text_config", config)
    config._attn_implementation = config._experts_implementation = "eager"
    number = config.num_hidden_layers - 1  # of a layer of the same kind
    layer = getattr(module, f"{kind}DecoderLayer")(config, number).float().eval()
    tensors = {key: value.float() for key, value in load_file(folder / "model.safetensors").items()}
    own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    own = _fused(own, layer.state_dict())
    layer.load_state_dict({key: own[key] for key in layer.state_dict()})
    of_token, of_hidden, product, last = QWEN if "qwen" in name else DEEPSEEK
    table = next(tensors[key] for key in tensors if key.endswith("model.embed_tokens.weight"))
    head = tensors.get("lm_head.weight", table)

    def norm(x: Any, part: str) -> Any:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps)
        return x * (offset + tensors[f"{outer}{part}.weight"])

    both = torch.cat([norm(table[torch.tensor(ids)], of_token), norm(torch.tensor(hidden), of_hidden)], -1)
    x = (both @ tensors[f"{outer}{product}.weight"].T)[None]
    names = [key for key in vars(module) if key.endswith("RotaryEmbedding") and "Vision" not in key]
    rotary = getattr(module, names[0])(config)
    positions = torch.arange(40)[None]
    mask = torch.full((40, 40), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        x = layer(x, position_embeddings=rotary(x, positions), attention_mask=mask, position_ids=positions)
        x = x[0] if isinstance(x, tuple) else x
        return (norm(x[0], last) @ head.T).numpy()


def _fused(own: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """The experts in one tensor each, as transformers has them."""
    count = sum(key.endswith(".up_proj.weight") and ".experts." in key for key in own)
    if "mlp.experts.gate_up_proj" in wanted:
        each = [
            {part: own[f"mlp.experts.{i}.{part}_proj.weight"] for part in ("gate", "up", "down")}
            for i in range(count)
        ]
        own["mlp.experts.gate_up_proj"] = torch.stack([torch.cat([e["gate"], e["up"]]) for e in each])
        own["mlp.experts.down_proj"] = torch.stack([e["down"] for e in each])
    return own
