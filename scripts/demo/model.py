"""A Llama-style decoder in PyTorch whose parameter names are those of Hugging Face's `LlamaForCausalLM`.

Only used to train and evaluate the demo models; Quire itself runs the exported files with its own kernels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """The sizes that make a model; the fields bear the names of `config.json`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 32
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position_embeddings: int = 1024


SHAPES = {
    "demo": Shape(2048, 256, 512, 4, 8, 4),
    "draft": Shape(2048, 256, 512, 1, 8, 4),
}


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def rotation(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, [T, head_dim], in the half-split layout."""
    exponents = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
    angles = torch.outer(torch.arange(length).float(), shape.rope_theta**-exponents)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, heads, T, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, chunk: int = 128) -> Tensor:
    """Softmax attention of q, k, v [B, heads, T, head_dim], in chunks of queries that skip the future.

    On CPUs the plain products are three times as fast as PyTorch's fused attention with its backward pass.
    """
    length, scale = q.shape[2], q.shape[3] ** -0.5
    ahead = torch.full((chunk, chunk), -1e9, dtype=q.dtype).triu(1)
    mixed = []
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        scores = (q[:, :, start:end] * scale) @ k[:, :, :end].transpose(2, 3)
        scores[..., start:].add_(ahead[: end - start, : end - start])
        mixed.append(scores.softmax(-1) @ v[:, :, :end])
    return torch.cat(mixed, 2)


class Attention(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        width, kv_width = (n * shape.head_dim for n in (shape.num_attention_heads, shape.num_key_value_heads))
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape

        def heads(y: Tensor) -> Tensor:  # [B, T, width] -> [B, heads, T, head_dim]
            return y.view(batch, length, -1, self.shape.head_dim).transpose(1, 2)

        q = rotate(heads(self.q_proj(x)), cos, sin)
        k = rotate(heads(self.k_proj(x)), cos, sin)
        v = heads(self.v_proj(x))
        group = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        mixed = causal_attention(q, k, v)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class LlamaForCausalLM(nn.Module):
    """The whole model; the output matrix is the embedding (tied)."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        cos, sin = rotation(shape, shape.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.initialize()

    def initialize(self) -> None:
        """Normal weights; what writes into the residual stream starts smaller with depth (GPT-2).

        Embeddings start at unit scale, or the first layers would drown what token stands where; as the output
        matrix is tied to them, the last norm starts small enough for logits of unit scale.
        """
        depth_scale = (2 * self.shape.num_hidden_layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                scale = depth_scale if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(weight, std=1.0 if "embed" in name else scale * weight.shape[1] ** -0.5)
        nn.init.constant_(self.model.norm.weight, self.shape.hidden_size**-0.5)

    def hidden(self, ids: Tensor) -> Tensor:
        """Final hidden states [B, T, hidden_size] of token ids [B, T]."""
        length = ids.shape[1]
        return self.model(ids, self.cos[:length], self.sin[:length])

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)

    def summed_loss(self, ids: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, float]:
        """(weighted sum of the cross-entropy, sum of the weights); ids, targets, weights [B, T].

        Positions of weight zero cost no logits.
        """
        wanted = weights.flatten().nonzero().squeeze(1)
        hidden, targets, weights = (x.flatten(0, 1)[wanted] for x in (self.hidden(ids), targets, weights))
        losses = F.cross_entropy(self.logits(hidden).float(), targets, reduction="none")
        return (losses * weights).sum(), weights.sum().item()

    def begin_as(self, teacher: "LlamaForCausalLM") -> None:
        """Take over the teacher's embedding, its last norm and as many of its first layers as there are."""
        own = self.state_dict()
        self.load_state_dict({name: teacher.state_dict()[name] for name in own})

    def summed_divergence(
        self, ids: Tensor, weights: Tensor, teacher: "LlamaForCausalLM"
    ) -> tuple[Tensor, float]:
        """Like `summed_loss`, but the cross-entropy with what the teacher would say."""
        wanted = weights.flatten().nonzero().squeeze(1)
        with torch.no_grad():
            said = teacher.logits(teacher.hidden(ids).flatten(0, 1)[wanted]).float().softmax(-1)
        hidden, weights = self.hidden(ids).flatten(0, 1)[wanted], weights.flatten(0, 1)[wanted]
        losses = F.cross_entropy(self.logits(hidden).float(), said, reduction="none")
        return (losses * weights).sum(), weights.sum().item()
