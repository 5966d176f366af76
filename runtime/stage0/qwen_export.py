"""Writes the language model as a stock Qwen2 folder, which engines that know Qwen2 can load without a plug-in.

The head has no bias (spec 1.3), so nothing is special about it once the text table is left out: the embedding is the
speech embedding, the vocabulary are the speech and control ids, and prompts come as embeddings.
"""

import hashlib
import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from runtime.config import LMConfig, QwenConfig
from runtime.stage0.lm import SpeechLM

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def export_qwen2(lm: SpeechLM, cache: Path) -> Path:
    """The folder under `cache` that holds this model; written once, found again by a hash of all that is in it."""
    weights, config = qwen2_weights(lm), qwen2_config(lm.config, lm.llm_decoder.weight.dtype)
    folder = cache / f"qwen2-{_fingerprint(weights, config)}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=cache))
    try:
        (unfinished / CONFIG).write_text(json.dumps(config, indent=1), encoding="utf-8")
        save_file(weights, unfinished / WEIGHTS, metadata={"format": "pt"})
        unfinished.rename(folder)  # at once: a folder of this name is always complete
    except OSError:
        if not folder.is_dir():  # else another process was faster, with the same bytes
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def qwen2_weights(lm: SpeechLM) -> dict[str, Tensor]:
    """Tensors on the CPU under the names of Qwen2ForCausalLM; the text table has no place there."""
    renamed = {
        "speech_embedding.weight": "model.embed_tokens.weight",
        "llm_decoder.weight": "lm_head.weight",
    }
    return {
        renamed.get(name, name.replace("backbone.", "model.", 1)): weight.detach().cpu().contiguous()
        for name, weight in lm.state_dict().items()
        if name != "backbone.embed_tokens.weight"
    }


def qwen2_config(config: LMConfig, dtype: torch.dtype) -> dict[str, object]:
    """What config.json says, in the spelling of transformers 4 and 5 where they differ."""
    qwen = config.qwen
    return {
        **qwen2_fields(qwen, config.rows),
        "rope_parameters": {"rope_type": "default", "rope_theta": qwen.rope_theta},
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "eos_token_id": config.eos,
        "bos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def qwen2_fields(qwen: QwenConfig, vocabulary: int) -> dict[str, object]:
    """What every config.json of a Qwen2 says."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": vocabulary,
        "hidden_size": qwen.hidden_size,
        "intermediate_size": qwen.intermediate_size,
        "num_hidden_layers": qwen.num_hidden_layers,
        "num_attention_heads": qwen.num_attention_heads,
        "num_key_value_heads": qwen.num_key_value_heads,
        "max_position_embeddings": qwen.max_position_embeddings,
        "rope_theta": qwen.rope_theta,
        "rms_norm_eps": qwen.rms_norm_eps,
        "hidden_act": "silu",
    }


def _fingerprint(weights: dict[str, Tensor], config: dict[str, object]) -> str:
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, weight in sorted(weights.items()):
        digest.update(f"{name} {list(weight.shape)} {weight.dtype};".encode())
        digest.update(weight.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:24]
