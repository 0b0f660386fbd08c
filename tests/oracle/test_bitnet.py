"""Models of BitNet's weights against transformers' linear classes for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from oracle import randomize, theirs, token_ids, torch, transformers
from safetensors.torch import save_file
from tiny import Paged

from quire.config import EngineConfig
from quire.description import describe
from quire.quantize.kinds import Dense
from quire.weights.load import load

bitnet = pytest.importorskip("transformers.integrations.bitnet")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Theirs without rounding of activations, which ours rounds in smaller groups, and not compiled."""
    torch.compiler.set_stance("force_eager")
    monkeypatch.setattr(bitnet.BitLinear, "activation_quant", lambda self, x: (x, torch.ones(())))
    monkeypatch.setattr(bitnet.ActQuant, "apply", lambda x: x)
    yield
    torch.compiler.set_stance("default")


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("kind", ["BitNet", "Llama"])
@pytest.mark.parametrize(
    ("linear_class", "mode"),
    [("bitlinear", "offline"), ("autobitlinear", "offline"), ("autobitlinear", "online")],
)
def test_logits(kind: str, linear_class: str, mode: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    randomize(model)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stated = transformers.BitNetQuantConfig(linear_class=linear_class, quantization_mode=mode)
    model = bitnet.replace_with_bitnet_linear(model, ["lm_head"], stated).to_empty(device="cpu").eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    if mode == "offline":
        for module in [name for name, own in model.named_modules() if hasattr(own, "weight_scale")]:
            weight = tensors[f"{module}.weight"]
            scale = 1 / weight.abs().mean()
            tensors[f"{module}.weight"] = bitnet.pack_weights((weight * scale).round().clamp(-1, 1))
            tensors[f"{module}.weight_scale"] = (1 / scale if linear_class == "autobitlinear" else scale)[
                None
            ]
    save_file(tensors, tmp_path / "model.safetensors")
    raw = config.to_dict() | {
        "architectures": [f"{kind}ForCausalLM"],
        "quantization_config": stated.to_dict(),
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    if linear_class == "autobitlinear":  # as their loading does
        packed = {name: tensor for name, tensor in tensors.items() if tensor.dtype == torch.uint8}
        tensors |= {name: bitnet.unpack_weights(tensor, torch.float32) for name, tensor in packed.items()}
    model.load_state_dict(tensors)
    ids = token_ids(SIZES["vocab_size"])
    expected = theirs(model, ids)
    facts = describe(EngineConfig.from_keywords(model=str(tmp_path), device="reference"))
    plain = {name: Dense(weight.dense()) for name, weight in load(facts.weights).items()}
    paged = Paged(facts.program, plain)
    found = paged.prefill(paged.sequence(ids.tolist()))
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()
