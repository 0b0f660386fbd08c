"""Ollama's endpoints, for clients that speak no other."""
