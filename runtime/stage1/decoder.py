"""Stage 1: speech tokens in, samples out.

Shapes: n generated tokens (25 Hz) after P prompt tokens, F prompt mel frames (50 Hz), M mel bins, S samples (24 kHz).
Each chunk solves the flow over prompt and all tokens so far, hands on the frames that are new, and lets the vocoder
continue from where it stands (spec 6.2). What a stream carries between chunks is its `Stage1State`. A streaming solve
leaves out the finished blocks of the prompt, which are solved once per voice (`past.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from runtime.errors import GenerationError
from runtime.stage1.conditioning import Flow
from runtime.stage1.host import on_host
from runtime.stage1.interruption import ask_before
from runtime.stage1.noise import FLOW_FRAMES, NoiseBank
from runtime.stage1.past import Past, StreamBudget
from runtime.stage1.prompts import NOT_FINITE, Prompts, solve_apart
from runtime.stage1.solver import Piece, Solved
from runtime.stage1.speed import Stretch
from runtime.stage1.state import Chunk, Stage1State, piece_of
from runtime.stage1.vocoder import MelChunk, Vocoder
from runtime.types import PreparedReference

if TYPE_CHECKING:  # base.py builds what stands on this file
    from runtime.stage1.base import FlowSolver

LAST_CHUNK = {"full": "full", "chunked": "chunked (not the official one)"}
KV_BYTES = {"cuda": 6 * 2**30, "cpu": 512 * 2**20}  # of prompts, and as much again of live streams


class Stage1:
    """Flow and vocoder of one checkpoint. One worker drives it, no other thread touches it."""

    def __init__(
        self,
        flow: Flow,
        solver: "FlowSolver",
        vocoder: Vocoder,
        noise: NoiseBank,
        *,
        final_attention: Literal["full", "chunked"] = "full",
        no_streaming: str | None = None,  # why chunks cannot be solved, if so
        voice_kv_bytes: int | None = None,
        stream_kv_bytes: int | None = None,
    ) -> None:
        self._flow = flow
        self._solver = solver
        self._vocoder = vocoder
        self._noise = noise
        self._final_attention = final_attention
        self._no_streaming = no_streaming
        self._config = flow.config
        self._device = flow.input_embedding.weight.device
        default = KV_BYTES[self._device.type]
        voices, streams = (default if limit is None else limit for limit in (voice_kv_bytes, stream_kv_bytes))
        self.is_wanted: Callable[[], bool] = lambda: True  # asked within a decode, once interruptible
        self._prompts = Prompts(flow, solver, noise, voices)
        self.voices = self._prompts.cache
        self.streams = StreamBudget(streams if solver.keeps_past else 0)

    def make_interruptible(self) -> None:
        """From now on a decode ends with Abandoned, soon after `is_wanted` has begun to say no.

        What its segments carry is then undefined. For modules that run one after the other: a graph asks nobody.
        """
        parts: list[nn.Module] = [block.ff for block in self._flow.estimator.transformer_blocks]  # type: ignore[misc]
        ask_before([*parts, *self._vocoder.parts], lambda: self.is_wanted())

    @torch.inference_mode()
    def open(self, reference: PreparedReference, *, speed: float = 1.0) -> Stage1State:
        """Starts a segment in a voice. Raises GenerationError when the voice lacks a part or has the wrong shape."""
        tokens, mel, speaker = reference.speech_tokens, reference.mel, reference.speaker
        config = self._config
        if tokens.dim() != 1 or not len(tokens):
            raise GenerationError(f"reference tokens have shape {list(tokens.shape)}; stage 1 needs [P] with P > 0")
        if mel.dim() != 2 or not len(mel) or mel.shape[1] != config.mel_bins:
            raise GenerationError(
                f"reference mel has shape {list(mel.shape)}; stage 1 needs [F, {config.mel_bins}] with F > 0"
            )
        if speaker.shape != (config.speaker_dim,):
            raise GenerationError(f"speaker vector has shape {list(speaker.shape)}, not [{config.speaker_dim}]")
        self._check_tokens(tokens)
        mel, speaker = (part.to(self._device, torch.float32) for part in (mel, speaker))
        return Stage1State(
            voice=reference.key,
            prompt_tokens=tokens.to(self._device, torch.long),
            prompt_mel=mel.T[None],
            speaker=self._flow.speaker(speaker[None]),
            stretch=Stretch(speed),
            vocoder=self._vocoder.open(),
        )

    @torch.inference_mode()
    def decode(self, state: Stage1State, tokens: Tensor, *, is_last: bool, keep: bool = False) -> Tensor:
        """All tokens [n] of the segment up to the end of this chunk -> its new samples [S] float32 on the CPU.

        Unless `is_last`, the final three tokens are look-ahead and sound in the next chunk. Raises GenerationError when
        the segment cannot go on: an illegal token, more than fits, a cut off the grid, NaN in mel or samples.
        """
        (samples,) = self.decode_together([Chunk(state, tokens, is_last, keep)])
        if isinstance(samples, Exception):
            raise samples
        return samples

    @torch.inference_mode()
    def decode_together(self, chunks: Sequence[Chunk]) -> list[Tensor | Exception]:
        """Chunks of different segments, their flow in one solve: samples of each, or the error that ends a segment."""
        outcomes: dict[Chunk, Tensor | Exception] = {}
        voices = self._prompts.pasts([chunk.state for chunk in chunks if self._looks_back(chunk)])
        pieces: dict[Chunk, Piece] = {}
        for chunk in chunks:
            try:
                if piece := self.begin(chunk, voices):
                    pieces[chunk] = piece
            except Exception as error:  # whatever it is, it belongs to this segment
                outcomes[chunk] = error
        solved = solve_apart(self._solver, pieces)
        mels: dict[Chunk, MelChunk] = {}
        finite: dict[Chunk, Tensor] = {}
        for chunk in chunks:
            if chunk not in outcomes:
                try:
                    mel = self._take(chunk, solved.get(chunk))
                    finite[chunk] = mel.isfinite().all()
                    mels[chunk] = self.finish(chunk, mel)
                except Exception as error:  # likewise
                    outcomes[chunk] = error
        outcomes.update(zip(mels, self._vocoder.decode_together(list(mels.values())), strict=True))
        # Asked at the end: what a GPU was given to do until here, it did without waiting for an answer.
        answers = on_host(torch.stack(list(finite.values()))).tolist() if finite else []
        for chunk, is_finite in zip(finite, answers, strict=True):
            if not is_finite:
                outcomes[chunk] = GenerationError(NOT_FINITE)
        return [outcomes[chunk] for chunk in chunks]

    def begin(self, chunk: Chunk, voices: Mapping[str, Past | Exception]) -> Piece | None:
        """What a chunk wants solved, or None when it brings no frame. Raises GenerationError for what cannot be."""
        state = chunk.state
        frames = self._check(chunk)
        if not frames:
            return None
        chunked = self._is_chunked(chunk)
        everything = torch.cat((state.prompt_tokens, chunk.tokens.to(self._device, torch.long)))
        mu = self._flow.mu(everything[None], is_last=chunk.is_last)
        if not chunked:
            return piece_of(state, self._noise, mu, frames, chunked=False)
        past = state.past or voices.get(state.voice)
        if isinstance(past, Exception):
            raise past
        keeps = chunk.keep and not chunk.is_last and self._solver.keeps_past
        own = self._solver.past_bytes(frames) - self._solver.past_bytes(self._prompts.frames(state))
        keeps = keeps and self.streams.claim(state, own)
        return piece_of(state, self._noise, mu, frames, chunked=True, past=past, keep=frames if keeps else 0)

    def _check(self, chunk: Chunk) -> int:
        """Where a chunk ends, in frames from the start of the prompt; 0 when it brings none.

        Raises GenerationError for an illegal token, more than fits, a cut off the grid.
        """
        config, state = self._config, chunk.state
        self._check_tokens(chunk.tokens)
        prompt, prompt_frames = len(state.prompt_tokens), state.prompt_mel.shape[-1]
        frames = self._frames(chunk)
        if frames <= prompt_frames + state.mel_frames:
            return 0
        if frames > FLOW_FRAMES:
            raise GenerationError(
                f"{len(chunk.tokens)} speech tokens after a prompt of {prompt} pass the flow's "
                f"{FLOW_FRAMES} frames; {self._capacity(prompt, prompt_frames)} fit, split the text"
            )
        if not chunk.is_last and frames % config.dit.chunk_frames:
            grid = config.dit.chunk_frames // config.mel_per_token
            raise GenerationError(
                f"a chunk may end at a multiple of {grid} tokens from the start of the prompt, not at "
                f"{frames // config.mel_per_token}: its last frames would change with the next chunk"
            )
        if self._no_streaming and self._is_chunked(chunk):
            raise GenerationError(self._no_streaming)
        return frames

    def _is_chunked(self, chunk: Chunk) -> bool:
        return not chunk.is_last or self._final_attention == "chunked"

    def finish(self, chunk: Chunk, mel: Tensor) -> MelChunk:
        """What the vocoder gets of a chunk whose new frames are [M, k]."""
        mel = chunk.state.stretch.push(mel, is_last=chunk.is_last)
        return MelChunk(chunk.state.vocoder, mel, chunk.is_last)

    @torch.inference_mode()
    def new_mel(self, state: Stage1State, tokens: Tensor, *, is_last: bool, keep: bool = False) -> Tensor:
        """The mel frames [M, k] that these tokens add to those handed on before; possibly none."""
        chunk = Chunk(state, tokens, is_last, keep)
        voices = self._prompts.pasts([state] if self._looks_back(chunk) else [])
        piece = self.begin(chunk, voices)
        mel = self._take(chunk, self._solver.solve([piece])[0] if piece else None)
        if not mel.isfinite().all():
            raise GenerationError(NOT_FINITE)
        return mel

    def _take(self, chunk: Chunk, solved: Solved | Exception | None) -> Tensor:
        """The new frames [M, k] of a chunk whose piece, if it had one, is solved."""
        if isinstance(solved, Exception):
            raise solved
        state, prompt_frames = chunk.state, chunk.state.prompt_mel.shape[-1]
        if solved is None:
            return state.prompt_mel.new_empty(self._config.mel_bins, 0)
        frames = self._frames(chunk)
        mel = solved.mel[:, prompt_frames + state.mel_frames - frames :].float()
        state.mel_frames = frames - prompt_frames
        state.past = solved.past
        if state.past is None:
            self.streams.release(state)
        return mel

    def _frames(self, chunk: Chunk) -> int:
        """Where a chunk ends, in frames from the start of the prompt; 0 when it ends within the look-ahead.

        Generated frames are counted behind the F prompt frames. F is 2P but in voice conversion by the reference's own
        rule (spec 9.21): there the prompt's last tokens sound too, or the first generated frames are missing.
        """
        heard = len(chunk.tokens) - (0 if chunk.is_last else self._config.lookahead_tokens)
        return self._config.mel_per_token * (len(chunk.state.prompt_tokens) + heard) if heard > 0 else 0

    def frames(self, tokens: int) -> int:
        """Mel frames of so many tokens."""
        return self._config.mel_per_token * tokens

    def capacity_tokens(self, reference: PreparedReference) -> int:
        """How many generated tokens fit beside this prompt in one segment; longer text is split (spec 9.36)."""
        return self._capacity(len(reference.speech_tokens), len(reference.mel))

    def describe(self) -> dict[str, str]:
        """What runs, for people and for the metadata of a response."""
        return {
            "flow estimator": self._solver.name,
            "flow precision": str(self._solver.dtype).removeprefix("torch."),
            "vocoder": self._vocoder.describe(),
            "stage 1 device": str(self._device),
            "kept of prompts": f"at most {self.voices.limit_bytes / 2**20:.0f} MiB",
            "kept of streams": f"at most {self.streams.limit_bytes / 2**20:.0f} MiB",
            "attention of the last chunk": LAST_CHUNK[self._final_attention],
        }

    def _looks_back(self, chunk: Chunk) -> bool:
        """Whether a chunk is to be solved, has no past, and leaves what lies before as it was."""
        try:
            return not chunk.state.past and self._is_chunked(chunk) and self._check(chunk) > 0
        except GenerationError:  # raised again where it ends the segment
            return False

    def _capacity(self, prompt_tokens: int, prompt_frames: int) -> int:
        ratio = self._config.mel_per_token
        return max(0, (FLOW_FRAMES - max(ratio * prompt_tokens, prompt_frames)) // ratio)

    def _check_tokens(self, tokens: Tensor) -> None:
        limit = self._config.speech_tokens
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < limit:
            raise GenerationError(
                f"speech tokens run from {int(tokens.min())} to {int(tokens.max())}; the flow knows 0 to {limit - 1}"
            )
