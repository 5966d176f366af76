"""What the flow is told: tokens become mu, the voice becomes a speaker vector and a prompt mel (spec 4.1).

Shapes: B streams, T speech tokens (25 Hz), N = 2T mel frames (50 Hz), M mel bins, C token channels, E speaker
dimensions. `Flow` holds all weights of the released flow file under their own names, the estimator's among them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.config import FlowConfig
from runtime.stage1.dit import DiT


class PreLookahead(nn.Module):
    """Mixes into each token what the next few will be, so that a chunk ends as if the rest were known."""

    def __init__(self, channels: int, inner: int, lookahead_tokens: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(channels, inner, lookahead_tokens + 1)
        self.conv2 = nn.Conv1d(inner, channels, 3)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """x [B, T, C] and the embeddings after it [B, lookahead, C] -> [B, T, C]."""
        h = F.leaky_relu(product(self.conv1, torch.cat((x, context), dim=1)), 0.01)
        return x + product(self.conv2, F.pad(h, (0, 0, 2, 0)))


def product(conv: nn.Conv1d, x: Tensor) -> Tensor:
    """A convolution along T of x [B, T, C] as one matrix product: cuDNN takes 0.2 s for it in true float32."""
    windows = x.unfold(1, conv.kernel_size[0], 1).flatten(2)  # [B, T', C * kernel]
    return F.linear(windows, conv.weight.flatten(1), conv.bias)


class Flow(nn.Module):
    """Weights of the `flow` part: tokens to mel, but for the solver that drives the estimator."""

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        self.config = config
        self.input_embedding = nn.Embedding(config.speech_tokens, config.token_channels)
        self.spk_embed_affine_layer = nn.Linear(config.speaker_dim, config.mel_bins)
        self.pre_lookahead_layer = PreLookahead(
            config.token_channels, config.lookahead_channels, config.lookahead_tokens
        )
        self.estimator = DiT(config.dit)

    def speaker(self, vector: Tensor) -> Tensor:
        """Raw speaker vectors [B, E] -> [B, M]. Normalised here, so the caller need not (spec 9.22)."""
        return self.spk_embed_affine_layer(F.normalize(vector, dim=-1))

    def mu(self, tokens: Tensor, *, is_last: bool) -> Tensor:
        """Tokens [B, T] -> mu [B, C, N].

        Unless they are the last, the final tokens are only looked at: N = 2 (T - lookahead).
        """
        x = self.input_embedding(tokens)
        lookahead = self.config.lookahead_tokens
        if is_last:
            context = x.new_zeros(len(x), lookahead, x.shape[-1])
        else:
            x, context = x[:, :-lookahead], x[:, -lookahead:]
        return self.framed(x, context)

    def framed(self, x: Tensor, context: Tensor) -> Tensor:
        """Embeddings [B, T, C] and those after them [B, lookahead, C] -> mu [B, C, 2 T]."""
        return self.pre_lookahead_layer(x, context).transpose(1, 2).repeat_interleave(self.config.mel_per_token, dim=2)


def prompt_condition(prompt_mel: Tensor, frames: int) -> Tensor:
    """The prompt's mel [B, M, F] at the start of [B, M, frames], zeros where speech is to come."""
    known = prompt_mel[:, :, :frames]
    return F.pad(known, (0, frames - known.shape[-1]))
