"""Sizes of the demo checkpoint, as the config classes of the runtime take them.

Chosen on two CPU cores: ten steps of the flow for a first hop after a 4 s prompt (300 frames) take .80 s with a DiT of
320 x 8 and 1.03 s with 384 x 8; a vocoder of base 256 runs at .07 of real time, one of 384 at .14. Six Euler steps lose
nothing against ten: copy synthesis of 24 sentences has the same 4.2 % of words wrong and a likeness of .80 with either,
and the mel lies nearer to the teacher's (L1 .575 against .590).
"""

from runtime.config import (
    DiTConfig,
    F0Config,
    FlowConfig,
    HiFTConfig,
    LMConfig,
    MelConfig,
    QwenConfig,
    RasConfig,
)
from runtime.frontend.speaker import CAMPPlusConfig
from runtime.frontend.speech_tokens import CODEBOOK, SpeechTokenizerConfig

MEL = MelConfig(n_fft=1920, hop=480, window=1920, bins=80, sample_rate=24_000, f_min=0.0, f_max=None)
MEL_MEAN, MEL_SPREAD = -5.5, 2.7  # of the log-mel of speech, about: what nets that read it begin with
TOKENIZER = SpeechTokenizerConfig(mel_bins=128, width=192, heads=3, layers=6)
SPEAKER = CAMPPlusConfig(growth_rate=16, init_channels=64)
TEXT_ROWS = 1280  # 256 bytes, 743 merges, 281 control tokens

LM = LMConfig(
    qwen=QwenConfig(
        vocab_size=TEXT_ROWS,
        hidden_size=320,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=5,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
    ),
    speech_tokens=CODEBOOK,
    extra_ids=200,
    ras=RasConfig(top_p=0.8, top_k=25, win_size=10, tau_r=0.1),
)

FLOW = FlowConfig(
    speech_tokens=CODEBOOK,
    token_channels=80,
    mel_bins=80,
    speaker_dim=192,
    mel_per_token=2,
    lookahead_tokens=3,
    lookahead_channels=512,
    guidance_rate=0.7,
    euler_steps=6,
    dit=DiTConfig(
        dim=320, depth=8, heads=5, head_dim=64, ff_mult=2, mel_bins=80, mu_dim=80, speaker_dim=80, chunk_frames=50
    ),
)

HIFT = HiFTConfig(
    mel_bins=80,
    base_channels=256,
    harmonics=8,
    sample_rate=24_000,
    sine_amplitude=0.1,
    noise_amplitude=0.003,
    voiced_threshold_hz=10.0,
    upsample_rates=(8, 5, 3),
    upsample_kernels=(16, 11, 7),
    istft_n_fft=16,
    istft_hop=4,
    resblock_kernels=(3, 7, 11),
    resblock_dilations=((1, 3, 5), (1, 3, 5), (1, 3, 5)),
    source_resblock_kernels=(7, 7, 11),
    source_resblock_dilations=((1, 3, 5), (1, 3, 5), (1, 3, 5)),
    leaky_slope=0.1,
    audio_limit=0.99,
    lookahead_frames=4,
    f0=F0Config(mel_bins=80, channels=192),
)
