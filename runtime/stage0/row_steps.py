"""A decoding step of the speech LM on a CPU: every row goes through every matrix by itself.

Reading the weights is what a step of one stream costs, and a matrix product that takes one row reads them at the speed
of the memory; one that takes a block of eight does not, however few of the eight are filled. A row multiplied alone has
the sums that it would have without neighbours, by construction and in any library. Rows that follow each other through
a matrix find it in the processor's cache.

Shapes: B rows, D hidden width, G query heads to each of K key/value heads, C channels of a head, T cached positions.
The weights are the module's own (`lm.py`), and so are the numbers, but for rounding.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runtime.stage0.lm import Attention, Layer, LayerCache, SpeechLM, rotary


class RowSteps:
    """Continues streams by one token each. Shares the weights of the module, which stays usable by itself."""

    def __init__(self, lm: SpeechLM) -> None:
        self._lm = lm
        self._layers: list[Layer] = list(lm.backbone.layers)  # type: ignore[arg-type]
        self._qkv = [stacked(layer.self_attn) for layer in self._layers]

    def logits(self, tokens: Tensor, positions: Tensor, cache: Sequence[LayerCache]) -> Tensor:
        """Scores [B, V] float32 after speech tokens [B] at `positions` [B], whose keys and values join the cache."""
        lm, qwen = self._lm, self._lm.config.qwen
        x = lm.speech_embedding(tokens)  # [B, D]
        cosine, sine = rotary(positions[:, None], qwen.head_dim, qwen.rope_theta, x.dtype)
        half = qwen.head_dim // 2
        sine = torch.cat((-sine[..., :half], sine[..., half:]), dim=-1)  # as `rotate`, the sign moved off the heads
        rotation = cosine[:, 0], sine[:, 0]  # [B, 1, C]
        rows, kv_heads, width, channels = cache[0][0].shape
        place = positions[:, None, None, None].expand(rows, kv_heads, 1, channels)
        hidden = torch.arange(width) > positions[:, None, None, None]
        mask = torch.zeros(hidden.shape, dtype=x.dtype).masked_fill(hidden, -torch.inf)  # [B, 1, 1, T]
        for layer, qkv, past in zip(self._layers, self._qkv, cache, strict=True):
            u = norm(layer.input_layernorm, x)
            x = x + attend(layer.self_attn, qkv, u, rotation, place, mask, past)
            u = norm(layer.post_attention_layernorm, x)
            mlp = layer.mlp
            u = F.silu(each_row(u, mlp.gate_proj.weight)) * each_row(u, mlp.up_proj.weight)
            x = x + each_row(u, mlp.down_proj.weight)
        return each_row(norm(lm.backbone.norm, x), lm.llm_decoder.weight).float()


def attend(
    attention: Attention,
    qkv: tuple[Tensor, Tensor],
    u: Tensor,
    rotation: tuple[Tensor, Tensor],
    place: Tensor,
    mask: Tensor,
    past: LayerCache,
) -> Tensor:
    """Attention of one new position of each row over its own past; [B, D] in and out."""
    kv_heads, groups = attention.kv_heads, attention.groups
    cosine, sine = rotation
    heads = each_row(u, *qkv).unflatten(1, (-1, attention.head_dim))  # those of q, then k, then v
    turned = heads[:, :-kv_heads]
    turned = torch.addcmul(turned * cosine, turned.roll(attention.head_dim // 2, dims=-1), sine)
    keys, values = past  # [B, K, T, C]
    keys.scatter_(2, place, turned[:, -kv_heads:, None])
    values.scatter_(2, place, heads[:, -kv_heads:, None])
    queries = turned[:, :-kv_heads].unflatten(1, (kv_heads, groups))
    mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask.expand(-1, -1, groups, -1))
    return each_row(mixed.flatten(1), attention.o_proj.weight)


def each_row(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer on rows [B, D], one product for each."""
    if len(x) == 1:
        return F.linear(x, weight, bias)
    return torch.cat([F.linear(row, weight, bias) for row in x.split(1)])


def norm(layer: nn.RMSNorm, x: Tensor) -> Tensor:
    """As the layer does it, in a third of its operations."""
    assert layer.eps is not None
    return x * (x * x).mean(-1, keepdim=True).add_(layer.eps).rsqrt_() * layer.weight


def stacked(attention: Attention) -> tuple[Tensor, Tensor]:
    """Weight and bias of q, k and v as one projection; the three become views of it, so nothing lies twice."""
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    weight, bias = (torch.cat([getattr(one, name).detach() for one in projections]) for name in ("weight", "bias"))
    sizes = [one.out_features for one in projections]
    for one, own_weight, own_bias in zip(projections, weight.split(sizes), bias.split(sizes), strict=True):
        one.weight.data, one.bias.data = own_weight, own_bias
    return weight, bias
