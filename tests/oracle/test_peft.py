"""Adapters as PEFT makes, saves and computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import config_class, model_class, randomize, theirs, token_ids, torch

from quire import LLM, SamplingParams

peft = pytest.importorskip("peft")

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "all": {"r": 8, "lora_alpha": 8, "target_modules": "all-linear", "use_rslora": True},
    "expression": {"r": 3, "lora_alpha": 5, "target_modules": r".*\.self_attn\..*_proj"},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["o_proj", "down_proj"],
        "rank_pattern": {"model.layers.1.self_attn.o_proj": 6},
        "alpha_pattern": {"down_proj": 3},
    },
    "layers": {"r": 2, "lora_alpha": 8, "target_modules": ["o_proj"], "layers_to_transform": [1]},
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["Llama", "Phi3"])
def test_log_probabilities(kind: str, tmp_path: Path) -> None:
    ids = token_ids(SIZES["vocab_size"])
    model = model_class(kind)(config_class(kind)(**SIZES, **ENDS)).float().eval()
    randomize(model)
    model.save_pretrained(tmp_path / "model")
    expected = {}
    for name, config in CONFIGS.items():
        base = model_class(kind).from_pretrained(tmp_path / "model").float()
        adapted = peft.get_peft_model(base, peft.LoraConfig(init_lora_weights=False, **config)).eval()
        with torch.no_grad():
            for parameter, weight in adapted.named_parameters():
                if "lora_" in parameter:
                    torch.nn.init.normal_(weight, std=0.3)
        adapted.save_pretrained(tmp_path / "adapters" / name)
        expected[name] = scores(theirs(adapted, ids), ids)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    with LLM(str(tmp_path / "model"), device="reference", adapter_dir=str(tmp_path / "adapters")) as llm:
        for name, wanted in expected.items():
            (output,) = llm.generate([ids.tolist()], params, use_tqdm=False, lora_request=name)
            found = [next(iter(one.values())).logprob for one in output.prompt_logprobs[1:]]
            assert np.abs(np.array(found) - wanted).max() < 2e-4
            assert np.abs(wanted - scores(theirs(model, ids), ids)).max() > 0.1


def scores(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The log-probabilities of all tokens but the first."""
    logs = torch.log_softmax(torch.tensor(logits).double(), -1).numpy()
    return logs[np.arange(len(ids) - 1), ids[1:]]
