"""LoadedModel: the common base of LLM and AsyncLLM, a model in this process and its text side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.adapters import LoRARequest
from quire.build import Progress, build
from quire.config import EngineConfig
from quire.errors import RequestError
from quire.frontend import Encoded, Frontend
from quire.pooled_texts import PooledTexts
from quire.progress import announce, loading_bar
from quire.sampling_params import SamplingParams
from quire.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
Lora = LoRARequest | str | Sequence[LoRARequest | str | None] | None  # the adapters of prompts


class LoadedModel:
    """A loaded model: `engine` computes; `frontend` turns prompts into requests and outputs into text.

    `model` is a checkpoint folder, a hub id or "demo"; the other keywords are the fields of
    quire.config.EngineConfig. Raises ConfigError, with a hint, for anything that cannot be loaded.
    """

    def __init__(self, model: str = "demo", *, progress: Progress | None = None, **options: Any) -> None:
        config = EngineConfig.from_keywords(model=str(model), **options)
        with loading_bar(config.model) as bar:
            built = build(config, progress or bar, announce)
        self.config = config
        self._facts = built.facts
        self.chosen = built.chosen
        self.engine = built.engine
        self.adapters = built.adapters
        self.frontend = Frontend(
            built.description.source,
            built.description.model,
            max_model_len=self._facts.limits.max_model_len,
            longest_context=self._facts.longest_context,
            seed=config.seed,
            max_images=config.max_images,
            media=config.allowed_local_media_path,
        )
        self.pooled = PooledTexts(self.frontend)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises RequestError when it has none."""
        return self.frontend.need_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default parameters of requests: those of the model's generation_config.json."""
        return SamplingParams(**self.frontend.default_params)

    def _adapted(self, prompts: list[Encoded], asked: Lora) -> list[Encoded]:
        """Return prompts with the adapters that are asked for: one for all, or one or None for each."""
        if asked is None:
            return prompts
        if isinstance(asked, str) or not isinstance(asked, Sequence):
            asked = [asked] * len(prompts)
        each = list(asked)
        if len(each) != len(prompts):
            problem = f"{len(each)} adapters for {len(prompts)} prompts"
            raise RequestError(problem, "give one for all, or one for each", "lora_request")
        if self.adapters is None:
            raise RequestError("no adapters are loaded", "give adapter_dir, a folder of them", "lora_request")
        found = ["" if own is None else self.adapters.asked(own) for own in each]
        return [replace(one, adapter=adapter) for one, adapter in zip(prompts, found, strict=True)]

    def __repr__(self) -> str:
        chosen = (f"{name}: {value}" for name, value in self.chosen.items() if name != "model")
        return f"{type(self).__name__}({self.config.model!r}, {', '.join(chosen)})"


def check_messages(messages: Any) -> None:
    """Raise RequestError unless `messages` is a conversation or a list of them."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise RequestError("messages is not a list of {'role': ..., 'content': ...}", None, "messages")
    if not messages:
        raise RequestError("the conversation has no messages", None, "messages")
