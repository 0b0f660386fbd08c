"""The role of a server: it computes prompts for others, has its own computed, or does all itself."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING

from quire.cluster.link import LinkAddress, read_key
from quire.cluster.link_counts import LinkCounts
from quire.cluster.prefill import PrefillService
from quire.cluster.split import SplitEngine
from quire.config import ServerConfig
from quire.engine.client import EngineClient

if TYPE_CHECKING:
    from quire.server.remote import RemoteEngine


_LOG = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def in_role(
    config: ServerConfig, engine: RemoteEngine
) -> AsyncIterator[tuple[EngineClient, Mapping[str, LinkCounts]]]:
    """Yield the client of an engine that is ready, for this server's requests, and serve its link.

    With it comes what is counted of each link over which prompts are sent, by its address.
    Raises ConfigError for a key or an address that cannot be used.
    """
    assert config.link_key_file is not None, "the configuration was checked"
    key, addresses = read_key(config.link_key_file), [LinkAddress.of(text) for text in config.link]
    if config.role == "prefill":
        service = PrefillService(engine, key)
        try:
            await service.start(addresses[0])
            _LOG.info("prompts are computed for servers with the key at link %s", addresses[0])
            if not addresses[0].is_loopback:
                _LOG.warning("prompts and answers pass over link %s unencrypted", addresses[0])
            yield engine, {}
        finally:
            await service.close()
        return
    split = SplitEngine(engine, addresses, key)
    split.start()
    try:
        yield split, split.counts
    finally:
        await split.close()
