"""A request becomes model inputs: sentences laid out for stage 0, the reference as both stages need it.

Control tokens are put together here and nowhere else (spec 2.7): the assistant sentence and `<|endofprompt|>` stand
before the transcript (zero-shot), around the instruction (instruct), or before every sentence (cross-lingual). All bounds
are checked before a model runs.

Under `official` fidelity a cross-lingual text is one piece with the prefix inside it, neither normalised nor split, and the
prefix counts in its length limits, as in the reference; `intended` normalises and splits the user's text first.
"""

import secrets

import torch
from torch import Tensor

from runtime.checkpoint import Checkpoint
from runtime.config import RasConfig
from runtime.errors import RequestError
from runtime.frontend.audio import check_reference, resample
from runtime.frontend.mel import prompt_mel
from runtime.frontend.reference_cache import ReferenceCache, clip_key
from runtime.frontend.speaker import SpeakerEncoder
from runtime.frontend.speech_tokens import SpeechTokenizer
from runtime.frontend.text import TextFrontend, strip_marker
from runtime.frontend.tokenizer import TextTokenizer
from runtime.settings import EngineSettings
from runtime.types import (
    AudioClip,
    Mode,
    PreparedReference,
    PreparedSpeech,
    SamplingParams,
    Sentence,
    SpeechRequest,
    Stage0Prompt,
    empty_tokens,
)

ASSISTANT = "You are a helpful assistant."
MARKER = TextTokenizer.marker
MODEL_RATE = 16_000  # of the speech tokenizer and the speaker encoder
INSTRUCTION_LIMIT = 80  # text tokens; the trained instructions are one short sentence (spec 2.7)
TRANSCRIPT_LIMIT = 600  # text tokens; 30 s of fast speech have fewer
MIN_RATIO, MAX_RATIO = 2, 20  # speech tokens per text token (spec 3.3)


class Frontend:
    """Owns the text and audio models of a checkpoint and a cache of prepared voices. Safe to call from many threads."""

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings) -> None:
        self._config = checkpoint.config
        self._official = settings.fidelity == "official"
        self._tokenizer = TextTokenizer(checkpoint.text_folder)
        if self._tokenizer.size > self._config.lm.qwen.vocab_size:
            raise_too_many_ids(self._tokenizer.size, self._config.lm.qwen.vocab_size)
        self._text = TextFrontend(lambda text: len(self._tokenizer.encode(text)), fidelity=settings.fidelity)
        self._speech_tokenizer = SpeechTokenizer(checkpoint.speech_tokenizer, threads=settings.onnx_threads)
        self._speaker_encoder = SpeakerEncoder(checkpoint.speaker_encoder, threads=settings.onnx_threads)
        self._cache = ReferenceCache(settings.reference_cache_bytes)
        self._identity = (checkpoint.fingerprint, self._speech_tokenizer.identity, self._speaker_encoder.identity)

    def describe(self) -> dict[str, str]:
        return {"front end": self._speech_tokenizer.identity}

    def prepare(self, request: SpeechRequest) -> PreparedSpeech:
        """Raises RequestError for anything the caller can fix; nothing has run on the stages then."""
        if not 0.5 <= request.speed <= 2.0:
            raise RequestError(f"speed is {request.speed:g}; choose 0.5 to 2.0")
        warnings: list[str] = []
        mode = request.mode
        sentences = () if mode is Mode.CONVERSION else self._sentences(request, warnings)
        reference = self._reference(request.reference, request.trim, mode, warnings)
        if mode is Mode.CONVERSION:
            assert request.source is not None
            source, notes = check_reference(request.source, trim=request.trim, name="source")
            warnings += notes
            tokens = self._speech_tokenizer.encode(resample(_tensor(source), source.sample_rate, MODEL_RATE))
            prepared = (Sentence(text="", tokens=tokens),)
        else:
            prompts = [self._prompt(request, sentence, reference) for sentence in sentences]
            prepared = tuple(Sentence(text, prompt) for text, prompt in zip(sentences, prompts, strict=True))
        return PreparedSpeech(
            mode=mode,
            reference=reference,
            sentences=prepared,
            sampling=request.sampling or checkpoint_sampling(self._config.lm.ras),
            seed=secrets.randbits(31) if request.seed is None else request.seed,
            speed=request.speed,
            streaming=request.streaming,
            warnings=tuple(warnings),
        )

    # Text

    def _sentences(self, request: SpeechRequest, warnings: list[str]) -> tuple[str, ...]:
        text = strip_marker(request.text)
        if self._official and request.mode is Mode.CROSS_LINGUAL:
            self._text.check_speakable(text)
            return (text,)
        spoken = self._text.sentences(text, normalize=request.normalize)
        warnings += spoken.warnings
        transcript = request.transcript or ""
        if request.mode is Mode.ZERO_SHOT and len(text) < 0.5 * len(transcript):
            warnings.append("the text is much shorter than the transcript; such requests are spoken less reliably")
        return tuple(spoken.pieces)

    def _prompt(self, request: SpeechRequest, sentence: str, reference: PreparedReference) -> Stage0Prompt:
        before = ""
        speech_tokens = empty_tokens()
        if request.mode is Mode.ZERO_SHOT:
            before = ASSISTANT + MARKER + self._transcript(request)
            speech_tokens = reference.speech_tokens
        elif request.mode is Mode.INSTRUCT:
            before = self._instruction(request)
        elif not self._official:
            before = ASSISTANT + MARKER
        else:
            sentence = ASSISTANT + MARKER + sentence
        text_ids = self._tokenizer.encode(sentence)
        ids = self._tokenizer.encode(before) + text_ids
        assert ids.count(self._tokenizer.end_of_prompt) == 1
        return Stage0Prompt(
            text_tokens=torch.tensor(ids, dtype=torch.long),
            speech_tokens=speech_tokens,
            min_tokens=MIN_RATIO * len(text_ids),
            max_tokens=MAX_RATIO * len(text_ids),
        )

    def _transcript(self, request: SpeechRequest) -> str:
        transcript = strip_marker(request.transcript or "")
        if not self._official:  # there the marker in the same string switches normalisation off (spec 2.8)
            transcript = self._text.transcript(transcript, normalize=request.normalize)
        self._limit("transcript", transcript, TRANSCRIPT_LIMIT)
        return transcript

    def _instruction(self, request: SpeechRequest) -> str:
        instruction = strip_marker(request.instruction or "", keep_before=True).removeprefix(ASSISTANT).strip()
        self._limit("instruction", instruction, INSTRUCTION_LIMIT)
        return f"{ASSISTANT} {instruction}{MARKER}"

    def _limit(self, name: str, text: str, limit: int) -> None:
        if (length := len(self._tokenizer.encode(text))) > limit:
            raise RequestError(f"the {name} has {length} text tokens; shorten it to {limit}")

    # Sound

    def _reference(self, clip: AudioClip, trim: bool, mode: Mode, warnings: list[str]) -> PreparedReference:
        checked, notes = check_reference(clip, trim=trim)
        warnings += notes
        # The reference converts voices without aligning tokens and mel, which shifts the result (spec 9.21).
        align = not (self._official and mode is Mode.CONVERSION)
        key = clip_key(checked, *self._identity, align)
        return self._cache.get(key, lambda: self._extract(checked, key, align))

    def _extract(self, clip: AudioClip, key: str, align: bool) -> PreparedReference:
        samples = _tensor(clip)
        samples_16k = resample(samples, clip.sample_rate, MODEL_RATE)  # each from the original (spec 9.20)
        samples_24k = resample(samples, clip.sample_rate, self._config.sample_rate)
        tokens = self._speech_tokenizer.encode(samples_16k)
        mel = prompt_mel(samples_24k, self._config.mel)
        if align:  # spec 2.6
            ratio = self._config.flow.mel_per_token
            length = min(len(mel) // ratio, len(tokens))
            tokens, mel = tokens[:length], mel[: length * ratio]
        return PreparedReference(tokens, mel.contiguous(), self._speaker_encoder.embed(samples_16k), key)


def checkpoint_sampling(ras: RasConfig) -> SamplingParams:
    """The sampling a checkpoint was tuned for."""
    return SamplingParams("ras", top_p=ras.top_p, top_k=ras.top_k, window=ras.win_size, repeat_threshold=ras.tau_r)


def _tensor(clip: AudioClip) -> Tensor:
    return torch.from_numpy(clip.samples)
