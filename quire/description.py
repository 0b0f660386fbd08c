"""Describe a model on this machine before its weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass

from quire import __version__
from quire.backends.device import Device, device_for, kv_dtype, plan_weights
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.memory import MemoryPlan, plan_memory
from quire.models import Model, read_model
from quire.program.passes import fuse
from quire.program.program import Program
from quire.weights.hub import open_model
from quire.weights.load import has_own_head
from quire.weights.plan import WeightPlan
from quire.weights.source import ModelSource

DTYPE_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class Description:
    """A model on this machine, before its weights are loaded: what `quire inspect` shows.

    `longest_context` is the maximum number of tokens of a sequence, memory permitting.
    """

    config: EngineConfig
    source: ModelSource
    model: Model
    program: Program
    device: Device
    weights: WeightPlan
    kv_dtype: str  # of cached keys and values: float32, float16, bfloat16 or int8
    memory: MemoryPlan
    longest_context: int
    weights_here: bool
    own_head: bool  # config.json ties the head to the embedding, but the checkpoint has one, which is used

    @property
    def fingerprint(self) -> str:
        """Identify everything that determines the bits of an answer."""
        weights = self.config.quantization or "stored"
        return f"quire-{__version__}-{self.device.arithmetic}-{weights}-{self.kv_dtype}"


def describe(config: EngineConfig, *, weights: bool = True) -> Description:
    """Read everything about a model except its weights. Raises ConfigError for anything invalid.

    Without `weights` the weight files may be missing (the number format is then that of config.json), and
    those of a hub model are not downloaded.
    """
    source = open_model(config.model, config.revision, weights=weights)
    raw = source.config()
    model = read_model(raw)
    _check_length(config, model)
    tensors = source.tensors() if weights or source.has_weights else None
    tied = model.tied_tensor
    own_head = tensors is not None and tied is not None and has_own_head(tensors, tied)
    if own_head:
        model = read_model({**raw, "tie_word_embeddings": False})
    program = fuse(model.program)
    stated = DTYPE_NAMES.get(str(raw.get("dtype") or raw.get("torch_dtype")), "bf16")
    device = device_for(config)
    plan = plan_weights(device, program, tensors, config.quantization, stated)
    longest = config.max_model_len or model.max_context
    return Description(
        config=config,
        source=source,
        model=model,
        program=program,
        device=device,
        weights=plan,
        kv_dtype=kv_dtype(device, config.kv_cache_dtype, plan.floats),
        memory=plan_memory(device, program, plan, config, longest),
        longest_context=longest,
        weights_here=source.has_weights,
        own_head=own_head,
    )


def _check_length(config: EngineConfig, model: Model) -> None:
    longest = model.max_context
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len = {config.max_model_len:,}, but the model was made for {longest:,} positions",
            f"give at most {longest:,}",
        )
