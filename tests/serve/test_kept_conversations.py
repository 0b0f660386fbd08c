"""What a request said is not kept while it is answered: conversations may hold many images."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import pytest
from remote_engines import until

from quire.config import EngineConfig, ServerConfig
from quire.server.anthropic.protocol import MessagesRequest
from quire.server.chat_task import ChatTask
from quire.server.lifecycle import local_server
from quire.server.ollama.protocol import OllamaChatRequest
from quire.server.openai.items import ResponseRequest

SAID = [{"role": "user", "content": "Tell me a story."}]
LONG = {"max_tokens": 900, "ignore_eos": True}
KEPT = (ResponseRequest, MessagesRequest, OllamaChatRequest, ChatTask)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": SAID, **LONG}),
        ("/v1/messages", {"messages": SAID, **LONG}),
        (
            "/api/chat",
            {"messages": SAID, "stream": False, "options": {"num_predict": 900, "ignore_eos": True}},
        ),
    ],
)
def test_no_conversation_is_kept_while_it_is_answered(path: str, body: dict[str, Any]) -> None:
    async def answered() -> None:
        config = EngineConfig(device="reference", num_threads=1)
        async with local_server(ServerConfig(), config) as server:
            asked = asyncio.create_task(server.post(path, json.dumps(body).encode()))
            await until(lambda: server._status.num_running)
            kept = [type(one).__name__ for one in gc.get_objects() if type(one) in KEPT]
            assert not asked.done()
            assert kept == []
            asked.cancel()
            await asyncio.wait((asked,))

    asyncio.run(answered())
