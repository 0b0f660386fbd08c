"""A load generator for OpenAI servers, standard library only; `serve_load.py` and its neighbours drive it."""
