"""Ollama's endpoints, for clients that support no other."""
