"""What tests of models that see share: questions about pictures, and that only these change an answer."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny_vision import SIDE, picture

from quire import LLM, SamplingParams
from quire.errors import ConfigError, RequestError
from quire.images.vision import Vision
from quire.models import read_model
from quire.outputs import RequestOutput

SETTINGS: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 22, "max_model_len": 256}


def tower_of(config: dict[str, Any], processor: dict[str, Any], **changes: Any) -> Vision:
    """The tower of a config.json, with these changes of its vision_config."""
    config = copy.deepcopy(config)
    config["vision_config"] |= changes
    vision = read_model(config, processor).vision
    assert vision is not None
    return vision


@dataclass(frozen=True)
class Asked:
    """A model in a folder; its prompts have `shown` for a picture, which is `width` x `height` pixels."""

    folder: Path
    shown: str
    width: int = SIDE
    height: int = SIDE

    def pictures(self, *seeds: int) -> dict[str, Any]:
        return {"multi_modal_data": {"image": [picture(seed, self.width, self.height) for seed in seeds]}}

    def ask(self, images: tuple[int, ...] = (1,), **how: Any) -> RequestOutput:
        """Continue a text with pictures, these random ones."""
        text = f"So it is: {self.shown}" * len(images) + "What is it?"
        data = self.pictures(*images) if images else {}
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
        with LLM(str(self.folder), **SETTINGS, **how) as llm:
            (output,) = llm.generate({"prompt": text, "trusted": True, **data}, params)
        return output

    def check_steps(self) -> None:
        """Check that the size of steps changes no bit, and other pictures do."""
        expected = answer(self.ask(images=(1, 2)))
        for how in ({"max_num_batched_tokens": 17}, {"max_num_prefill_tokens": 3}, {"block_size": 16}):
            assert answer(self.ask(images=(1, 2), **how)) == expected
        assert answer(self.ask(images=(2, 1))) != expected
        assert answer(self.ask(images=(1, 1))) != expected

    def check_company(self, small_cache: int) -> None:
        """Check that caches, neighbours and preemption change no bit.

        Prompts begin alike, are asked again, and do not all fit into a cache of so many bytes.
        """
        text = f"So it is: {self.shown}{'What is it?' * 2}{self.shown}"
        prompts: list[Any] = [
            {"prompt": text, "trusted": True, **self.pictures(1, seed)} for seed in (2, 3, 4, 2)
        ]
        params = SamplingParams(temperature=0, max_tokens=56, ignore_eos=True, logprobs=3)
        how: dict[str, Any] = {"max_model_len": 128, "block_size": 16, "max_num_batched_tokens": 64}
        cache = {"kv_cache_memory_bytes": 1 << 22}
        with LLM(str(self.folder), **how, **cache, enable_prefix_caching=False) as llm:
            expected = [answer(llm.generate([one], params)[0]) for one in prompts]
        assert expected[0] == expected[3] != expected[1]
        with LLM(str(self.folder), **how, **cache) as llm:
            assert [answer(one) for one in llm.generate(prompts, params)] == expected
            again = llm.generate(prompts, params)
            assert [answer(one) for one in again] == expected
            assert all(one.num_cached_tokens for one in again)
        with LLM(str(self.folder), **how, kv_cache_memory_bytes=small_cache) as llm:
            assert [answer(one) for one in llm.generate(prompts, params)] == expected
            assert llm.engine.scheduler.num_preemptions > 0

    def check_texts(self) -> None:
        """Check that without images the tower is left out, and texts have the same answers."""
        with pytest.raises(RequestError, match="reads no images"):
            self.ask(max_images=0)
        assert answer(self.ask(images=(), max_images=0)) == answer(self.ask(images=()))

    def check_token(self, name: str, problem: str, folder: Path) -> None:
        """Check what is said of the model, copied to a folder, if its tokenizer lacks a token of images."""
        for file in self.folder.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        path = folder / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text())).replace(name, "[OTHER]"))
        with pytest.raises(ConfigError, match=re.escape(f"no token {name}, {problem}")):
            LLM(str(folder), **SETTINGS)
        with LLM(str(folder), **SETTINGS, max_images=0) as llm:
            assert llm.generate("So it is", SamplingParams(max_tokens=2))


def answer(output: RequestOutput) -> Any:
    return output.outputs[0].token_ids, output.outputs[0].logprobs
