"""Chat with a model in this process: answers are streamed, and the model sees the whole conversation.

    python examples/chat.py [MODEL]    MODEL: a checkpoint folder, a hub id, or "demo" (default)

Type a message per line; an empty line or Ctrl-D ends the chat.
"""

import sys

from quire import LLM, SamplingParams


def read_message() -> str:
    """Return the next line from the user, or "" at the end of the input."""
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def main(model: str = "demo") -> None:
    params = SamplingParams(max_tokens=300)
    messages: list[dict[str, str]] = []
    with LLM(model) as llm:
        while message := read_message():
            messages.append({"role": "user", "content": message})
            answer = ""
            for output in llm.stream_chat(messages, params):
                print(output.outputs[0].delta, end="", flush=True)
                answer = output.outputs[0].text
            print()
            messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main(*sys.argv[1:2])
