"""Names of tensors of vision towers, by those in GGUF files, with * for the number of a layer."""

from __future__ import annotations

from collections.abc import Mapping


def _layers(module: str, names: Mapping[str, str]) -> dict[str, str]:
    return {f"v.blk.*.{part}": f"{module}.{name}" for part, name in names.items()}


def _siglip(module: str) -> dict[str, str]:
    return {
        "v.patch_embd": f"{module}.embeddings.patch_embedding",
        "v.position_embd": f"{module}.embeddings.position_embedding",
        **_layers(
            f"{module}.encoder.layers.*",
            {
                "ln1": "layer_norm1",
                **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
                "attn_out": "self_attn.out_proj",
                "ln2": "layer_norm2",
                "ffn_up": "mlp.fc1",
                "ffn_down": "mlp.fc2",
            },
        ),
        "v.post_ln": f"{module}.post_layernorm",
    }


GEMMA3, IDEFICS3, LFM2, VISUAL, GEMMA4, PIXTRAL = (
    {
        **_siglip("model.vision_tower"),
        "mm.soft_emb_norm": "model.multi_modal_projector.mm_soft_emb_norm",
        "mm.input_projection.weight": "model.multi_modal_projector.mm_input_projection_weight",
    },
    {
        **_siglip("model.vision_model"),
        "mm.model.fc": "model.connector.modality_projection.proj",
    },
    {
        **_siglip("model.vision_tower"),
        "mm.input_norm": "model.multi_modal_projector.layer_norm",
        "mm.1": "model.multi_modal_projector.linear_1",
        "mm.2": "model.multi_modal_projector.linear_2",
    },
    {
        "v.patch_embd": "model.visual.patch_embed.proj",
        "v.position_embd": "model.visual.pos_embed",
        **_layers(
            "model.visual.blocks.*",
            {
                "ln1": "norm1",
                "attn_qkv": "attn.qkv",
                "attn_out": "attn.proj",
                "ln2": "norm2",
                "ffn_up": "mlp.linear_fc1",
                "ffn_down": "mlp.linear_fc2",
            },
        ),
        "v.deepstack.*.norm": "model.visual.deepstack_merger_list.*.norm",
        "v.deepstack.*.fc1": "model.visual.deepstack_merger_list.*.linear_fc1",
        "v.deepstack.*.fc2": "model.visual.deepstack_merger_list.*.linear_fc2",
        "v.post_ln": "model.visual.merger.norm",
        "mm.0": "model.visual.merger.linear_fc1",
        "mm.2": "model.visual.merger.linear_fc2",
    },
    {
        "v.patch_embd": "model.vision_tower.patch_embedder.input_proj",
        "v.position_embd.weight": "model.vision_tower.patch_embedder.position_embedding_table",
        **_layers(
            "model.vision_tower.encoder.layers.*",
            {
                "ln1": "input_layernorm",
                **{f"attn_{part}": f"self_attn.{part}_proj.linear" for part in "qkv"},
                **{f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
                "attn_out": "self_attn.o_proj.linear",
                "attn_post_norm": "post_attention_layernorm",
                "ln2": "pre_feedforward_layernorm",
                **{f"ffn_{part}": f"mlp.{part}_proj.linear" for part in ("gate", "up", "down")},
                "ffn_post_norm": "post_feedforward_layernorm",
            },
        ),
        "v.std_bias": "model.vision_tower.std_bias",
        "v.std_scale": "model.vision_tower.std_scale",
        "mm.input_projection": "model.embed_vision.embedding_projection",
    },
    {
        "v.patch_embd": "model.vision_tower.patch_conv",
        "v.pre_ln": "model.vision_tower.ln_pre",
        **_layers(
            "model.vision_tower.transformer.layers.*",
            {
                "ln1": "attention_norm",
                **{f"attn_{part}": f"attention.{part}_proj" for part in "qkv"},
                "attn_out": "attention.o_proj",
                "ln2": "ffn_norm",
                **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
            },
        ),
        "mm.input_norm": "model.multi_modal_projector.norm",
        "mm.patch_merger": "model.multi_modal_projector.patch_merger.merging_layer",
        "mm.1": "model.multi_modal_projector.linear_1",
        "mm.2": "model.multi_modal_projector.linear_2",
    },
)
QWEN2_VL, QWEN2_5_VL = (
    {
        "v.patch_embd": "model.visual.patch_embed.proj",
        **_layers(
            "model.visual.blocks.*",
            {"ln1": "norm1", "attn_qkv": "attn.qkv", "attn_out": "attn.proj", "ln2": "norm2", **mlp},
        ),
        "v.post_ln": "model.visual.merger.ln_q",
        "mm.0": "model.visual.merger.mlp.0",
        "mm.2": "model.visual.merger.mlp.2",
    }
    for mlp in (
        {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    )
)
LLAMA4 = {
    "v.class_embd": "vision_model.class_embedding",
    "v.patch_embd": "vision_model.patch_embedding.linear",
    "v.position_embd.weight": "vision_model.positional_embedding_vlm",
    "v.pre_ln": "vision_model.layernorm_pre",
    **_layers(
        "vision_model.model.layers.*",
        {
            "ln1": "input_layernorm",
            **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
            "attn_out": "self_attn.o_proj",
            "ln2": "post_attention_layernorm",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
    ),
    "v.post_ln": "vision_model.layernorm_post",
    "mm.model.mlp.1": "vision_model.vision_adapter.mlp.fc1",
    "mm.model.mlp.2": "vision_model.vision_adapter.mlp.fc2",
    "mm.model.fc": "model.multi_modal_projector.linear_1",
}
