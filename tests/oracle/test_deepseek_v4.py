"""Attention of DeepSeek-V4 Flash with its own sizes, in a small model, against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from oracle import randomize, torch, transformers

from quire import LLM, SamplingParams

# As config.json of the model says it, but for the sizes around attention
FLASH = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "compress_ratios": [0, 4, 128, 0],
    "compress_rope_theta": 160000,
    "hc_mult": 4,
    "head_dim": 512,
    "hidden_size": 128,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 12,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hash_layers": 1,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "o_groups": 8,
    "o_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 64,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "sliding_window": 128,
    "vocab_size": 64,
}
LENGTH = 290  # two entries of 128 tokens, and more of 4 than are chosen


def test_sizes_of_flash(tmp_path: Path) -> None:
    """Greedy tokens, in chunks that end within entries of both kinds."""
    torch.manual_seed(0)
    model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**FLASH)).float().eval()
    randomize(model)
    ids = np.random.default_rng(0).integers(0, 64, LENGTH).tolist()
    how = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(torch.tensor([ids]), **how)[0, LENGTH:].tolist()
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(FLASH))
    llm = LLM(str(tmp_path), device="native", max_num_batched_tokens=90, max_model_len=512)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, detokenize=False)
    (out,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    assert list(out.outputs[0].token_ids) == expected
    llm.close()
