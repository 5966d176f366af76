"""Writes trained weights as a checkpoint in the released layout.

    python -m training.export --weights DIR --vocabulary DIR --out assets/demo

The storage form is the one that `runtime.checkpoint.expand` widens: the language model and the flow as int8 rows with
scales, the vocoder in half precision. The two ONNX files keep their weights in half precision behind casts, which
onnxruntime folds away at load.
"""

import argparse
import shutil
from pathlib import Path

import numpy as np
import onnx
import yaml
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from runtime.checkpoint import (
    RECIPE,
    SPEAKER_ENCODER,
    SPEECH_TOKENIZER,
    TEXT_FOLDER,
    Checkpoint,
    Part,
    expand,
    load_strict,
    open_checkpoint,
    released_name,
)
from runtime.config import FlowConfig, HiFTConfig, LMConfig, MelConfig
from runtime.frontend.speaker import CAMPPlus, CAMPPlusConfig, export_speaker_encoder
from runtime.frontend.speech_tokens import SpeechTokenizerConfig, SpeechTokenizerNet, export_speech_tokenizer
from runtime.stage0.lm import SpeechLM
from runtime.stage0.qwen_export import qwen2_fields
from runtime.stage1.conditioning import Flow
from runtime.stage1.hift import HiFT
from training.bpe import write_json
from training.loop import compact
from training.shapes import FLOW, HIFT, LM, MEL, SPEAKER, TOKENIZER


def recipe(lm: LMConfig, flow: FlowConfig, hift: HiFTConfig, mel: MelConfig) -> dict[str, object]:
    """The YAML of a checkpoint, with the released file's names."""
    dit = flow.dit
    return {
        "sample_rate": hift.sample_rate,
        "token_frame_rate": 25,
        "token_mel_ratio": flow.mel_per_token,
        "spk_embed_dim": flow.speaker_dim,
        "chunk_size": dit.chunk_frames // flow.mel_per_token,
        "silent_tokens": [],  # the vocoder's silences are learnt here, none is cut
        "llm": {
            "llm_input_size": lm.qwen.hidden_size,
            "llm_output_size": lm.qwen.hidden_size,
            "speech_token_size": lm.speech_tokens,
            "num_extra_ids": lm.extra_ids,
            "sampling": {
                "top_p": lm.ras.top_p,
                "top_k": lm.ras.top_k,
                "win_size": lm.ras.win_size,
                "tau_r": lm.ras.tau_r,
            },
        },
        "flow": {
            "input_size": flow.token_channels,
            "output_size": flow.mel_bins,
            "spk_embed_dim": flow.speaker_dim,
            "vocab_size": flow.speech_tokens,
            "token_mel_ratio": flow.mel_per_token,
            "pre_lookahead_len": flow.lookahead_tokens,
            "pre_lookahead_layer": {
                "in_channels": flow.token_channels,
                "channels": flow.lookahead_channels,
                "pre_lookahead_len": flow.lookahead_tokens,
            },
            "decoder": {
                "cfm_params": {
                    "t_scheduler": "cosine",
                    "inference_cfg_rate": flow.guidance_rate,
                    "n_timesteps": flow.euler_steps,
                },
                "estimator": {
                    "dim": dit.dim,
                    "depth": dit.depth,
                    "heads": dit.heads,
                    "dim_head": dit.head_dim,
                    "ff_mult": dit.ff_mult,
                    "mel_dim": dit.mel_bins,
                    "mu_dim": dit.mu_dim,
                    "spk_dim": dit.speaker_dim,
                    "static_chunk_size": dit.chunk_frames,
                },
            },
        },
        "hift": {
            "in_channels": hift.mel_bins,
            "base_channels": hift.base_channels,
            "nb_harmonics": hift.harmonics,
            "sampling_rate": hift.sample_rate,
            "nsf_alpha": hift.sine_amplitude,
            "nsf_sigma": hift.noise_amplitude,
            "nsf_voiced_threshold": hift.voiced_threshold_hz,
            "upsample_rates": list(hift.upsample_rates),
            "upsample_kernel_sizes": list(hift.upsample_kernels),
            "istft_params": {"n_fft": hift.istft_n_fft, "hop_len": hift.istft_hop},
            "resblock_kernel_sizes": list(hift.resblock_kernels),
            "resblock_dilation_sizes": [list(row) for row in hift.resblock_dilations],
            "source_resblock_kernel_sizes": list(hift.source_resblock_kernels),
            "source_resblock_dilation_sizes": [list(row) for row in hift.source_resblock_dilations],
            "lrelu_slope": hift.leaky_slope,
            "audio_limit": hift.audio_limit,
            "conv_pre_look_right": hift.lookahead_frames,
            "f0_predictor": {"in_channels": hift.f0.mel_bins, "cond_channels": hift.f0.channels},
        },
        "feat_extractor": {
            "n_fft": mel.n_fft,
            "hop_size": mel.hop,
            "win_size": mel.window,
            "num_mels": mel.bins,
            "sampling_rate": mel.sample_rate,
            "fmin": int(mel.f_min),
            "fmax": mel.f_max,
        },
    }


def write_part(folder: Path, part: Part, weights: dict[str, Tensor], int8: bool) -> None:
    """Stores one part under its released names."""
    named = {released_name(part, name): value for name, value in expand(weights).items()}
    path = folder / f"{part}.safetensors"
    save_file(compact(named, int8), path)
    path.chmod(0o644)  # safetensors writes for the owner alone


def halve(path: Path) -> None:
    """Keeps the large weights of an ONNX file in half precision, each cast back where the graph begins."""
    model = onnx.load(path)
    casts = []
    for tensor in model.graph.initializer:
        if tensor.data_type != TensorProto.FLOAT or np.prod(tensor.dims) < 512:
            continue
        name = tensor.name
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), name + ".half"))
        casts.append(helper.make_node("Cast", [name + ".half"], [name], to=TensorProto.FLOAT))
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, path)


def write_stages(
    weights: Path,
    vocabulary: Path,
    out: Path,
    lm: LMConfig = LM,
    flow: FlowConfig = FLOW,
    hift: HiFTConfig = HIFT,
    mel: MelConfig = MEL,
) -> None:
    """Recipe, text folder and the three weight files."""
    out.mkdir(parents=True, exist_ok=True)
    (out / RECIPE).write_text(yaml.safe_dump(recipe(lm, flow, hift, mel), sort_keys=False), encoding="utf-8")
    if vocabulary.resolve() != (out / TEXT_FOLDER).resolve():
        shutil.copytree(vocabulary, out / TEXT_FOLDER, dirs_exist_ok=True)
    fields = qwen2_fields(lm.qwen, lm.qwen.vocab_size) | {"tie_word_embeddings": True}
    write_json(out / TEXT_FOLDER / "config.json", fields)
    parts: list[tuple[Part, bool]] = [("llm", True), ("flow", True), ("hift", False)]
    for part, int8 in parts:
        write_part(out, part, load_file(weights / f"{part}.safetensors"), int8)
    (out / "UNTRAINED").unlink(missing_ok=True)


def write_front_end(
    weights: Path, out: Path, tokenizer: SpeechTokenizerConfig = TOKENIZER, speaker: CAMPPlusConfig = SPEAKER
) -> None:
    """Both ONNX files."""
    net, encoder = SpeechTokenizerNet(tokenizer), CAMPPlus(speaker)
    net.load_state_dict(expand(load_file(weights / "tokenizer.safetensors")))
    encoder.load_state_dict(expand(load_file(weights / "speaker.safetensors")))
    export_speech_tokenizer(net, out / SPEECH_TOKENIZER)
    export_speaker_encoder(encoder, out / SPEAKER_ENCODER)
    for name in (SPEECH_TOKENIZER, SPEAKER_ENCODER):
        halve(out / name)


def check(folder: Path) -> Checkpoint:
    """Opens the result as the runtime will: strictly."""
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    parts: list[tuple[Part, nn.Module]] = [
        ("llm", SpeechLM(config.lm)),
        ("flow", Flow(config.flow)),
        ("hift", HiFT(config.hift)),
    ]
    for part, module in parts:
        load_strict(module, part, checkpoint.weights(part))
    return checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--weights", type=Path, required=True, help="folder with what the trainers wrote")
    parser.add_argument("--vocabulary", type=Path, required=True, help="folder that training.bpe wrote")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    write_stages(options.weights, options.vocabulary, options.out)
    write_front_end(options.weights, options.out)
    check(options.out)
    files = sorted(path for path in options.out.rglob("*") if path.is_file())
    for path in files:
        print(f"{path.stat().st_size / 1e6:8.2f} MB  {path.relative_to(options.out)}")
    print(f"{sum(path.stat().st_size for path in files) / 1e6:8.2f} MB  in all")


if __name__ == "__main__":
    main()
