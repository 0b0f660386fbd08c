"""Readers of quantized checkpoints, a file for each format; `registry.py` chooses one of them."""
