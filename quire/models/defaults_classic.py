"""The keys of families before Llama, as quire.models.defaults has them."""

from __future__ import annotations

from quire.models.defaults import GPT2, PLAIN, Defaults

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
GPT_BIGCODE: Defaults = {
    **{key: value for key, value in GPT2.items() if key != "scale_attn_by_inverse_layer_idx"},
    "hidden_act": "gelu_pytorch_tanh",
    "multi_query": True,
}
_SCALES = ("scale_attn_weights", "scale_attn_by_inverse_layer_idx")
_PLAIN_GPT2: Defaults = {key: value for key, value in GPT2.items() if key not in _SCALES}
GPT_NEO: Defaults = {
    **_PLAIN_GPT2,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "max_position_embeddings": 2048,
    "sliding_window": 256,
    "attention_types": None,
    "attention_layers": None,
}
GPTJ: Defaults = {
    **_PLAIN_GPT2,
    "vocab_size": 50400,
    "hidden_size": 4096,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "rotary_dim": 64,
}
