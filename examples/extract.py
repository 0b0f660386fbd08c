"""Extract fields from sentences as JSON that always matches a schema.

    python examples/extract.py [MODEL]    MODEL: a checkpoint folder, a hub id, or "demo" (default)

All sentences are computed together. The schema becomes a grammar that masks every token that would break it,
so the output always parses; whether the values are right is up to the model. Through a server, the same is
`response_format={"type": "json_schema", ...}`: see docs/serving.md.
"""

import json
import sys

from quire import LLM, SamplingParams, StructuredOutputsParams

SENTENCES = [
    "Mira is 34 years old, lives in Oslo and works as a baker.",
    "In Lisbon lives a pilot called Tom who is 51 years old.",
    "My friend Nils from Rome is 63 and a painter.",
]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"type": "string"},
        "job": {"type": "string"},
    },
    "required": ["name", "age", "city", "job"],
    "additionalProperties": False,
}


def main(model: str = "demo") -> None:
    instructions = f"Answer only with JSON that follows this schema: {json.dumps(PERSON)}"
    conversations = [
        [{"role": "system", "content": instructions}, {"role": "user", "content": sentence}]
        for sentence in SENTENCES
    ]
    params = SamplingParams(
        temperature=0, max_tokens=200, structured_outputs=StructuredOutputsParams(json=PERSON)
    )
    with LLM(model) as llm:
        outputs = llm.chat(conversations, params, use_tqdm=False)
    for sentence, output in zip(SENTENCES, outputs, strict=True):
        person = json.loads(output.outputs[0].text)
        print(sentence)
        print(f"    {person['name']}, {person['age']}, {person['job']} in {person['city']}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
