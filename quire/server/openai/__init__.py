"""The endpoints of OpenAI's API: chat completions and completions."""
