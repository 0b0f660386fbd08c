"""The engine of a server, as the server describes it to an experiment that simulates it."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from quire.config import EngineConfig
from quire.engine.caches import BlockGroup
from quire.engine.request_limits import RequestLimits
from quire.engine.scheduler import Scheduler
from quire.experiments.parameters import FleetParameters


class ServedEngine(Struct):
    """The engine of a server: the law of its steps, as in a file of laws, and what its scheduler needs."""

    law: dict[str, Any]
    groups: list[tuple[int, int | None]]  # blocks, and the window
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_prefill_tokens: int | None

    @classmethod
    def of(cls, law: dict[str, Any], limits: RequestLimits, config: EngineConfig) -> ServedEngine:
        """Return the engine with this law and these limits."""
        groups = [(group.num_blocks, group.window) for group in limits.groups]
        return cls(
            law,
            groups,
            limits.block_size,
            limits.max_model_len,
            config.max_num_seqs,
            limits.num_batched_tokens,
            config.max_num_prefill_tokens,
        )

    def config(self) -> EngineConfig:
        """Return the configuration that routers predict by."""
        return EngineConfig(
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_prefill_tokens=self.max_num_prefill_tokens,
        )

    def scheduler(self) -> Scheduler:
        """Return a fresh scheduler, which drafts nothing and has no latency goal."""
        return Scheduler(
            groups=[BlockGroup(*group) for group in self.groups],
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_prefill_tokens=self.max_num_prefill_tokens,
            max_model_len=self.max_model_len,
        )


class FleetTask(FleetParameters, kw_only=True):
    """Of "fleet", with the engine that the server adds."""

    served: ServedEngine
