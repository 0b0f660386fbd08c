"""Models: one recording function per family, and the registry of families."""

from quire.models.config import ModelConfig
from quire.models.model import Model
from quire.models.registry import read_model

__all__ = ["Model", "ModelConfig", "read_model"]
