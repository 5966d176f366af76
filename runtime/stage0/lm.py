"""The speech language model: a Qwen2 backbone that reads text and speech embeddings and scores speech tokens.

Shapes: B rows, L new positions of each row, T cached positions, D hidden width, K key/value heads, G query heads that
share one of them, V ids of the head. One forward serves the prefill of a prompt (L = its length) and the decoding of
many streams (L = 1). Knows nothing of requests, limits or sampling. Layout and names follow spec 1.3 and 3.2.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runtime.config import LMConfig, QwenConfig

LayerCache = tuple[Tensor, Tensor]  # keys and values of one layer, each [B, K, T, head_dim], written in place
Rotation = tuple[Tensor, Tensor]  # cosine and sine, each [B, L, 1, head_dim]


class SpeechLM(nn.Module):
    """Embeddings in, hidden states out; `logits` turns hidden states into scores of the V speech and control ids."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config.qwen)
        self.speech_embedding = nn.Embedding(config.rows, config.qwen.hidden_size)
        self.llm_decoder = nn.Linear(config.qwen.hidden_size, config.rows, bias=False)

    def forward(self, x: Tensor, positions: Tensor | None = None, cache: Sequence[LayerCache] | None = None) -> Tensor:
        """Embeddings [B, L, D] at `positions` [B, L] -> hidden states [B, L, D] after the norm.

        Without positions the rows are whole sequences, each position sees those before it, and a cache is filled from
        its start. With them the cache is continued: what lies at or before a position is seen by it. The cache may then
        have fewer rows than x: the rows beyond are filler, whose output means nothing.
        """
        return self.backbone(x, positions, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., D] -> scores [..., V], always float32: sampling never runs in half precision."""
        return self.llm_decoder(hidden).float()


class Backbone(nn.Module):
    """Qwen2 without a head: causal self-attention over embeddings."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, positions: Tensor | None, cache: Sequence[LayerCache] | None) -> Tensor:
        mask = None  # whole sequences from position 0: plainly causal
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        else:
            mask = self._mask(positions, cache)
        rotation = rotary(positions, self.config.head_dim, self.config.rope_theta, x.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x, rotation, mask, positions, None if cache is None else cache[index])
        return self.norm(x)

    def _mask(self, positions: Tensor, cache: Sequence[LayerCache] | None) -> Tensor:
        """Which cached positions each new one sees, [B, 1, G*L, T]."""
        assert cache is not None, "positions other than 0..L-1 continue something, which a cache must hold"
        rows, _, width, _ = cache[0][0].shape
        visible = torch.arange(width, device=positions.device) <= positions[:rows, None, :, None]  # [B, 1, L, T]
        return visible.repeat(1, 1, self.config.num_attention_heads // self.config.num_key_value_heads, 1)


class Layer(nn.Module):
    """Attention and MLP, each behind its norm and added to the residual."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config)

    def forward(
        self, x: Tensor, rotation: Rotation, mask: Tensor | None, positions: Tensor, cache: LayerCache | None
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, mask, positions, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Attention(nn.Module):
    """Grouped-query attention: G consecutive query heads share one key/value head."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.kv_heads, self.head_dim = config.num_key_value_heads, config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        kv_width = self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = nn.Linear(config.hidden_size, kv_width)
        self.v_proj = nn.Linear(config.hidden_size, kv_width)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self, x: Tensor, rotation: Rotation, mask: Tensor | None, positions: Tensor, cache: LayerCache | None
    ) -> Tensor:
        query = rotate(self.q_proj(x).unflatten(-1, (-1, self.head_dim)), rotation)
        key = rotate(self.k_proj(x).unflatten(-1, (-1, self.head_dim)), rotation)
        value = self.v_proj(x).unflatten(-1, (-1, self.head_dim))  # [B, L, K, head_dim]
        if cache is None:
            keys, values = key.transpose(1, 2), value.transpose(1, 2)
        else:
            keys, values = cache
            rows = torch.arange(len(keys), device=x.device)[:, None]
            keys[rows, :, positions[: len(keys)]] = key[: len(keys)]
            values[rows, :, positions[: len(keys)]] = value[: len(keys)]
        query = query[: len(keys)]
        if mask is None:
            mixed = F.scaled_dot_product_attention(
                query.transpose(1, 2), keys, values, is_causal=True, enable_gqa=True
            ).transpose(1, 2)
        else:  # the G heads of a group become queries of their one key head, so that nothing is repeated G times
            grouped = query.unflatten(2, (self.kv_heads, self.groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
            mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)  # [B, K, G*L, head_dim]
            mixed = mixed.unflatten(2, (self.groups, -1)).permute(0, 3, 1, 2, 4)
        mixed = mixed.flatten(2)  # [B, L, D]
        filler = len(x) - len(keys)
        return self.o_proj(F.pad(mixed, (0, 0, 0, 0, 0, filler)) if filler else mixed)


class SwiGLU(nn.Module):
    """The MLP: a SiLU gate times a linear branch, projected back."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotary(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """Cosine and sine of the rotary embedding, [B, L, 1, head_dim], for positions [B, L].

    Computed at each forward instead of kept as a buffer: a buffer would be cast to half precision with the weights.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[..., None, None] * theta**-exponents
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Turns heads [B, L, H, head_dim] by their positions, half-split layout: i is paired with i + head_dim / 2."""
    cosine, sine = rotation
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat((-second, first), dim=-1) * sine
