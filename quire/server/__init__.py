"""HTTP: the server that clients of OpenAI and Anthropic can talk to."""
