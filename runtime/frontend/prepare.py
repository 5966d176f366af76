"""A request becomes model inputs: sentences laid out for stage 0, the reference as both stages need it.

Control tokens are put together here and nowhere else (spec 2.7): the assistant sentence and `<|endofprompt|>` stand
before the transcript (zero-shot), around the instruction (instruct), or before every sentence (cross-lingual). All
bounds are checked before a model runs.

Under `official` fidelity a cross-lingual text is one piece with the prefix inside it, neither normalised nor split, and
the prefix counts in its length limits, as in the reference; `intended` normalises and splits the user's text first.
"""

import secrets

import torch
from torch import Tensor

from runtime.checkpoint import Checkpoint
from runtime.config import RasConfig
from runtime.errors import CheckpointError, RequestError
from runtime.frontend.audio import check_reference, resample
from runtime.frontend.encoders import build_encoders
from runtime.frontend.mel import PromptMel
from runtime.frontend.reading import LANGUAGES
from runtime.frontend.reference_cache import ReferenceCache, clip_key
from runtime.frontend.splitting import is_only_punctuation
from runtime.frontend.text import Piece, TextFrontend, notices, strip_marker
from runtime.frontend.tokenizer import TextTokenizer
from runtime.pace import expected_seconds
from runtime.settings import EngineSettings
from runtime.types import (
    AudioClip,
    Mode,
    PlannedSentence,
    PreparedReference,
    PreparedSpeech,
    SamplingParams,
    Sentence,
    SpeechPlan,
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
# A word of one syllable and its stop may be four text tokens, which allow 3.2 s: time for what nobody wrote. A text
# that is likely to take no more than the first may take the second; slow speech takes twice what is likely.
WORD_SECONDS, LONGEST_WORD_SECONDS = 0.5, 2.0


class Frontend:
    """Owns the text and audio models of a checkpoint and a cache of prepared voices. Safe to call from many threads."""

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings, device: torch.device) -> None:
        """`device` is the engine's; the settings say whether references are encoded there."""
        self._config = checkpoint.config
        self._fidelity = settings.fidelity
        self._official = settings.fidelity == "official"
        self._tokenizer = TextTokenizer(checkpoint.text_folder)
        if self._tokenizer.size > self._config.lm.qwen.vocab_size:
            raise CheckpointError(
                f"the text vocabulary has {self._tokenizer.size} tokens, but the language model's config.json has "
                f"vocab_size {self._config.lm.qwen.vocab_size}"
            )
        self._text = TextFrontend(self._tokenizer.count, self._tokenizer.special_tokens)
        self._encoders = build_encoders(checkpoint, settings, device)
        self._prompt_mel = PromptMel(self._config.mel).to(self._encoders.device)
        self._cache = ReferenceCache(settings.reference_cache_bytes)
        self._identity = (checkpoint.fingerprint, *self._encoders.identity)

    def describe(self) -> dict[str, str]:
        return {"front end": self._encoders.name}

    def prepare(self, request: SpeechRequest) -> PreparedSpeech:
        """Raises RequestError for anything the caller can fix; nothing has run on the stages then."""
        _check_settings(request)
        mode, warnings = request.mode, []
        clip, notes = check_reference(request.reference, trim=request.trim)
        warnings += notes
        if request.source is None:
            pieces, notes = self._pieces(request)
            layouts = [self._layout(request, piece.text) for piece in pieces]
            reference = self._reference(clip, align=True)
            sentences = tuple(
                Sentence(
                    piece.text,
                    piece.written,
                    self._prompt(layout, mode, reference, seconds := expected_seconds(piece.text)),
                    expected_seconds=seconds / request.speed,
                    pause_before_seconds=piece.pause_before_seconds,
                    pause_after_seconds=piece.pause_after_seconds,
                )
                for piece, layout in zip(pieces, layouts, strict=True)
            )
        else:
            source, notes = check_reference(request.source, trim=request.trim, name="source")
            # The reference converts voices without aligning tokens and mel, which shifts the result (spec 9.21).
            reference = self._reference(clip, align=not self._official)
            with self._encoders.apart():
                samples = resample(self._samples(source), source.sample_rate, MODEL_RATE)
                tokens = self._encoders.tokens.encode(samples)
            sentences = (Sentence("", tokens=tokens, expected_seconds=source.seconds / request.speed),)
        warnings += notes
        return PreparedSpeech(
            mode=mode,
            reference=reference,
            sentences=sentences,
            sampling=request.sampling or checkpoint_sampling(self._config.lm.ras),
            seed=secrets.randbits(31) if request.seed is None else request.seed,
            speed=request.speed,
            streaming=request.streaming,
            first_sentence=request.first_sentence,
            level_lufs=request.level_lufs,
            warnings=tuple(warnings),
        )

    def plan(self, request: SpeechRequest) -> SpeechPlan:
        """What `prepare` would have spoken, without a look at the reference; any clip will do. Raises RequestError."""
        _check_settings(request)
        if request.source is not None:
            planned = PlannedSentence("", "", request.source.seconds / request.speed, 0.0, 0.0)
            return SpeechPlan(request.mode, (planned,), ())
        pieces, warnings = self._pieces(request)
        for piece in pieces[:1]:
            self._layout(request, piece.text)  # for the errors of transcript and instruction
        sentences = (
            PlannedSentence(
                piece.text,
                piece.written,
                expected_seconds(piece.text, request.speed),
                piece.pause_before_seconds,
                piece.pause_after_seconds,
            )
            for piece in pieces
        )
        return SpeechPlan(request.mode, tuple(sentences), tuple(warnings))

    # Text

    def _pieces(self, request: SpeechRequest) -> tuple[list[Piece], list[str]]:
        """What is spoken, sentence by sentence, and what the listener should know of it."""
        text = strip_marker(request.text)
        split = not (self._official and request.mode is Mode.CROSS_LINGUAL)
        pieces = self._text.pieces(text, self._fidelity, request.normalize, request.words, split, request.language)
        warnings = notices(text, self._tokenizer.special_tokens, self._fidelity, request.language)
        if request.mode is Mode.ZERO_SHOT and 2 * len(text) < len(request.transcript or ""):
            warnings.append("the text is much shorter than the transcript; such requests are spoken less reliably")
        if not 0 <= request.first_sentence < len(pieces):
            raise RequestError(f"there is no sentence {request.first_sentence}; the text has {len(pieces)}, from 0")
        return pieces[request.first_sentence :], warnings

    def _layout(self, request: SpeechRequest, text: str) -> tuple[list[int], list[int]]:
        """Token ids before a sentence, and of the sentence: control tokens included, exactly one marker."""
        if request.mode is Mode.ZERO_SHOT:
            before = ASSISTANT + MARKER + self._transcript(request)
        elif request.mode is Mode.INSTRUCT:
            before = f"{ASSISTANT} {self._instruction(request)}{MARKER}"
        elif self._official:
            before, text = "", ASSISTANT + MARKER + text
        else:
            before = ASSISTANT + MARKER
        ids = self._tokenizer.encode(before), self._tokenizer.encode(text)
        assert sum(part.count(self._tokenizer.end_of_prompt) for part in ids) == 1
        return ids

    def _prompt(
        self, layout: tuple[list[int], list[int]], mode: Mode, reference: PreparedReference, seconds: float
    ) -> Stage0Prompt:
        """`seconds` is what the text is likely to take at speed 1."""
        before, text = layout
        max_tokens = MAX_RATIO * len(text)
        if seconds <= WORD_SECONDS and not self._official:
            max_tokens = min(max_tokens, int(LONGEST_WORD_SECONDS * self._config.token_rate))
        return Stage0Prompt(
            text_tokens=torch.tensor(before + text, dtype=torch.long),
            speech_tokens=reference.speech_tokens if mode is Mode.ZERO_SHOT else empty_tokens(),
            min_tokens=MIN_RATIO * len(text),
            max_tokens=max_tokens,
        )

    def _transcript(self, request: SpeechRequest) -> str:
        transcript = strip_marker(request.transcript or "")
        if not self._official:  # there the marker in the same string switches normalisation off (spec 2.8)
            transcript = self._text.transcript(transcript, normalize=request.normalize, words=request.words)
        if is_only_punctuation(transcript):
            raise RequestError("the transcript has no words; write what the reference says, or leave it out")
        self._limit("transcript", transcript, TRANSCRIPT_LIMIT)
        return transcript

    def _instruction(self, request: SpeechRequest) -> str:
        instruction, _, rest = (request.instruction or "").partition(MARKER)
        strip_marker(instruction), strip_marker(rest)  # for their errors
        if rest.strip():
            raise RequestError(f"the instruction goes on after {MARKER}; give the text to speak as text")
        instruction = instruction.strip().removeprefix(ASSISTANT).strip()
        self._limit("instruction", instruction, INSTRUCTION_LIMIT)
        return instruction

    def _limit(self, name: str, text: str, limit: int) -> None:
        if (length := self._tokenizer.count(text)) > limit:
            raise RequestError(f"the {name} has {length} text tokens; shorten it to {limit}")

    # Sound

    def speaker_vector(self, clip: AudioClip) -> Tensor:
        """[E] of a clip of at least a second, whatever else it holds."""
        with self._encoders.apart():
            return self._encoders.speaker.embed(resample(self._samples(clip), clip.sample_rate, MODEL_RATE))

    def _reference(self, clip: AudioClip, *, align: bool) -> PreparedReference:
        key = clip_key(clip, *self._identity, align)
        return self._cache.get(key, lambda: self._extract(clip, key, align))

    def _extract(self, clip: AudioClip, key: str, align: bool) -> PreparedReference:
        with self._encoders.apart():
            samples = self._samples(clip)
            samples_16k = resample(samples, clip.sample_rate, MODEL_RATE)  # each from the original (spec 9.20)
            samples_24k = resample(samples, clip.sample_rate, self._config.sample_rate)
            tokens, mel = self._encoders.tokens.encode(samples_16k), self._prompt_mel(samples_24k).cpu()
            vector = self._encoders.speaker.embed(samples_16k)
        if align:  # spec 2.6
            ratio = self._config.flow.mel_per_token
            length = min(len(mel) // ratio, len(tokens))
            tokens, mel = tokens[:length], mel[: length * ratio]
        return PreparedReference(tokens, mel.contiguous(), vector, key)

    def _samples(self, clip: AudioClip) -> Tensor:
        return torch.from_numpy(clip.samples).to(self._encoders.device)


def _check_settings(request: SpeechRequest) -> None:
    if not 0.5 <= request.speed <= 2.0:
        raise RequestError(f"speed is {request.speed:g}; choose 0.5 to 2.0")
    if request.language not in LANGUAGES:
        raise RequestError(f"language is {request.language!r}; choose {', '.join(LANGUAGES[:-1])} or {LANGUAGES[-1]}")
    if request.seed is not None and not 0 <= request.seed < 2**63:
        raise RequestError(f"seed is {request.seed}; choose 0 to {2**63 - 1}")


def checkpoint_sampling(ras: RasConfig) -> SamplingParams:
    """The sampling a checkpoint was tuned for."""
    return SamplingParams("ras", top_p=ras.top_p, top_k=ras.top_k, window=ras.win_size, repeat_threshold=ras.tau_r)
