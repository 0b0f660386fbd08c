"""Anthropic's interface, over the same conversations as OpenAI's."""
