"""Requests that no server may answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.bench.openai_api import CHAT, COMPLETIONS

# What must be refused: where, by which fields (or bytes), and with which status.
WRONG: Sequence[tuple[str, dict[str, Any] | bytes, int]] = (
    (COMPLETIONS, {"temperature": 3}, 400),
    (COMPLETIONS, {"temperature": "hot"}, 400),
    (COMPLETIONS, {"n": 0}, 400),
    (COMPLETIONS, {"n": 10**6}, 400),
    (COMPLETIONS, {"max_tokens": -2}, 400),
    (COMPLETIONS, {"min_tokens": 9, "max_tokens": 8}, 400),
    (COMPLETIONS, {"prompt": [1, 2, 1 << 30]}, 400),
    (COMPLETIONS, {"prompt": [1, "x"]}, 400),
    (COMPLETIONS, {"prompt": [1] * 70_000}, 400),
    (COMPLETIONS, {"logit_bias": {"x": 1}}, 400),
    (COMPLETIONS, {"allowed_token_ids": []}, 400),
    (COMPLETIONS, {"suffix": "x"}, 400),
    (COMPLETIONS, {"guided_regex": "x"}, 400),
    (COMPLETIONS, {"stream_options": {"include_usage": True}}, 400),
    (COMPLETIONS, {"structured_outputs": {"regex": "(((("}}, 400),
    (COMPLETIONS, {"structured_outputs": {"regex": "a", "choice": ["a"]}}, 400),
    (COMPLETIONS, {"structured_outputs": {"json": {"type": "no such type"}}}, 400),
    (COMPLETIONS, {"cache_salt": "a/b"}, 400),
    (CHAT, {"top_logprobs": 99, "logprobs": True}, 400),
    (CHAT, {"messages": []}, 400),
    (CHAT, {"messages": "hi"}, 400),
    (CHAT, {"tools": [{"type": "function"}]}, 400),
    (CHAT, {"tool_choice": "required"}, 400),
    (CHAT, {"chat_template": "{{ 1 }}"}, 400),
    (CHAT, {"model": "no-such-model"}, 404),
    (CHAT, b'{"messages": [', 400),
    (CHAT, b'{"messages": [], "temperature": NaN}', 400),
    (CHAT, b"[]", 400),
    (CHAT, b"[" * 100_000, 400),
    (CHAT, b'{"messages": [{"role": "user", "content": "\xff"}]}', 400),
)
