"""Every key that a configuration class defines, with random values, present and absent, in config.json as a
stranger would write it: what transformers reads of it, Quire reads, or it refuses to.

And the noted defaults of the classes (tests/model/class_defaults.json) against those installed.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import (
    architecture,
    config_class,
    model_class,
    ours,
    randomize,
    theirs,
    token_ids,
    torch,
    transformers,
)

from quire.models.registry import FAMILIES

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs are not ours to fix

KINDS = [name.removesuffix("ForCausalLM").removesuffix("LMHeadModel") for name in FAMILIES]
CLASSES = json.loads((Path(__file__).parents[1] / "model" / "class_defaults.json").read_text())
ABSENT = "absent"
SAMPLES = 14  # of each family, so that each value of a key comes up at least once
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
}
GPT2_SIZES = {"vocab_size": 64, "n_embd": 64, "n_layer": 3, "n_head": 8}

_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 4.0}
_LONG = {"type": "longrope", "short_factor": 1.1, "long_factor": 3.0}  # lists once the size of heads is known
_ROPES = [
    ABSENT,
    None,
    {"rope_type": "default", "rope_theta": 300.0},
    {"type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16},
    {**_YARN, "original_max_position_embeddings": 32},
    {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False, "beta_fast": 8.0},
    {**_LLAMA3, "original_max_position_embeddings": 32},
    {**_LONG, "original_max_position_embeddings": 32},
    {**_LONG, "factor": 7.0},
]
_ROPES_OF_PHI3 = [
    ABSENT,
    {"rope_type": "default", "rope_theta": 300.0},
    {**_LONG, "factor": 7.0},
    {**_LONG, "type": "su", "original_max_position_embeddings": 32},
    {**_LONG, "type": "yarn", "attention_factor": 1.25},
]
_FULL, _SLIDING = "full_attention", "sliding_attention"
_NESTED = [
    ABSENT,
    None,
    {_FULL: {"rope_type": "linear", "factor": 3.0}, _SLIDING: {"rope_type": "default", "rope_theta": 50.0}},
    {_FULL: {"rope_theta": 700.0}, _SLIDING: {**_YARN, "original_max_position_embeddings": 32}},
]
_FLAG = [ABSENT, True, False]
_ACT = [ABSENT, "silu", "relu", "gelu_pytorch_tanh", "gelu_new"]
_EPS = [ABSENT, 1e-3, 0.1]
_CAP = [ABSENT, None, 4.0]
_SHARE = [ABSENT, 0.3, 1.5]

# key -> what it may say. Keys of one class stand in the configs of the others too.
VALUES: dict[str, list[Any]] = {
    "num_key_value_heads": [2, 8, 1, ABSENT],
    "head_dim": [8, 12, ABSENT],
    "max_position_embeddings": [128, 40, ABSENT],
    "n_positions": [128, ABSENT],
    "n_inner": [ABSENT, None, 70],
    "hidden_act": _ACT,
    "hidden_activation": _ACT,
    "activation_function": _ACT,
    "rms_norm_eps": _EPS,
    "layer_norm_eps": _EPS,
    "layer_norm_epsilon": _EPS,
    "tie_word_embeddings": _FLAG,
    "attention_bias": _FLAG,
    "mlp_bias": _FLAG,
    "rope_theta": [ABSENT, 500.0, 1e6],
    "rope_scaling": _ROPES,
    "rope_parameters": _ROPES,
    "original_max_position_embeddings": [ABSENT, 32, 64],
    "partial_rotary_factor": [ABSENT, 0.5, 1.0],
    "rope_local_base_freq": [ABSENT, 300.0],
    "sliding_window": [9, ABSENT, None],
    "use_sliding_window": _FLAG,
    "layer_types": [ABSENT, [_FULL, _SLIDING, _SLIDING], [_SLIDING, _SLIDING, _FULL]],
    "max_window_layers": [ABSENT, 0, 1, 2],
    "sliding_window_pattern": [ABSENT, 2, 3],
    "no_rope_layers": [ABSENT, None, [0, 1, 1], [1, 1, 1, 0]],
    "no_rope_layer_interval": [ABSENT, 2, 3],
    "query_pre_attn_scalar": [ABSENT, 4, 24],
    "attn_logit_softcapping": _CAP,
    "final_logit_softcapping": _CAP,
    "use_bidirectional_attention": [ABSENT, None, False],
    "embedding_multiplier": _SHARE,
    "residual_multiplier": _SHARE,
    "attention_multiplier": [ABSENT, 0.1, 0.3],
    "logits_scaling": _SHARE,
    "logit_scale": _SHARE,
    "num_experts": [8, 9, ABSENT],
    "num_local_experts": [8, 9, ABSENT],
    "num_experts_per_tok": [1, 3, ABSENT],
    "moe_intermediate_size": [16, ABSENT],
    "norm_topk_prob": _FLAG,
    "decoder_sparse_step": [ABSENT, 1, 2],
    "mlp_only_layers": [ABSENT, None, [], [1]],
    "clip_qkv": [ABSENT, None],
    "swiglu_alpha": [ABSENT, 1.702],
    "swiglu_limit": [ABSENT, 1.0, 30.0],
    "scale_attn_weights": _FLAG,
    "scale_attn_by_inverse_layer_idx": _FLAG,
    "reorder_and_upcast_attn": _FLAG,
    "add_cross_attention": [ABSENT, False],
    "use_cache": _FLAG,
    "output_router_logits": _FLAG,
    "initializer_range": [ABSENT, 0.5],
    "attention_dropout": [ABSENT, 0.5],
    "attn_pdrop": [ABSENT, 0.5],
    "embd_pdrop": [ABSENT, 0.5],
    "resid_pdrop": [ABSENT, 0.5],
    "router_aux_loss_coef": [ABSENT, 0.5],
    "router_jitter_noise": [ABSENT, 0.5],
    "pretraining_tp": [ABSENT, 1, 2],
    "pad_token_id": [ABSENT, None, 0],
    "bos_token_id": [ABSENT, 1],
    "eos_token_id": [ABSENT, None, 2],
    "summary_type": [ABSENT, "mean"],
    "summary_use_proj": _FLAG,
    "summary_activation": [ABSENT, "tanh"],
    "summary_proj_to_labels": _FLAG,
    "summary_first_dropout": [ABSENT, 0.5],
}
# Read of older checkpoints by classes that do not define them.
OLDER = ("rope_theta", "rope_scaling", "original_max_position_embeddings", "head_dim")
OWN_OLDER = {
    "Gemma3": ("sliding_window_pattern", "rope_local_base_freq"),
    "Cohere2": ("sliding_window_pattern",),
    "Glm4": ("partial_rotary_factor",),
    "Phi3": ("partial_rotary_factor",),
}
# transformers cannot do with these in a config of another family.
NOT_BESIDE = {"partial_rotary_factor", "head_dim", "rope_parameters", "rope_scaling"}


def test_the_noted_defaults_are_those_of_the_classes() -> None:
    """On a mismatch after an update of transformers: note the new ones, and see what they change."""
    common = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
    for kind in KINDS:
        fields = dataclasses.fields(config_class(kind))
        found = {field.name: field.default for field in fields if field.name not in common}
        assert CLASSES[architecture(kind)] == found


def sizes_of(kind: str) -> dict[str, int]:
    return GPT2_SIZES if kind == "GPT2" else SIZES


def keys_of(kind: str) -> list[str]:
    defined = [key for key in CLASSES[architecture(kind)] if key not in sizes_of(kind)]
    older = () if kind == "GPT2" else OLDER
    return sorted({*defined, *older, *OWN_OLDER.get(kind, ())})


def values_of(kind: str, key: str) -> list[Any]:
    if key in ("rope_parameters", "rope_scaling") and kind == "Phi3":
        return _ROPES_OF_PHI3
    if key == "rope_parameters" and kind == "Gemma3":
        return _NESTED
    if key == "num_key_value_heads" and kind in ("Qwen2", "Qwen3"):
        return [2, 8, 1]  # the default are 32 heads, which is more than there are
    if key == "head_dim" and kind in ("Phi3", "Olmo2", "Olmoe"):
        return [8, ABSENT]  # these are built for hidden_size / num_attention_heads alone
    if key == "sliding_window" and kind in ("Gemma2", "Gemma3", "Cohere2", "GptOss"):
        return [9, 20, ABSENT]  # they always have window layers
    if key == "pad_token_id" and kind in ("Phi3", "SmolLM3", "Glm4"):
        return [0, None]  # the default is beyond the vocabulary
    return VALUES[key]


def samples(kind: str) -> Iterator[dict[str, Any]]:
    """Configs that go through the values of every own key, and have a few keys of other families."""
    rng = random.Random(kind)
    own = keys_of(kind)
    turns = {key: rng.sample(list(islice(cycle(values_of(kind, key)), SAMPLES)), SAMPLES) for key in own}
    foreign = [key for key in VALUES if key not in own and key not in SIZES and key not in NOT_BESIDE]
    for i in range(SAMPLES):
        raw = {key: values[i] for key, values in turns.items()}
        raw |= {key: rng.choice(VALUES[key]) for key in rng.sample(foreign, 4)}
        if raw.get("rope_scaling", ABSENT) not in (ABSENT, None) and rng.random() < 0.5:
            raw["rope_scaling"] = ABSENT  # it counts more than rope_parameters, which would never count
        raw = {key: copy.deepcopy(value) for key, value in raw.items() if value != ABSENT}
        yield consistent(kind, {"architectures": [architecture(kind)], **sizes_of(kind), **raw})


def consistent(kind: str, raw: dict[str, Any]) -> dict[str, Any]:
    """Change what contradicts itself: lists of another length than heads have, windows that are not used."""
    width = raw.get("head_dim", CLASSES[architecture(kind)].get("head_dim")) or 64 // 8
    for scaling in (raw.get("rope_scaling"), raw.get("rope_parameters")):
        if scaling and "long_factor" in scaling:
            part = raw.get("partial_rotary_factor", 0.5) if kind == "Glm4" else 1.0
            part = raw.get("partial_rotary_factor", 1.0) if kind == "Phi3" else part
            for key in ("short_factor", "long_factor"):
                scaling[key] = [1 + (scaling[key] - 1) * i for i in range(int(width * part) // 2)]
        if scaling and kind == "Gemma3":  # where transformers 5 passes over what it took for granted before
            scaling.pop("truncate", None)
            scaling |= {"rope_type": scaling.pop("type")} if "type" in scaling else {}
    used = raw.get("use_sliding_window", False) and raw.get("sliding_window", 9) is not None
    if kind in ("Qwen2", "Qwen3", "SmolLM3") and not used:
        raw.pop("layer_types", None)
    return raw


def made(kind: str, raw: dict[str, Any], folder: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """Ids and transformers' logits of a random model with this config.json; None where it has none."""
    torch.manual_seed(0)
    ids = token_ids(SIZES["vocab_size"])
    try:
        config = config_class(kind).from_dict(copy.deepcopy(raw))
        config._attn_implementation = "eager"
        model = model_class(kind)(config).float().eval()
        randomize(model)
        logits = theirs(model, ids)
    except Exception:  # whatever it trips over: there is nothing to compare with
        return None
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(raw))
    return ids, logits


@pytest.mark.parametrize("kind", KINDS)
def test_random_values_of_every_key(kind: str, tmp_path: Path) -> None:
    compared = 0
    for number, raw in enumerate(samples(kind)):
        folder = tmp_path / str(number)
        if (result := made(kind, raw, folder)) is not None:
            ids, expected = result
            difference = np.abs(ours(folder, ids) - expected).max()
            assert difference <= 1e-4 * np.abs(expected).max(), f"{difference} {json.dumps(raw)}"
            compared += 1
    assert compared >= SAMPLES * 2 // 3
