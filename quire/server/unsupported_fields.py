"""Fields of other servers that this one does not support: those refused, and those that change no answer.

Clients written for other servers send them, so every endpoint that generates text knows them. Supported
fields are typed fields of an endpoint's request; unknown ones are listed in `warnings`. Besides OpenAI's
fields these are vLLM's (protocol.py of its entrypoints), SGLang's (likewise) and llama.cpp's
(server-schema.cpp).
"""

from __future__ import annotations

from typing import Any

_OTHER_CONSTRAINT = "use structured_outputs or response_format"
_ONE_PROMPT = "include it in the prompt"
_NO_MEDIA = "this server reads text and images, and writes text"
_IN_MESSAGES = "send images as parts of messages"
_RESIZED = "images are resized as their model asks, to at most --max-image-tokens tokens"
_ONE_MODEL = "name an adapter as the model"
_ONE_ENGINE = "prompts and answers are computed by the same engine"
_THINK_LESS = "use max_tokens, or chat_template_kwargs where the template has a switch"
_OWN_SAMPLERS = "leave it out: the samplers are temperature, top_k, top_p, min_p and penalties"
_OWN_FORMAT = "leave it out: the format of answers follows from the chat template"

_BUDGETS = ("reasoning_budget_tokens", "thinking_budget_tokens", "thinking_token_budget")
# Unsupported samplers of llama.cpp: the greatest value at which each is off, or the least.
OFF_UP_TO = {
    **dict.fromkeys(("mirostat", "dynatemp_range", "xtc_probability", "dry_multiplier", "top_n_sigma"), 0),
    "min_keep": 1,
    "adaptive_target": -1,
}
OFF_FROM = {"typical_p": 1, "tfs_z": 1}
# Fields that would change the answer, or add to it -> what to use instead. They are refused by name unless
# their value has no effect: None or one in NEUTRAL.
REFUSED = {
    # OpenAI's
    **dict.fromkeys(("audio", "modalities"), _NO_MEDIA),
    "image": _IN_MESSAGES,
    **dict.fromkeys(("moderation", "web_search_options"), None),
    "best_of": "request n choices and choose among them",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "suffix": _ONE_PROMPT,
    # vLLM's
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _OTHER_CONSTRAINT),
    **dict.fromkeys(("guided_decoding_backend", "guided_whitespace_pattern"), _OTHER_CONSTRAINT),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params"), _ONE_ENGINE),
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs"), _RESIZED),
    "images": _IN_MESSAGES,
    **dict.fromkeys(("use_beam_search", "length_penalty", "repetition_detection"), None),
    **dict.fromkeys(("vllm_xargs", "watermarking"), None),
    "chat_template": "the model's own template is used; chat_template_kwargs sets its variables",
    "documents": _ONE_PROMPT,
    "logits_processors": "use logit_bias, allowed_token_ids or bad_words",
    "logprob_token_ids": "use logprobs",
    "prompt_embeds": "send text or token ids",
    "structural_tag": _OTHER_CONSTRAINT,
    # SGLang's
    **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room"), _ONE_ENGINE),
    **dict.fromkeys(("custom_logit_processor", "custom_params"), "use logit_bias or bad_words"),
    **dict.fromkeys(("images_config", "max_dynamic_patch", "min_dynamic_patch"), _RESIZED),
    **dict.fromkeys(("regex", "ebnf"), _OTHER_CONSTRAINT),
    **dict.fromkeys(("return_hidden_states", "return_meta_info", "return_routed_experts", "task"), None),
    "input_ids": "use /v1/completions, whose prompt may be token ids",
    "no_stop_trim": "use include_stop_str_in_output",
    "separate_reasoning": "reasoning is never part of the content",
    "session_params": "nothing is kept between requests: send the whole conversation",
    "stop_regex": "use stop",
    "use_audio_in_video": _NO_MEDIA,
    # llama.cpp's
    **dict.fromkeys(("samplers", *OFF_UP_TO, *OFF_FROM), _OWN_SAMPLERS),
    **dict.fromkeys(("chat_format", "chat_parser", "generation_prompt", "reasoning_format"), _OWN_FORMAT),
    **dict.fromkeys(("grammar", "json_schema"), _OTHER_CONSTRAINT),
    **dict.fromkeys(("n_indent", "post_sampling_probs"), None),
    **dict.fromkeys(("n_predict", "t_max_predict_ms", "t_max_prompt_ms"), "use max_tokens"),
    **dict.fromkeys(("repeat_last_n", "penalize_nl"), "leave it out: penalties apply to all tokens"),
    "n_cmpl": "use n",
    "n_probs": "use logprobs",
    "parse_tool_calls": _OWN_FORMAT,
    "repeat_penalty": "use repetition_penalty",
    # Names that differ between servers
    **dict.fromkeys(("lora", "lora_path", "lora_request"), _ONE_MODEL),
    **dict.fromkeys(_BUDGETS, _THINK_LESS),
    **dict.fromkeys(
        ("return_prompt_text", "return_prompt_token_ids", "return_tokens"), "use return_token_ids"
    ),
}
NOTHING: tuple[Any, ...] = (False, [])
# Values without effect, where they are others than NOTHING and those of OFF_...
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("best_of", "length_penalty", "n", "n_cmpl", "repeat_penalty"), (1,)),
    **dict.fromkeys(("grammar", "suffix"), ("",)),
    **dict.fromkeys(("media_io_kwargs", "mm_processor_kwargs"), ({},)),
    **dict.fromkeys(("n_indent", "n_probs"), (0,)),
    **dict.fromkeys(("parse_tool_calls", "penalize_nl", "separate_reasoning"), (True,)),
    **dict.fromkeys(("repeat_last_n", *_BUDGETS), (-1,)),
    **dict.fromkeys(("t_max_predict_ms", "t_max_prompt_ms"), (-1, 0)),
    "function_call": ("none",),
    "modalities": ([], ["text"]),
    "reasoning_format": ("auto", "deepseek"),
    "truncation": ("disabled",),
}
# Details of penalties, without effect if there is no penalty.
OF_PENALTIES = frozenset({"repeat_last_n", "penalize_nl"})
# Fields that change no answer: metadata of the client, placement, speed, caching, and details of refused
# fields.
IGNORED = (
    # OpenAI's
    *("access_programs", "background_options", "client_metadata", "metadata", "prediction"),
    *(
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
    ),
    # vLLM's
    *("request_id", "return_mm_kwargs", "return_token_offsets", "routed_experts_prompt_start", "session_id"),
    *("spaces_between_special_tokens", "stream_interval"),
    # SGLang's
    *("custom_labels", "data_parallel_rank", "disagg_prefill_dp_rank", "extra_key", "ngram_corpus_id"),
    *("return_cached_tokens_details", "rid", "routed_dp_rank", "routed_experts_start_len"),
    "stream_reasoning",
    # llama.cpp's
    *("adaptive_decay", "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers"),
    *("dynatemp_exponent", "mirostat_eta", "mirostat_tau", "xtc_threshold"),
    *("backend_sampling", "cache_prompt", "grammar_lazy", "grammar_triggers", "id_slot", "n_cache_reuse"),
    *("n_discard", "n_keep", "preserved_tokens", "reasoning_budget_end_tag", "reasoning_budget_end_tags"),
    *("reasoning_budget_message", "reasoning_budget_start_tag", "reasoning_control", "response_fields"),
    *("return_progress", "sse_ping_interval", "timings_per_token", "verbose"),
)
IGNORED_PREFIX = "speculative."  # llama.cpp's lengths of drafts, which change no answer


def has_effect(name: str, value: Any) -> bool:
    """Return True if this value of a field of REFUSED, or of one like these, would change anything."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if name in OFF_UP_TO:
            return value > OFF_UP_TO[name]
        if name in OFF_FROM:
            return value < OFF_FROM[name]
    return value is not None and value not in NEUTRAL.get(name, NOTHING)
