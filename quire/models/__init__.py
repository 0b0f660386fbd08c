"""Models: one function a family that records a program, and the table that finds it."""

from quire.models.config import ModelConfig
from quire.models.registry import Model, read_model

__all__ = ["Model", "ModelConfig", "read_model"]
