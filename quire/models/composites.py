"""The composite architectures: their text models, by names of the registry, and their towers."""

from __future__ import annotations

from quire.models.composite import Composite
from quire.models.left_out import AUDIO, VISION
from quire.models.vision import qwen3_vl_tower
from quire.models.vision_cohere import aya_vision_tower, cohere2_vision_tower
from quire.models.vision_gemma import gemma3_tower
from quire.models.vision_gemma4 import gemma4_tower
from quire.models.vision_glm4v import glm4v_moe_tower, glm4v_tower, glm_ocr_tower
from quire.models.vision_idefics3 import idefics3_tower
from quire.models.vision_internvl import internvl_tower
from quire.models.vision_lfm2 import lfm2_vl_tower
from quire.models.vision_llama4 import llama4_tower
from quire.models.vision_llava import llava_tower
from quire.models.vision_paddleocr import paddleocr_tower
from quire.models.vision_pixtral import lighton_ocr_tower, pixtral_tower
from quire.models.vision_qwen2 import qwen2_5_vl_tower, qwen2_vl_tower

_TOWERS = {"vision_config": VISION, "audio_config": AUDIO}
_LIGHTON_OCR = Composite({"": "Qwen3ForCausalLM"}, tied=True, tower=lighton_ocr_tower)
_KIMI_K25 = Composite({"deepseek_v3": "DeepseekV3ForCausalLM", "kimi_k2": "DeepseekV3ForCausalLM"}, tied=True)
_COHERE = {"cohere2": "Cohere2ForCausalLM", "cohere": "CohereForCausalLM"}
COMPOSITES: dict[str, Composite] = {
    "AyaVisionForConditionalGeneration": Composite(_COHERE, tied=True, tower=aya_vision_tower),
    "Cohere2VisionForConditionalGeneration": Composite(_COHERE, tied=True, tower=cohere2_vision_tower),
    "Ernie4_5_VLMoeForConditionalGeneration": Composite({"": "ernie4_5_vl_moe_text"}, tied=True, flat=True),
    "Exaone4_5_ForConditionalGeneration": Composite({"": "Exaone4ForCausalLM"}, tied=False),
    "Gemma3ForConditionalGeneration": Composite({"": "Gemma3ForCausalLM"}, tied=True, tower=gemma3_tower),
    "Gemma3nForConditionalGeneration": Composite({"gemma3n_text": "Gemma3nForCausalLM"}, True, _TOWERS),
    "Gemma4ForConditionalGeneration": Composite(
        {"gemma4_text": "Gemma4ForCausalLM"}, True, _TOWERS, tower=gemma4_tower
    ),
    "Gemma4UnifiedForConditionalGeneration": Composite(
        {"gemma4_unified_text": "Gemma4UnifiedForCausalLM"}, True, _TOWERS
    ),
    "Glm4vForConditionalGeneration": Composite(
        {"": "glm4v_text"}, tied=False, tower=glm4v_tower, text_ties=True
    ),
    "Glm4vMoeForConditionalGeneration": Composite(
        {"": "glm4v_moe_text"}, tied=False, tower=glm4v_moe_tower, text_ties=True
    ),
    "Glm46VForConditionalGeneration": Composite(
        {"glm4v_text": "glm4v_text", "glm4v_moe_text": "glm4v_moe_text"}, tied=False, tower=glm4v_tower
    ),
    "GlmOcrForConditionalGeneration": Composite(
        {"": "glm_ocr_text"}, tied=False, tower=glm_ocr_tower, text_ties=True
    ),
    "Idefics3ForConditionalGeneration": Composite(
        {"llama": "LlamaForCausalLM"}, tied=False, tower=idefics3_tower
    ),
    "InternVLForConditionalGeneration": Composite(
        {
            "qwen2": "Qwen2ForCausalLM",
            "qwen3": "Qwen3ForCausalLM",
            "qwen3_moe": "Qwen3MoeForCausalLM",
            "llama": "LlamaForCausalLM",
            "gpt_oss": "GptOssForCausalLM",
        },
        tied=True,
        tower=internvl_tower,
    ),
    "KimiK25ForConditionalGeneration": _KIMI_K25,
    "Kimi_K25ForConditionalGeneration": _KIMI_K25,  # as transformers has it
    "Lfm2VlForConditionalGeneration": Composite(
        {"lfm2": "Lfm2ForCausalLM", "lfm2_moe": "Lfm2MoeForCausalLM"}, True, tower=lfm2_vl_tower
    ),
    "Llama4ForConditionalGeneration": Composite({"": "Llama4ForCausalLM"}, tied=False, tower=llama4_tower),
    "LightOnOcrForConditionalGeneration": _LIGHTON_OCR,
    "LightOnOCRForConditionalGeneration": _LIGHTON_OCR,  # its name before transformers had it
    "LlavaForConditionalGeneration": Composite(
        {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"},
        tied=False,
        tower=llava_tower,
        text_ties=True,
    ),
    "Mistral3ForConditionalGeneration": Composite(
        {
            "mistral": "MistralForCausalLM",
            "ministral3": "Ministral3ForCausalLM",
            "mistral4": "Mistral4ForCausalLM",
        },
        tied=True,
        tower=pixtral_tower,
    ),
    "PaddleOCRVLForConditionalGeneration": Composite(
        {"": "paddleocr_vl_text"}, tied=True, tower=paddleocr_tower, flat=True
    ),
    "Qwen2VLForConditionalGeneration": Composite(
        {"": "qwen2_vl_text"}, tied=False, tower=qwen2_vl_tower, flat=True, text_ties=True
    ),
    "Qwen2_5_VLForConditionalGeneration": Composite(
        {"": "qwen2_vl_text"}, tied=False, tower=qwen2_5_vl_tower, flat=True, text_ties=True
    ),
    "Qwen3VLForConditionalGeneration": Composite({"": "qwen3_vl_text"}, tied=False, tower=qwen3_vl_tower),
    "Qwen3VLMoeForConditionalGeneration": Composite(
        {"": "qwen3_vl_moe_text"}, tied=False, tower=qwen3_vl_tower
    ),
    "Qwen3_5ForConditionalGeneration": Composite(
        {"": "Qwen3_5ForCausalLM"}, tied=False, tower=qwen3_vl_tower
    ),
    "Qwen3_5MoeForConditionalGeneration": Composite(
        {"": "Qwen3_5MoeForCausalLM"}, tied=False, tower=qwen3_vl_tower
    ),
    "SmolVLMForConditionalGeneration": Composite(
        {"llama": "LlamaForCausalLM"}, tied=False, tower=idefics3_tower
    ),
}
