"""Describe a model on this machine before its weights are loaded."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from quire import __version__
from quire.backends.backend import Capacity
from quire.backends.device import (
    Device,
    automatic_gpu,
    chooses_device,
    device_for,
    kv_dtype,
    plan_weights,
    without_gpu,
)
from quire.backends.draft_model import DraftModel, shared_table
from quire.config import STEP_TOKENS, EngineConfig
from quire.engine.status import ModelFacts
from quire.errors import ConfigError, QuireError
from quire.memory import MemoryPlan, misfit, plan_memory
from quire.models import FAMILIES, Model, check_overrides, read_model, read_prediction
from quire.models.left_out import in_use, prediction_patterns
from quire.program.passes import adaptable, fuse, hand_out_hidden
from quire.program.program import Program
from quire.task import check_fields, read_for
from quire.text.vocabulary import load_vocabulary, spellings
from quire.weights.formats.expected import expected_storage
from quire.weights.formats.registry import check_format
from quire.weights.hub import open_model
from quire.weights.joined import with_modules
from quire.weights.load import has_own_head
from quire.weights.plan import Expect, WeightPlan
from quire.weights.renamed import under_own_names
from quire.weights.source import ModelSource
from quire.weights.tensors import Tensors

TEXT_TOKENS = 8192  # of a text that becomes a vector in one step, unless the operator allows more
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
    draft: DraftModel[WeightPlan] | None = None
    no_gpu: str = ""  # why "auto" is the CPU although there may be a GPU

    @property
    def capacity(self) -> Capacity:
        """Return what a backend allocates for the cache and its requests."""
        return Capacity(
            num_blocks=self.memory.blocks,
            block_size=self.config.block_size,
            kv_dtype=self.kv_dtype,
            max_num_seqs=self.config.max_num_seqs,
            num_snapshots=self.memory.num_snapshots,
            max_steps_in_flight=self.config.max_steps_in_flight or 1,
        )

    @property
    def fingerprint(self) -> str:
        """Identify everything that determines the bits of an answer."""
        weights = self.config.quantization or "stored"
        return f"quire-{__version__}-{self.device.arithmetic}-{weights}-{self.kv_dtype}"

    @property
    def model_facts(self) -> ModelFacts:
        """Return the sizes of the model, for the clients of the engine."""
        sizes, memory = self.model.config, self.memory
        return ModelFacts(
            architecture=self.model.architecture,
            num_layers=sizes.num_hidden_layers,
            hidden_size=sizes.hidden_size,
            num_heads=sizes.num_attention_heads,
            num_kv_heads=self.model.num_kv_heads,
            head_dim=sizes.head_dim,
            vocab_size=sizes.vocab_size,
            num_parameters=sum(spec.size for spec in self.program.weights().values()),
            weight_bytes=memory.weight_bytes,
            kv_bytes_per_token=memory.kv_block_bytes // self.config.block_size,
            max_model_len=memory.max_model_len,
            quantization=self.config.quantization,
            kv_cache_dtype=self.kv_dtype,
            windows=[group.window for group in memory.sizing.groups],
            sees=self.model.vision is not None,
        )


def describe(
    config: EngineConfig,
    *,
    weights: bool = True,
    available_bytes: int | None = None,
    num_sharing: int = 1,
) -> Description:
    """Read everything about a model except its weights. Raises ConfigError for anything invalid.

    The device "auto" is a GPU that works, if it has kernels and memory for the model, else the CPU.

    `available_bytes` of memory are planned with, None for all that is free. Without `weights` the weight
    files may be missing (the number format is then that of config.json), and those of a hub model are not
    downloaded. `num_sharing` engines share the weights.
    """
    if not chooses_device(config):
        device = device_for(config, num_sharing > 1)
        return _describe(config, device, weights, available_bytes, num_sharing)
    gpu, reason = automatic_gpu(config)
    if gpu is not None:
        try:
            found = _describe(config, gpu, weights, available_bytes, num_sharing)
            if (error := misfit(found.memory, found.config, gpu)) is None:
                return found
            reason = error.message
        except QuireError as refused:
            reason = refused.message
    device = device_for(without_gpu(config), num_sharing > 1)
    return replace(_describe(config, device, weights, available_bytes, num_sharing), no_gpu=reason)


def _describe(
    config: EngineConfig, device: Device, weights: bool, available_bytes: int | None, num_sharing: int
) -> Description:
    """Describe a model on a device."""
    adapters = config.adapter_dir is not None
    images = config.max_images > 0
    own = _open(config.model, config.revision, weights, config.overrides, adapters, config.task, images)
    own = replace(own, model=own.model.seeing(config.max_image_tokens))
    _check_length(config, own.model)
    longest = config.max_model_len or own.model.max_context
    if own.model.pooling is not None and config.max_num_batched_tokens == STEP_TOKENS:
        config = replace(config, max_num_batched_tokens=max(STEP_TOKENS, min(longest, TEXT_TOKENS)))
    layer = None
    if config.speculative == "mtp":
        own, layer = _with_prediction(config, own)
    plan = own.plan(device, config.quantization, layer)
    draft: DraftModel[WeightPlan] | None = None
    if layer is not None:
        draft = DraftModel(layer, None, config.max_num_batched_tokens, own.model.max_context, "mtp")
    elif config.speculative not in ("auto", "off"):
        draft = _draft_model(config, own, device, weights)
    found = Description(
        config=config,
        source=own.source,
        model=own.model,
        program=own.program,
        device=device,
        weights=plan,
        kv_dtype=kv_dtype(device, config.kv_cache_dtype, plan.floats),
        memory=plan_memory(
            device, own.program, plan, config, longest, available_bytes, draft, num_sharing, own.model.vision
        ),
        longest_context=longest,
        weights_here=own.source.has_weights,
        own_head=own.own_head,
        draft=draft,
    )
    device.require_runnable(own.program, plan, found.capacity, draft, own.model.vision)
    return found


@dataclass(frozen=True, slots=True)
class _Opened:
    """A model that was opened: its program, and its tensors if they are present."""

    source: ModelSource
    model: Model
    program: Program
    tensors: Tensors | None
    expected: Expect  # storage kinds, by config.json
    own_head: bool
    raw: Mapping[str, Any]  # config.json

    @property
    def has_prediction(self) -> bool:
        """True if the checkpoint has a prediction layer that can draft, as far as is known here."""
        patterns = prediction_patterns(self.program.left_out)
        if self.tensors is None:
            return bool(patterns)
        return any(fnmatch.filter(self.tensors, pattern) for pattern in patterns)

    def plan(self, device: Device, quantization: str | None, layer: Program | None = None) -> WeightPlan:
        """Plan the weights, with those of the vision tower, and of the prediction layer if it is used."""
        program = self.program
        if (vision := self.model.vision) is not None:
            program = replace(program, ops=(*program.ops, *vision.program.ops))
        if layer is not None:
            program = replace(program, ops=(*program.ops, *layer.ops), left_out=in_use(program.left_out))
        return plan_weights(device, program, self.tensors, quantization, self.expected)


def _open(
    name: str,
    revision: str | None,
    weights: bool,
    overrides: Mapping[str, Any] | None = None,
    adapters: bool = False,
    task: str = "generate",
    images: bool = False,
) -> _Opened:
    source = open_model(name, revision, weights=weights, overrides=overrides)
    raw = source.config()
    check_format(raw)
    processor = source.image_processor() if images else None
    read = partial(read_for, source, task, decoders=FAMILIES)
    model = read(partial(read_model, processor=processor))
    check_fields(model, raw, overrides or {}, check_overrides, FAMILIES)
    tensors = None
    if weights or source.has_weights:
        tensors = under_own_names(model.program.weights(), source.tensors())
        if model.pooling is not None:
            tensors = with_modules(tensors, source, (module.folder for module in model.pooling.dense))
    tied = model.tied_tensor if model.pooling is None else None
    if tensors is not None and model.vision is not None and not _has(tensors, model.vision.program):
        model = read(read_model)
    own_head = tensors is not None and tied is not None and has_own_head(tensors, tied)
    if own_head:
        raw = {**raw, "tie_word_embeddings": False}
        model = read_model(raw, processor if model.vision else None)
    stated = DTYPE_NAMES.get(_stated_dtype(raw), "bf16")
    program = fuse(adaptable(model.program) if adapters else model.program)
    return _Opened(source, model, program, tensors, expected_storage(raw, stated), own_head, raw)


def _has(tensors: Tensors, program: Program) -> bool:
    """Return True if a checkpoint has weights of a part of the model."""
    specs = program.weights()
    tensors = under_own_names(specs, tensors)
    return any(source in tensors for spec in specs.values() for source in spec.sources)


def _stated_dtype(raw: Mapping[str, Any]) -> str:
    """Return the number format that config.json states, for the whole or for its text model."""
    text = raw.get("text_config")
    places = [raw, text] if isinstance(text, Mapping) else [raw]
    return next(
        (str(place[key]) for place in places for key in ("dtype", "torch_dtype") if place.get(key)), ""
    )


def _with_prediction(config: EngineConfig, own: _Opened) -> tuple[_Opened, Program]:
    """Return the model with hidden states handed out, and the program of its prediction layer.

    Raises ConfigError if it has none.
    """
    tensors = own.tensors
    layer = read_prediction(own.raw, lambda name: tensors is not None and name in tensors)
    program = hand_out_hidden(own.program)
    if layer is None or program is None or not own.has_prediction:
        raise ConfigError(
            f"speculative = 'mtp': {config.model!r} has no prediction layer that Quire can compute",
            "leave it out with speculative = 'auto', or name a draft model",
        )
    layer = fuse(layer)
    shared_table(program, layer)
    return replace(own, program=program), layer


def _draft_model(config: EngineConfig, own: _Opened, device: Device, weights: bool) -> DraftModel[WeightPlan]:
    """Describe the model that drafts, which is quantized as the target is. Raises ConfigError."""
    name = config.speculative
    try:
        opened = _open(name, None, weights)
        plan = opened.plan(device, config.quantization)
        shared_table(own.program, opened.program)
    except ConfigError as error:
        raise ConfigError(f"speculative = {name!r}: {error.message}", error.hint) from None
    if not _same_vocabulary(own, opened):
        raise ConfigError(
            f"the draft model {name!r} has another vocabulary than {config.model!r}",
            "take a smaller model of the same family, or leave it out with speculative = 'auto'",
        )
    return DraftModel(opened.program, plan, config.max_num_batched_tokens, opened.model.max_context, name)


def _same_vocabulary(own: _Opened, draft: _Opened) -> bool:
    """Return True if no id means two tokens. A model may have more of them than the other, and padding."""
    mine, other = own.source.tokenizer(), draft.source.tokenizer()
    if mine is None or other is None:
        return own.model.config.vocab_size == draft.model.config.vocab_size
    if mine.content == other.content:
        return True
    tokens, others = (
        spellings(load_vocabulary(data.content, data.where, data.settings)) for data in (mine, other)
    )
    return all(others.get(number, token) == token for number, token in tokens.items())


def _check_length(config: EngineConfig, model: Model) -> None:
    longest = model.max_context
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len = {config.max_model_len:,}, but the model was made for {longest:,} positions",
            f"give at most {longest:,}",
        )
