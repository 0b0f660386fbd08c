"""The chat templates of models whose only tokenizer is a tekken.json: its version says how they converse."""

from __future__ import annotations

from pathlib import Path

from quire.regular_file import present
from quire.weights.vocabularies.tekken import TEKKEN, tekken_version

# In capitals is what versions differ in: the message that tools come before, and what is written otherwise.
_TEMPLATE = """{{- bos_token -}}
{%- set place = namespace(at=-1) -%}
{%- for message in messages -%}
{%- if message.role == "user" and (place.at < 0 or TOOLS_COME_LATE) -%}
{%- set place.at = loop.index0 -%}
{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- set parts = message.content -%}
{%- if parts is string -%}
{%- set parts = [{"type": "text", "text": message.content}] -%}
{%- endif -%}
{%- if message.role == "system" -%}
[SYSTEM_PROMPT]{%- for part in parts -%}{{- part.text -}}{%- endfor -%}[/SYSTEM_PROMPT]
{%- elif message.role == "user" -%}
{%- if tools and loop.index0 == place.at -%}
[AVAILABLE_TOOLS][
{%- for tool in tools -%}
{{- ", " if not loop.first -}}
{%- set function = {"name": tool.function.name, "description": tool.function.description or "", \
"parameters": tool.function.parameters or {}} -%}
{{- {"type": "function", "function": function} | tojson -}}
{%- endfor -%}
][/AVAILABLE_TOOLS]
{%- endif -%}
[INST]
{%- for part in parts -%}
{%- if part.type == "image" -%}[IMG]{%- else -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}
[/INST]
{%- elif message.role == "tool" -%}
[TOOL_RESULTS]RESULT_OF{%- for part in parts -%}{{- part.text -}}{%- endfor -%}[/TOOL_RESULTS]
{%- elif message.role == "assistant" -%}
REASONING
{%- for part in parts -%}{{- part.text -}}{%- endfor -%}
{%- if message.tool_calls -%}CALLS{%- endif -%}
{{- eos_token -}}
{%- else -%}
{{- raise_exception("roles are system, user, assistant and tool, not " ~ message.role) -}}
{%- endif -%}
{%- endfor -%}
"""
_ONE_LIST = """[TOOL_CALLS][
{%- for call in message.tool_calls -%}
{{- ", " if not loop.first -}}
{{- {"name": call.function.name, "arguments": call.function.arguments, "id": call.id} | tojson -}}
{%- endfor -%}
]"""
_EACH = """
{%- for call in message.tool_calls -%}
[TOOL_CALLS]{{- call.function.name -}}[ARGS]{{- call.function.arguments | tojson -}}
{%- endfor -%}
"""
_WITH_ID = _EACH.replace("[ARGS]", "[CALL_ID]{{- call.id -}}[ARGS]")
_OF_CALL = "{{- message.tool_call_id -}}[TOOL_CONTENT]"
_REASONING = """
{%- if message.reasoning_content -%}[THINK]{{- message.reasoning_content -}}[/THINK]{%- endif -%}
"""
_VERSIONS = {
    "v7": {"TOOLS_COME_LATE": "true", "RESULT_OF": _OF_CALL, "CALLS": _ONE_LIST},
    "v11": {"TOOLS_COME_LATE": "true", "RESULT_OF": _OF_CALL, "CALLS": _WITH_ID},
    "v13": {"TOOLS_COME_LATE": "false", "RESULT_OF": "", "CALLS": _EACH},
}


def read_conversation(folder: Path) -> dict[str, str]:
    """Return the chat template of the tekken.json in a folder; {} without one, or of another version."""
    if not present(path := folder / TEKKEN):
        return {}
    version, special = tekken_version(path)
    if version not in _VERSIONS:
        return {}
    source = _TEMPLATE.replace("REASONING", _REASONING if "[THINK]" in special else "")
    for name, text in _VERSIONS[version].items():
        source = source.replace(name, text)
    return {"default": source}
