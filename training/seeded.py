"""Writes a checkpoint of the released layout with seeded, untrained weights: noise in the true shape of speech.

    python -m training.seeded FOLDER [--size released]

Tests run on the tiny size, and it stands in for the demo voice until that is trained. The released size is for memory,
load time and speed. A file named UNTRAINED says what it is.
"""

import argparse
import json
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor, nn

from runtime.checkpoint import RECIPE, SCALE, SPEAKER_ENCODER, SPEECH_TOKENIZER, TEXT_FOLDER, Part, released_name
from runtime.config import ModelConfig
from runtime.frontend.speaker import CAMPPlus, CAMPPlusConfig, export_speaker_encoder
from runtime.frontend.speech_tokens import SpeechTokenizerConfig, SpeechTokenizerNet, export_speech_tokenizer
from runtime.frontend.tokenizer import TextTokenizer
from runtime.stage0.lm import SpeechLM
from runtime.stage1.conditioning import Flow
from runtime.stage1.hift import HiFT

QWEN: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}

RECIPE_FIELDS: dict[str, Any] = {
    "sample_rate": 24000,
    "token_frame_rate": 25,
    "token_mel_ratio": 2,
    "spk_embed_dim": 192,
    "chunk_size": 25,
    "llm": {
        "llm_input_size": 32,
        "llm_output_size": 32,
        "speech_token_size": 6561,
        "mix_ratio": [5, 15],
        "sampling": {"top_p": 0.8, "top_k": 25, "win_size": 10, "tau_r": 0.1},
    },
    "flow": {
        "input_size": 80,
        "output_size": 80,
        "spk_embed_dim": 192,
        "vocab_size": 6561,
        "token_mel_ratio": 2,
        "pre_lookahead_len": 3,
        "pre_lookahead_layer": {"in_channels": 80, "channels": 32, "pre_lookahead_len": 3},
        "decoder": {
            "cfm_params": {"sigma_min": 1e-6, "t_scheduler": "cosine", "inference_cfg_rate": 0.7},
            "estimator": {
                "dim": 64,
                "depth": 2,
                "heads": 4,
                "dim_head": 16,
                "ff_mult": 2,
                "mel_dim": 80,
                "mu_dim": 80,
                "spk_dim": 80,
                "out_channels": 80,
                "static_chunk_size": 50,
                "num_decoding_left_chunks": -1,
            },
        },
    },
    "hift": {
        "in_channels": 80,
        "base_channels": 32,
        "nb_harmonics": 8,
        "sampling_rate": 24000,
        "nsf_alpha": 0.1,
        "nsf_sigma": 0.003,
        "nsf_voiced_threshold": 10,
        "upsample_rates": [8, 5, 3],
        "upsample_kernel_sizes": [16, 11, 7],
        "istft_params": {"n_fft": 16, "hop_len": 4},
        "resblock_kernel_sizes": [3, 7, 11],
        "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5], [1, 3, 5]],
        "source_resblock_kernel_sizes": [7, 7, 11],
        "source_resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5], [1, 3, 5]],
        "lrelu_slope": 0.1,
        "audio_limit": 0.99,
        "conv_pre_look_right": 4,
        "f0_predictor": {"num_class": 1, "in_channels": 80, "cond_channels": 16},
    },
    "feat_extractor": {
        "n_fft": 1920,
        "num_mels": 80,
        "sampling_rate": 24000,
        "hop_size": 480,
        "win_size": 1920,
        "fmin": 0,
        "fmax": None,
        "center": False,
    },
    "silent_tokens": [1, 2, 28, 29, 55, 248, 494, 2241, 2242, 2322, 2323],
}


def released_size(recipe: dict[str, Any], qwen: dict[str, Any]) -> None:
    """Puts the released numbers (spec 1.2) in place of the tiny ones."""
    qwen |= {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "max_position_embeddings": 32768}
    qwen |= {"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936}
    recipe["llm"] |= {"llm_input_size": 896, "llm_output_size": 896}
    recipe["flow"]["pre_lookahead_layer"]["channels"] = 1024
    recipe["flow"]["decoder"]["estimator"] |= {"dim": 1024, "depth": 22, "heads": 16, "dim_head": 64}
    recipe["hift"]["base_channels"] = recipe["hift"]["f0_predictor"]["cond_channels"] = 512


def write_checkpoint(folder: Path, size: Literal["tiny", "released"] = "tiny", seed: int = 0) -> None:
    """Fills `folder` with every file of the released layout; the same seed gives the same weights."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe, qwen = deepcopy(RECIPE_FIELDS), QWEN | {"vocab_size": write_text_tokenizer(folder / TEXT_FOLDER)}
    tokenizer_sizes = SpeechTokenizerConfig(width=64, heads=1, layers=1)
    encoder_sizes = CAMPPlusConfig(growth_rate=2, bn_size=2, init_channels=8)
    if size == "released":
        released_size(recipe, qwen)
        tokenizer_sizes, encoder_sizes = SpeechTokenizerConfig(), CAMPPlusConfig()
    (folder / TEXT_FOLDER / "config.json").write_text(json.dumps(qwen, indent=1))
    (folder / RECIPE).write_text(yaml.safe_dump(recipe, sort_keys=False))
    config = ModelConfig.from_recipe(recipe, qwen)

    torch.manual_seed(seed)
    hift = HiFT(config.hift)
    nn.init.constant_(hift.f0_predictor.classifier.bias, 120.0)  # Hz: a hum rather than a whisper
    parts: dict[Part, nn.Module] = {"llm": SpeechLM(config.lm), "flow": Flow(config.flow), "hift": hift}
    for part, module in parts.items():
        tensors = {released_name(part, name): value for name, value in module.state_dict().items()}
        save_file(compact(tensors), folder / f"{part}.safetensors")
    export_speech_tokenizer(SpeechTokenizerNet(tokenizer_sizes), folder / SPEECH_TOKENIZER)
    export_speaker_encoder(CAMPPlus(encoder_sizes), folder / SPEAKER_ENCODER)
    (folder / "UNTRAINED").write_text("Seeded weights that were never trained. They make noise, not speech.\n")


def compact(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Storage form: int8 with a scale per row for the tables of 6561 rows and more, half precision for the rest."""
    stored = {}
    for name, value in tensors.items():
        if value.dim() == 2 and len(value) > 6000:
            scale = (value.abs().amax(dim=1) / 127).half()
            stored[name] = (value / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
            stored[name + SCALE] = scale
        else:
            stored[name] = value.half()
    return stored


def write_text_tokenizer(folder: Path) -> int:
    """A byte-level vocabulary without merges; returns its size with the special tokens."""
    from tokenizers.pre_tokenizers import ByteLevel

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {character: index for index, character in enumerate(sorted(ByteLevel.alphabet()))}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    return TextTokenizer(folder).size


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=("tiny", "released"), default="tiny")
    arguments = parser.parse_args()
    write_checkpoint(arguments.folder, arguments.size)
