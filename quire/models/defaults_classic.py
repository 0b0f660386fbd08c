"""The keys of families before Llama, as quire.models.defaults has them."""

from __future__ import annotations

from quire.models.defaults import PLAIN, Defaults

FALCON: Defaults = {
    **{key: value for key, value in PLAIN.items() if key != "head_dim"},
    "vocab_size": 65024,
    "hidden_size": 4544,
    "num_attention_heads": 71,
    "intermediate_size": None,
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bias": False,
    "new_decoder_architecture": False,
    "multi_query": True,
    "parallel_attn": True,
    "num_ln_in_parallel_attn": None,
}
