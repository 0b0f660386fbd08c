"""Models: one recording function per family, and the registry of families."""

from quire.models.config import ModelConfig
from quire.models.registry import Model, read_model

__all__ = ["Model", "ModelConfig", "read_model"]
