"""Tiny models that see, of all families, in folders: random weights, templates like theirs; and pictures."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.numpy import save_file
from small_tokenizers import added, byte_level
from tiny import random_weights

from quire.models import read_model

SIDE = 40  # of pictures: as their processor takes them, 5 x 5 tokens
NUM_TOKENS = (SIDE // 8) ** 2
MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4]},
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0],
    },
}
_TEXT2 = {
    "model_type": "qwen2_vl_text",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
}
CONFIG2: dict[str, Any] = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "tie_word_embeddings": False,
    "text_config": _TEXT2,
    "vision_config": {
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": 32,
        "mlp_ratio": 2,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
CONFIG25: dict[str, Any] = {
    **CONFIG2,
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "vision_config": {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 24,  # squares of 3 x 3 tokens
        "fullatt_block_indexes": [1],
    },
}
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 4 * 64, "longest_edge": 64 * 64},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
# As that of Qwen3-VL, without descriptions of tools.
TEMPLATE = """\
{%- macro parts(content) %}
{%- if content is string %}{{- content }}{% else %}
{%- for part in content %}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif 'text' in part %}{{- part.text }}{% endif %}
{%- endfor %}
{%- endif %}
{%- endmacro %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' }}{{ parts(message.content) }}{{ '\\n</tool_response>' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' }}{{ parts(message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' }}{{ call.function | tojson }}{{ '\\n</tool_call>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


# As that of Gemma 3; its processor writes more around an image
TEMPLATE3 = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}{% else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<start_of_image>' }}{% else %}{{- part.text }}{% endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
MARKS3 = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
CONFIG3: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "query_pre_attn_scalar": 24,
        "max_position_embeddings": 2048,
        "sliding_window": 10,
        "sliding_window_pattern": 2,
    },
    "vision_config": {
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 4,
    },
    "mm_tokens_per_image": 16,
}
PROCESSOR3: dict[str, Any] = {"size": {"height": 32, "width": 32}, "resample": 2}

# As that of Gemma 4, whose processor writes marks around an image too
TEMPLATE4 = TEMPLATE3.replace("<start_of_image>", "<|image|>")
MARKS4 = ("<|image>", "<|image|>", "<image|>")
CONFIG4: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "text_config": {
        "model_type": "gemma4_text",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "global_head_dim": 32,
        "max_position_embeddings": 2048,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 10,
        "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": "vision",
    },
    "vision_config": {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "patch_size": 4,
        "pooling_kernel_size": 3,
        "position_embedding_size": 64,
        "standardize": True,
    },
}
# As the small ones are: inputs of layers, caches of other layers, clipped matrices, and causal images
CONFIG4E: dict[str, Any] = {
    **CONFIG4,
    "text_config": {
        **CONFIG4["text_config"],
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": 64,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "use_bidirectional_attention": None,
    },
    "vision_config": {**CONFIG4["vision_config"], "standardize": False, "use_clipped_linears": True},
}
PROCESSOR4: dict[str, Any] = {
    "image_processor_type": "Gemma4ImageProcessor",
    "patch_size": 4,
    "pooling_kernel_size": 3,
    "max_soft_tokens": 16,
    "do_normalize": False,
    "image_mean": [0.0, 0.0, 0.0],
    "image_std": [1.0, 1.0, 1.0],
}


# As that of Mistral Small 3.1, whose processor ends rows of an image with tokens of text
TEMPLATE_PIXTRAL = TEMPLATE3.replace("<start_of_image>", "[IMG]")
MARKS_PIXTRAL = ("[IMG_BREAK]", "[IMG]", "[IMG_END]")
CONFIG_PIXTRAL: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "text_config": {
        "model_type": "ministral3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "sliding_window": None,
    },
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "patch_size": 4,
        "hidden_act": "silu",
    },
    "tie_word_embeddings": False,
}
PROCESSOR_PIXTRAL: dict[str, Any] = {
    "image_processor_type": "PixtralImageProcessorFast",
    "patch_size": {"height": 4, "width": 4},
    "size": {"longest_edge": 36},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}

# As that of LightOnOCR, whose processor rounds to patches here
MARKS_LIGHTON = ("<other>", "<|image_pad|>")
CONFIG_LIGHTON: dict[str, Any] = {
    **CONFIG_PIXTRAL,
    "architectures": ["LightOnOcrForConditionalGeneration"],
    "model_type": "lighton_ocr",
    "text_config": {**CONFIG_PIXTRAL["text_config"], "model_type": "qwen3"},
}
PROCESSOR_LIGHTON: dict[str, Any] = {**PROCESSOR_PIXTRAL, "patch_size": {"height": 4, "width": 4}}

# As that of LFM2-VL, whose processor cuts large images into tiles, and writes marks before each
TEMPLATE_LFM2 = TEMPLATE3.replace("<start_of_image>", "<image>")
MARKS_LFM2 = (
    *("<|image_start|>", "<image>", "<|image_end|>", "<|img_thumbnail|>"),
    *("<|img_row_1_col_1|>", "<|img_row_1_col_2|>"),
)
CONFIG_LFM2: dict[str, Any] = {
    "architectures": ["Lfm2VlForConditionalGeneration"],
    "model_type": "lfm2_vl",
    "text_config": {
        "model_type": "lfm2",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "layer_types": ["conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False,
    },
    "vision_config": {
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 4,
        "num_patches": 25,
    },
    "projector_hidden_size": 40,
}
PROCESSOR_LFM2: dict[str, Any] = {
    "image_processor_type": "Lfm2VlImageProcessorFast",
    "encoder_patch_size": 4,
    "downsample_factor": 2,
    "min_image_tokens": 2,
    "max_image_tokens": 9,
    "tile_size": 16,
    "max_tiles": 4,
    "max_pixels_tolerance": 0.6,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}

# As that of SmolVLM, whose template takes images among parts of a message, and no text as a message
TEMPLATE_SMOLVLM = """\
<|im_start|>
{%- for message in messages %}
{{- message.role | capitalize + ':' }}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<image>' }}{% elif part.type == 'text' %}{{- part.text }}{% endif %}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}
"""
MARKS_SMOLVLM = (
    *("<fake_token_around_image>", "<image>", "<global-img>"),
    *("<row_1_col_1>", "<row_1_col_2>", "<row_2_col_1>", "<row_2_col_2>"),
)
CONFIG_SMOLVLM: dict[str, Any] = {
    "architectures": ["SmolVLMForConditionalGeneration"],
    "model_type": "smolvlm",
    "text_config": {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
    },
    "vision_config": {
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 18,  # of which two pixels are in no patch
        "patch_size": 4,
    },
    "scale_factor": 2,
}
PROCESSOR_SMOLVLM: dict[str, Any] = {
    "image_processor_type": "SmolVLMImageProcessor",
    "size": {"longest_edge": 36},
    "max_image_size": {"longest_edge": 18},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}

# As that of InternVL, whose processor cuts images into tiles, with marks around all of them alone
TEMPLATE_INTERNVL = TEMPLATE3.replace("<start_of_image>", "<IMG_CONTEXT>\\n")
MARKS_INTERNVL = ("<img>", "<IMG_CONTEXT>", "</img>")
CONFIG_INTERNVL: dict[str, Any] = {
    "architectures": ["InternVLForConditionalGeneration"],
    "model_type": "internvl",
    "text_config": {
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 2048,
    },
    "vision_config": {
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": [16, 16],
        "patch_size": [4, 4],
    },
    "tie_word_embeddings": False,
}
PROCESSOR_INTERNVL: dict[str, Any] = {
    "image_processor_type": "GotOcr2ImageProcessorFast",
    "size": {"height": 16, "width": 16},
    "max_patches": 4,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}

# As that of Llava 1.5, whose processor takes the middle of an image
TEMPLATE_LLAVA = TEMPLATE3.replace("<start_of_image>", "<image>\\n")
MARKS_LLAVA = ("<other>", "<image>")
CONFIG_LLAVA: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "text_config": {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
    },
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
    },
}
PROCESSOR_LLAVA: dict[str, Any] = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 16},
    "crop_size": {"height": 16, "width": 16},
}

# As those of Aya Vision, whose template writes another mark, and Command A Vision
TEMPLATE_AYA = TEMPLATE3.replace("<start_of_image>", "<image>")
MARKS_COHERE = (
    *("<|START_OF_IMG|>", "<|IMG_PATCH|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>"),
    *("TILE_GLOBAL", "TILE_1", "TILE_2"),
)
CONFIG_AYA: dict[str, Any] = {
    "architectures": ["AyaVisionForConditionalGeneration"],
    "model_type": "aya_vision",
    "text_config": {
        "model_type": "cohere2",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "sliding_window": 10,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 18,  # of which two pixels are in no patch
        "patch_size": 4,
    },
    "alignment_intermediate_size": 40,
}
CONFIG_COHERE2: dict[str, Any] = {
    **CONFIG_AYA,
    "architectures": ["Cohere2VisionForConditionalGeneration"],
    "model_type": "cohere2_vision",
}
PROCESSOR_COHERE: dict[str, Any] = {
    "image_processor_type": "GotOcr2ImageProcessorFast",
    "size": {"height": 18, "width": 18},
    "max_patches": 4,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}

# As that of GLM-4.1V, without tools and reasoning
MARKS_GLM = ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>")
TEMPLATE_GLM = TEMPLATE3.replace("<start_of_image>", "".join(MARKS_GLM))
CONFIG_GLM4V: dict[str, Any] = {
    "architectures": ["Glm4vForConditionalGeneration"],
    "model_type": "glm4v",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "glm4v_text",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"type": "default", "mrope_section": [1, 1, 2]},
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "image_size": 24,
        "patch_size": 4,
        "out_hidden_size": 32,
    },
}
CONFIG_GLM_OCR: dict[str, Any] = {
    **CONFIG_GLM4V,
    "architectures": ["GlmOcrForConditionalGeneration"],
    "model_type": "glm_ocr",
    "text_config": {
        **CONFIG_GLM4V["text_config"],
        "model_type": "glm_ocr_text",
        "head_dim": 16,
        "partial_rotary_factor": 1.0,
        "rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]},
    },
}
PROCESSOR_GLM: dict[str, Any] = {
    **PROCESSOR,
    "image_processor_type": "Glm4vImageProcessor",
    "size": {"shortest_edge": 2 * 4 * 64, "longest_edge": 2 * 64 * 64},
}

# As that of PaddleOCR-VL
MARKS_PADDLE = ("<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>")
TEMPLATE_PADDLE = TEMPLATE3.replace("<start_of_image>", "".join(MARKS_PADDLE))
CONFIG_PADDLE: dict[str, Any] = {
    "architectures": ["PaddleOCRVLForConditionalGeneration"],
    "model_type": "paddleocr_vl",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "paddleocr_vl_text",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "max_position_embeddings": 2048,
        "use_bias": False,
        "rope_scaling": {"rope_type": "default", "mrope_section": [3, 4, 5]},
    },
    "vision_config": {
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 22,  # 5 x 5 learned positions
        "patch_size": 4,
        "temporal_patch_size": 2,  # as published, where one frame is meant
    },
}
PROCESSOR_PADDLE: dict[str, Any] = {
    "image_processor_type": "PaddleOCRVLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 1,
    "min_pixels": 4 * 64,
    "max_pixels": 64 * 64,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}

# As that of Llama 4, whose processor cuts images into tiles, and writes marks between these
TEMPLATE_LLAMA4 = TEMPLATE3.replace("<start_of_image>", "<|image|>")
MARKS_LLAMA4 = (
    *("<|image_start|>", "<|patch|>", "<|image_end|>", "<|image|>"),
    *("<|tile_x_separator|>", "<|tile_y_separator|>"),
)
CONFIG_LLAMA4: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text",
        "hidden_size": 32,
        "intermediate_size": 32,
        "intermediate_size_mlp": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "moe_layers": [],
        "no_rope_layers": [1, 0],
        "attention_chunk_size": 20,
        "max_position_embeddings": 2048,
    },
    "vision_config": {
        "hidden_size": 24,
        "intermediate_size": 96,  # four patches
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
        "projector_input_dim": 40,
        "projector_output_dim": 40,
    },
}
PROCESSOR_LLAMA4: dict[str, Any] = {
    "image_processor_type": "Llama4ImageProcessorFast",
    "size": {"height": 16, "width": 16},
    "max_patches": 4,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def write_qwen3_vl(folder: Path, config: dict[str, Any] = CONFIG) -> Path:
    """Write the model."""
    return _write(folder, config, PROCESSOR, MARKS, TEMPLATE)


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a Qwen2-VL as it was published, with text_config's fields beside others."""
    text = {**config["text_config"], "model_type": config["model_type"]}
    return text | {key: value for key, value in config.items() if key != "text_config"}


def write_gemma3(
    folder: Path, config: dict[str, Any] = CONFIG3, processor: dict[str, Any] = PROCESSOR3
) -> Path:
    """Write the model."""
    return _write(folder, config, processor, MARKS3, TEMPLATE3)


def write_gemma4(folder: Path, config: dict[str, Any] = CONFIG4) -> Path:
    """Write the model."""
    return _write(folder, config, PROCESSOR4, MARKS4, TEMPLATE4)


def write_pixtral(folder: Path, config: dict[str, Any] = CONFIG_PIXTRAL) -> Path:
    """Write the model."""
    return _write(folder, config, PROCESSOR_PIXTRAL, MARKS_PIXTRAL, TEMPLATE_PIXTRAL)


def write_lighton(folder: Path) -> Path:
    """Write the model."""
    template = TEMPLATE3.replace("<start_of_image>", MARKS_LIGHTON[1])
    return _write(folder, CONFIG_LIGHTON, PROCESSOR_LIGHTON, MARKS_LIGHTON, template)


def write_lfm2_vl(folder: Path, config: dict[str, Any] = CONFIG_LFM2) -> Path:
    """Write the model."""
    return _write(folder, config, PROCESSOR_LFM2, MARKS_LFM2, TEMPLATE_LFM2)


def write_glm4v(folder: Path, config: dict[str, Any] = CONFIG_GLM4V) -> Path:
    """Write the model."""
    return _write(folder, config, PROCESSOR_GLM, MARKS_GLM, TEMPLATE_GLM)


def write_llama4(folder: Path, config: dict[str, Any] = CONFIG_LLAMA4) -> Path:
    """Write the model."""
    return _write(folder, config, PROCESSOR_LLAMA4, MARKS_LLAMA4, TEMPLATE_LLAMA4)


def write_paddleocr_vl(folder: Path, config: dict[str, Any] = CONFIG_PADDLE) -> Path:
    """Write the model."""
    return _write(folder, config, PROCESSOR_PADDLE, MARKS_PADDLE, TEMPLATE_PADDLE)


def write_smolvlm(folder: Path, config: dict[str, Any] = CONFIG_SMOLVLM) -> Path:
    """Write the model."""
    return _write(folder, config, PROCESSOR_SMOLVLM, MARKS_SMOLVLM, TEMPLATE_SMOLVLM)


def write_internvl(folder: Path, config: dict[str, Any] = CONFIG_INTERNVL) -> Path:
    """Write the model."""
    return _write(folder, config, PROCESSOR_INTERNVL, MARKS_INTERNVL, TEMPLATE_INTERNVL)


def write_llava(folder: Path, config: dict[str, Any] = CONFIG_LLAVA) -> Path:
    """Write the model."""
    return _write(folder, config, PROCESSOR_LLAVA, MARKS_LLAVA, TEMPLATE_LLAVA)


def write_cohere(folder: Path, config: dict[str, Any] = CONFIG_AYA) -> Path:
    """Write the model."""
    template = TEMPLATE_AYA if config is CONFIG_AYA else TEMPLATE_AYA.replace("<image>", MARKS_COHERE[1])
    return _write(folder, config, PROCESSOR_COHERE, MARKS_COHERE, template)


def _write(
    folder: Path, config: dict[str, Any], processor: dict[str, Any], marks: tuple[str, ...], template: str
) -> Path:
    """Write a model. The second mark stands for tokens of images."""
    ids = _write_tokenizer(folder, marks, template)
    size = {"vocab_size": ids[-1] + 1}
    sized = {"text_config": config["text_config"] | size} if "text_config" in config else size
    config = {**config, **sized, "image_token_id": ids[1]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    model = read_model(config, processor)
    assert model.vision is not None
    arrays, turned = {}, set()
    for program in (model.program, model.vision.program):
        specs, weights = program.weights(), random_weights(program)
        for name, spec in specs.items():
            (source,) = spec.sources
            array = weights[name].array.reshape(spec.stored or spec.shape)
            if (
                spec.rows is not None and array.ndim == 3
            ):  # of experts whose gates are in one tensor with others
                both = np.zeros((len(array), spec.rows.period, array.shape[2]), np.float32)
                arrays.setdefault(source, both)[:, spec.rows.of(spec.rows.period)] = array
            else:
                arrays[source] = array
            if spec.transposed is True:
                turned.add(source)
    for source in turned:
        arrays[source] = arrays[source].swapaxes(-1, -2)
    arrays = {source: array.copy() for source, array in arrays.items()}
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    return folder


def _write_tokenizer(folder: Path, marks: tuple[str, ...], template: str) -> list[int]:
    """Write the tokenizer; return the ids of the marks, the last of all."""
    byte_level(folder)
    path, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    data = json.loads(path.read_text())
    first = max(token["id"] for token in data["added_tokens"]) + 1
    ids = [first + number for number in range(len(marks))]
    data["added_tokens"] += [added(*token) for token in zip(ids, marks, strict=True)]
    path.write_text(json.dumps(data))
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": template}))
    return ids


def picture(seed: int, width: int = SIDE, height: int = SIDE, kind: str = "PNG") -> bytes:
    """Return the file of a picture of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def data_url(data: bytes, kind: str = "png") -> str:
    """Return a file as a data: URL."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
