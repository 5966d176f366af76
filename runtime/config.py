"""What a checkpoint is: one frozen dataclass per component, field for field (spec 1.2).

`ModelConfig.from_recipe` reads the released YAML, already turned into plain data by `recipe.py`, together with the
nested Qwen2 config. Numbers that stand in both must agree, and the error names both places.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.errors import CheckpointError

# The released files do not name their silent speech tokens (spec 3.5); another codebook lists its own in the YAML.
RELEASED_SILENT_TOKENS = frozenset({1, 2, 28, 29, 55, 248, 494, 2241, 2242, 2322, 2323})


@dataclass(frozen=True, slots=True)
class QwenConfig:
    """The text backbone: `config.json` of the nested Qwen2 folder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "QwenConfig":
        """Reads both layouts of transformers: `rope_theta` at the top (4.x) or inside `rope_parameters` (5.x)."""
        rope = fields.get("rope_theta") or fields.get("rope_parameters", {}).get("rope_theta")
        try:
            return cls(
                rope_theta=float(rope),
                rms_norm_eps=float(fields["rms_norm_eps"]),
                **{name: int(fields[name]) for name in cls.__slots__ if name not in ("rope_theta", "rms_norm_eps")},
            )
        except (KeyError, TypeError) as missing:
            raise CheckpointError(f"the language model's config.json lacks {missing}") from missing


@dataclass(frozen=True, slots=True)
class RasConfig:
    """Repetition-aware sampling as the checkpoint was tuned for it (spec 3.4)."""

    top_p: float
    top_k: int
    win_size: int
    tau_r: float


@dataclass(frozen=True, slots=True)
class LMConfig:
    """The `llm` block. Every id from `speech_tokens` up ends a sequence (spec 3.1)."""

    qwen: QwenConfig
    speech_tokens: int  # ids 0..speech_tokens-1 are sound
    extra_ids: int
    ras: RasConfig

    @property
    def rows(self) -> int:
        """Rows of the speech embedding and of the head."""
        return self.speech_tokens + self.extra_ids

    @property
    def sos(self) -> int:
        return self.speech_tokens

    @property
    def eos(self) -> int:
        return self.speech_tokens + 1

    @property
    def task_id(self) -> int:
        return self.speech_tokens + 2


@dataclass(frozen=True, slots=True)
class DiTConfig:
    """The estimator inside the `flow` block (spec 4.2)."""

    dim: int
    depth: int
    heads: int
    head_dim: int
    ff_mult: int
    mel_bins: int
    mu_dim: int
    speaker_dim: int
    chunk_frames: int  # width of the causal blocks of the streaming mask
    conv_kernel: int = 31
    conv_groups: int = 16
    time_channels: int = 256


@dataclass(frozen=True, slots=True)
class FlowConfig:
    """The `flow` block: tokens to mel (spec 4)."""

    speech_tokens: int
    token_channels: int
    mel_bins: int
    speaker_dim: int
    mel_per_token: int
    lookahead_tokens: int  # right context a chunk waits for
    lookahead_channels: int
    guidance_rate: float
    euler_steps: int
    dit: DiTConfig


@dataclass(frozen=True, slots=True)
class F0Config:
    """The pitch predictor inside the `hift` block (spec 5.1)."""

    mel_bins: int
    channels: int


@dataclass(frozen=True, slots=True)
class HiFTConfig:
    """The `hift` block: mel to samples (spec 5)."""

    mel_bins: int
    base_channels: int
    harmonics: int
    sample_rate: int
    sine_amplitude: float
    noise_amplitude: float
    voiced_threshold_hz: float
    upsample_rates: tuple[int, ...]
    upsample_kernels: tuple[int, ...]
    istft_n_fft: int
    istft_hop: int
    resblock_kernels: tuple[int, ...]
    resblock_dilations: tuple[tuple[int, ...], ...]
    source_resblock_kernels: tuple[int, ...]
    source_resblock_dilations: tuple[tuple[int, ...], ...]
    leaky_slope: float
    audio_limit: float
    lookahead_frames: int
    f0: F0Config

    @property
    def samples_per_frame(self) -> int:
        product = self.istft_hop
        for rate in self.upsample_rates:
            product *= rate
        return product


@dataclass(frozen=True, slots=True)
class MelConfig:
    """The `feat_extractor` block: the mel of the reference audio (spec 2.5)."""

    n_fft: int
    hop: int
    window: int
    bins: int
    sample_rate: int
    f_min: float
    f_max: float | None  # None is half the sample rate


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A whole checkpoint."""

    sample_rate: int
    token_rate: int
    speaker_dim: int
    chunk_tokens: int  # first streaming hop, and the grid that hops stay on
    lm: LMConfig
    flow: FlowConfig
    hift: HiFTConfig
    mel: MelConfig
    silent_tokens: frozenset[int]

    @property
    def samples_per_token(self) -> int:
        return self.sample_rate // self.token_rate

    @classmethod
    def from_recipe(cls, recipe: Mapping[str, Any], qwen: Mapping[str, Any]) -> "ModelConfig":
        """Builds the config from the checkpoint's YAML (as data) and the JSON of its Qwen2 folder.

        Raises CheckpointError for a missing field and for two numbers that contradict each other.
        """
        try:
            config = cls(
                sample_rate=int(recipe["sample_rate"]),
                token_rate=int(recipe.get("token_frame_rate", 25)),
                speaker_dim=int(recipe["spk_embed_dim"]),
                chunk_tokens=int(recipe.get("chunk_size", 25)),
                lm=_lm(recipe["llm"], QwenConfig.from_json(qwen)),
                flow=flow_config(recipe["flow"]),
                hift=hift_config(recipe["hift"]),
                mel=_mel(recipe["feat_extractor"]),
                silent_tokens=frozenset(map(int, recipe.get("silent_tokens", RELEASED_SILENT_TOKENS))),
            )
        except KeyError as missing:
            raise CheckpointError(f"the checkpoint's YAML lacks {missing}") from missing
        except (TypeError, ValueError) as wrong:
            raise CheckpointError(f"the checkpoint's YAML holds a value of the wrong kind: {wrong}") from wrong
        config._check(recipe)
        return config

    def _check(self, recipe: Mapping[str, Any]) -> None:
        flow, hift, dit = self.flow, self.hift, self.flow.dit
        pairs = [
            (
                "llm.llm_input_size",
                recipe["llm"].get("llm_input_size"),
                "config.json hidden_size",
                self.lm.qwen.hidden_size,
            ),
            ("llm.speech_token_size", self.lm.speech_tokens, "flow.vocab_size", flow.speech_tokens),
            ("spk_embed_dim", self.speaker_dim, "flow.spk_embed_dim", flow.speaker_dim),
            ("flow.output_size", flow.mel_bins, "hift.in_channels", hift.mel_bins),
            ("flow.output_size", flow.mel_bins, "feat_extractor.num_mels", self.mel.bins),
            ("flow.output_size", flow.mel_bins, "estimator.mel_dim", dit.mel_bins),
            ("sample_rate", self.sample_rate, "hift.sampling_rate", hift.sample_rate),
            ("sample_rate", self.sample_rate, "feat_extractor.sampling_rate", self.mel.sample_rate),
            ("samples per mel frame of hift", hift.samples_per_frame, "feat_extractor.hop_size", self.mel.hop),
            (
                "sample_rate / token rate",
                self.samples_per_token,
                "token_mel_ratio x hop",
                flow.mel_per_token * self.mel.hop,
            ),
            (
                "chunk_size x token_mel_ratio",
                self.chunk_tokens * flow.mel_per_token,
                "static_chunk_size",
                dit.chunk_frames,
            ),
        ]
        wrong = [f"{a} is {x}, but {b} is {y}" for a, x, b, y in pairs if x is not None and x != y]
        qwen = self.lm.qwen
        if qwen.hidden_size % qwen.num_attention_heads or qwen.num_attention_heads % qwen.num_key_value_heads:
            wrong.append(
                f"{qwen.num_attention_heads} attention heads divide neither hidden_size {qwen.hidden_size} "
                f"nor into {qwen.num_key_value_heads} key/value heads"
            )
        if wrong:
            raise CheckpointError("the checkpoint contradicts itself: " + "; ".join(wrong))


def _lm(block: Mapping[str, Any], qwen: QwenConfig) -> LMConfig:
    sampling = block.get("sampling", {})
    return LMConfig(
        qwen=qwen,
        speech_tokens=int(block["speech_token_size"]),
        extra_ids=int(block.get("num_extra_ids", 200)),
        ras=RasConfig(
            top_p=float(sampling.get("top_p", 0.8)),
            top_k=int(sampling.get("top_k", 25)),
            win_size=int(sampling.get("win_size", 10)),
            tau_r=float(sampling.get("tau_r", 0.1)),
        ),
    )


def flow_config(block: Mapping[str, Any]) -> FlowConfig:
    """The `flow` block of a checkpoint's YAML. Raises KeyError for a missing field."""
    decoder = block["decoder"]
    cfm = decoder["cfm_params"]
    cfm = cfm.get("content", cfm)
    if cfm.get("t_scheduler", "cosine") != "cosine":
        raise CheckpointError(f"flow.decoder.cfm_params.t_scheduler is {cfm['t_scheduler']!r}; only 'cosine' is known")
    estimator = decoder["estimator"]
    lookahead = block["pre_lookahead_layer"]
    return FlowConfig(
        speech_tokens=int(block["vocab_size"]),
        token_channels=int(block["input_size"]),
        mel_bins=int(block["output_size"]),
        speaker_dim=int(block["spk_embed_dim"]),
        mel_per_token=int(block["token_mel_ratio"]),
        lookahead_tokens=int(block["pre_lookahead_len"]),
        lookahead_channels=int(lookahead["channels"]),
        guidance_rate=float(cfm["inference_cfg_rate"]),
        euler_steps=int(cfm.get("n_timesteps", 10)),
        dit=DiTConfig(
            dim=int(estimator["dim"]),
            depth=int(estimator["depth"]),
            heads=int(estimator["heads"]),
            head_dim=int(estimator["dim_head"]),
            ff_mult=int(estimator["ff_mult"]),
            mel_bins=int(estimator["mel_dim"]),
            mu_dim=int(estimator["mu_dim"]),
            speaker_dim=int(estimator["spk_dim"]),
            chunk_frames=int(estimator["static_chunk_size"]),
        ),
    )


def hift_config(block: Mapping[str, Any]) -> HiFTConfig:
    """The `hift` block of a checkpoint's YAML. Raises KeyError for a missing field."""
    f0 = block["f0_predictor"]
    return HiFTConfig(
        mel_bins=int(block["in_channels"]),
        base_channels=int(block["base_channels"]),
        harmonics=int(block["nb_harmonics"]),
        sample_rate=int(block["sampling_rate"]),
        sine_amplitude=float(block["nsf_alpha"]),
        noise_amplitude=float(block["nsf_sigma"]),
        voiced_threshold_hz=float(block["nsf_voiced_threshold"]),
        upsample_rates=_ints(block["upsample_rates"]),
        upsample_kernels=_ints(block["upsample_kernel_sizes"]),
        istft_n_fft=int(block["istft_params"]["n_fft"]),
        istft_hop=int(block["istft_params"]["hop_len"]),
        resblock_kernels=_ints(block["resblock_kernel_sizes"]),
        resblock_dilations=tuple(map(_ints, block["resblock_dilation_sizes"])),
        source_resblock_kernels=_ints(block["source_resblock_kernel_sizes"]),
        source_resblock_dilations=tuple(map(_ints, block["source_resblock_dilation_sizes"])),
        leaky_slope=float(block["lrelu_slope"]),
        audio_limit=float(block["audio_limit"]),
        lookahead_frames=int(block["conv_pre_look_right"]),
        f0=F0Config(mel_bins=int(f0["in_channels"]), channels=int(f0["cond_channels"])),
    )


def _mel(block: Mapping[str, Any]) -> MelConfig:
    f_max = block.get("fmax")
    return MelConfig(
        n_fft=int(block["n_fft"]),
        hop=int(block["hop_size"]),
        window=int(block["win_size"]),
        bins=int(block["num_mels"]),
        sample_rate=int(block["sampling_rate"]),
        f_min=float(block["fmin"]),
        f_max=None if f_max is None else float(f_max),
    )


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in values)
