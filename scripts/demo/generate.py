"""Greedy generation with a key/value cache, in plain PyTorch: the yardstick of the evaluation."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn import functional as F

from scripts.demo.model import LlamaForCausalLM, Shape, rotate
from scripts.demo.render import IM_END, render


class Chat:
    """An exported model directory that answers."""

    def __init__(self, directory: Path):
        config = json.loads((directory / "config.json").read_text())
        shape = Shape(**{name: config[name] for name in Shape.__dataclass_fields__})
        self.model = LlamaForCausalLM(shape).eval()
        self.model.load_state_dict(
            {name: weight.float() for name, weight in load_file(directory / "model.safetensors").items()}
        )
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.end = self.tokenizer.token_to_id(IM_END)

    def step(self, ids: list[int], cache: list) -> torch.Tensor:
        """Logits [V] after the last of the new tokens; `cache` holds K and V of each layer and grows."""
        start = cache[0][0].shape[2] if cache else 0
        cos, sin = (table[start : start + len(ids)] for table in (self.model.cos, self.model.sin))
        x = self.model.model.embed_tokens(torch.tensor([ids]))
        for i, layer in enumerate(self.model.model.layers):
            x = x + attend(layer.self_attn, layer.input_layernorm(x), cos, sin, cache, i)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.logits(self.model.model.norm(x[0, -1]))

    @torch.no_grad()
    def answer(self, messages: list[dict], tools: list[dict] | None = None, max_tokens: int = 300) -> str:
        """Generate the model's next turn, greedily, up to the end of its turn or of the context."""
        prompt = self.tokenizer.encode(render(messages, tools, add_generation_prompt=True)).ids
        ids, said, cache = prompt, [], []
        room = self.model.shape.max_position_embeddings - len(prompt)
        while len(said) < min(max_tokens, room):
            token = int(self.step(ids, cache).argmax())
            if token == self.end:
                break
            said.append(token)
            ids = [token]
        return self.tokenizer.decode(said, skip_special_tokens=False)


def attend(
    attention, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: list, layer: int
) -> torch.Tensor:
    """Attention of the new positions over everything cached; new is a whole prompt or a single token."""

    def heads(y: torch.Tensor) -> torch.Tensor:
        return y.view(1, x.shape[1], -1, attention.shape.head_dim).transpose(1, 2)

    q, k = (rotate(heads(project(x)), cos, sin) for project in (attention.q_proj, attention.k_proj))
    v = heads(attention.v_proj(x))
    if len(cache) == layer:
        cache.append((k, v))
    else:
        cache[layer] = k, v = torch.cat([cache[layer][0], k], 2), torch.cat([cache[layer][1], v], 2)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=x.shape[1] > 1, enable_gqa=True)
    return attention.o_proj(mixed.transpose(1, 2).flatten(2))
