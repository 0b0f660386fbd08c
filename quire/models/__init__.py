"""Models: one recording function per family, and the registry of families."""

from quire.models.config import ModelConfig
from quire.models.model import Model
from quire.models.registry import FAMILIES, check_overrides, read_model, read_prediction

__all__ = ["FAMILIES", "Model", "ModelConfig", "check_overrides", "read_model", "read_prediction"]
