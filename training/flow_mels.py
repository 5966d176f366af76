"""Mels as the flow makes them of the corpus's own tokens: what the vocoder hears in use.

    python -m training.flow_mels --corpus DIR --flow FILE

After training.encode. So that solved mel and recorded sound stay aligned frame by frame, the walk does not begin at
pure noise but at a later knot of the flow's schedule, on the line from noise to the true mel. The prompt is what the
speaker said right before. Written beside the corpus as `flow_mels.safetensors`: half [F, M] on its grid, the true mel
where the split is not that of training.
Shapes: B rows, N frames of prompt and utterance with padding, T = N / 2 tokens, M mel bins, E speaker dimensions.
"""

import argparse
import hashlib
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.config import FlowConfig
from runtime.frontend.mel import PromptMel
from runtime.stage1.conditioning import Flow
from runtime.stage1.solver import schedule, solve
from training import loop
from training.corpus import TRAIN, Corpus
from training.encode import Encoded
from training.shapes import FLOW, MEL

FILE = "flow_mels.safetensors"
PROMPT_FRAMES = 150  # at most; even, so that a prompt begins on a token


def load(corpus: Corpus, folder: Path) -> Tensor:
    """The flow's mel of a whole corpus, half [F, M]."""
    path = folder / FILE
    if not path.is_file():
        raise FileNotFoundError(f"no {FILE} in {folder}; run training.flow_mels first")
    mel = load_file(path)["mel"]
    if len(mel) != len(corpus.phone):
        raise ValueError(f"{path} has {len(mel)} frames, the corpus {len(corpus.phone)}; run training.flow_mels again")
    return mel.to(corpus.device)


def first_time(noise_time: float, steps: int) -> float:
    """The first knot of the schedule that is not before `noise_time`."""
    knots = [time for time, _ in schedule(steps)]
    later = [knot for knot in knots if knot > noise_time - 0.001]  # a knot may be named by three digits
    if not later:
        raise ValueError(f"--noise-time {noise_time} leaves no step; the last of {steps} begins at {knots[-1]:.3f}")
    return later[0]


def prompts(corpus: Corpus) -> np.ndarray:
    """Frames of the speaker's stream to be given before each utterance [U]; 0 at its start and in other splits."""
    lead = np.zeros(len(corpus), np.int64)
    rows = corpus.rows(TRAIN)
    start, first = corpus.table[rows, 0], corpus.streams[:, 0]
    lead[rows] = np.minimum(start - first[np.searchsorted(first, start, side="right") - 1], PROMPT_FRAMES)
    return lead


def solve_rest(
    flow: Flow,
    start: float,
    noise: Tensor,
    mel: Tensor,
    tokens: Tensor,
    voice: Tensor,
    given: Tensor,
    real: Tensor,
    chunked: bool,
) -> Tensor:
    """Noise and true mel [B, M, N], tokens [B, T], voice [B, E] -> solved mel [B, M, N].

    The first `given` [B] frames are the prompt; `real` [B, N] is false on the padding at the end.
    """
    # zeros behind the last token of each row, as Flow.mu has them behind the last of all
    x = flow.input_embedding(tokens) * real[:, ::2, None]
    mu = flow.framed(x, x.new_zeros(len(x), flow.config.lookahead_tokens, x.shape[-1]))
    return solve(
        flow.estimator,
        torch.lerp(noise, mel, start),
        mu,
        flow.speaker(voice),
        mel * (torch.arange(mel.shape[-1], device=mel.device) < given[:, None])[:, None],
        steps=flow.config.euler_steps,
        rate=flow.config.guidance_rate,
        chunked=chunked,
        mask=real[:, None],
        start=start,
    )


@torch.no_grad()
def flow_mels(corpus: Corpus, encoded: Encoded, flow: Flow, true: Tensor, start: float, batch_seconds: float) -> Tensor:
    """The true mel [F, M] with the training utterances replaced by what the flow makes of their tokens."""
    made, lead = true.clone(), prompts(corpus)
    generator = torch.Generator(corpus.device).manual_seed(0)
    for number, group in enumerate(corpus.batches(corpus.rows(TRAIN), batch_seconds, lead)):
        index, real = corpus.grid(group, lead)
        given = torch.from_numpy(lead[group]).to(corpus.device)
        mel = true[index].float().transpose(1, 2)
        noise = torch.randn(mel.shape, device=corpus.device, generator=generator)
        tokens, voice = encoded.tokens[index[:, ::2] // 2], encoded.speakers[group]
        with loop.half(corpus.device):
            # streaming and whole in turn, as the flow itself was trained
            solved = solve_rest(flow, start, noise, mel, tokens, voice, given, real, chunked=number % 2 == 1)
        new = real & (torch.arange(index.shape[1], device=corpus.device) >= given[:, None])
        made[index[new]] = solved.transpose(1, 2)[new].half()
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--flow", type=Path, required=True, help="flow.safetensors, a trainer's or the exported one")
    parser.add_argument(
        "--noise-time",
        type=float,
        default=0.13,
        help="begin at the first knot from here on: 0 is pure noise; six steps have 0, .034, .134, .293, .5 and .741",
    )
    parser.add_argument("--batch-seconds", type=float, default=600, help="seconds of speech solved together")
    parser.add_argument("--device", default="cuda")
    write(parser.parse_args())


def write(options: argparse.Namespace, shape: FlowConfig = FLOW) -> None:
    device = torch.device(options.device)
    start = first_time(options.noise_time, shape.euler_steps)
    flow = Flow(shape)
    loop.fill(flow, options.flow, "flow")
    flow = flow.to(device).eval().requires_grad_(False)
    corpus = Corpus(options.corpus, device)
    true = corpus.mel(PromptMel(MEL).to(device))
    made = flow_mels(corpus, Encoded.load(options.corpus, device), flow, true, start, options.batch_seconds)
    origin = {
        "flow": options.flow.name,
        "sha256": hashlib.sha256(options.flow.read_bytes()).hexdigest(),
        "time": f"{start:.4f}",
    }
    save_file({"mel": made.cpu()}, options.corpus / FILE, origin)
    frames = int(corpus.table[corpus.rows(TRAIN), 1].sum())
    away = float((made - true).abs().mean(1, dtype=torch.float32).sum()) / frames  # the other splits add nothing
    print(f"{frames} frames from time {start:.3f} on; mean distance to the true mel {away:.4f}", flush=True)


if __name__ == "__main__":
    main()
