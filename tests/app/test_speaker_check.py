"""Several voices in one recording, told by the demo's speaker encoder."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import soxr
import torch

from app.examples import load_examples
from app.reference_check import RATE, SpeechDetector, check
from app.speaker_check import Embed, several_voices
from runtime import AudioClip, load_clip, resolve_checkpoint
from runtime.frontend.speaker import SpeakerEncoder
from tests.app.site import AUDIO

ONE_VOICE = ("zero_shot_prompt.wav", "cross_lingual_prompt.wav", "en_clean_24k.m4a", "en_noisy_48k_mono.wav")
ONE_VOICE += ("jfk_44k1_stereo.flac", "zh_quiet_16k_mono.wav")


@pytest.fixture(scope="module")
def embed() -> Embed:
    encoder = SpeakerEncoder(Path(resolve_checkpoint("demo").speaker_encoder), threads=1)
    return lambda clip: encoder.embed(torch.from_numpy(clip.samples)).numpy()


def is_mixed(clip: AudioClip, embed: Embed) -> bool:
    return several_voices(clip, check(clip, SpeechDetector()).speech, embed)


def test_recordings_of_one_person_are_not_suspected(embed: Embed) -> None:
    clips = [load_clip(AUDIO / name) for name in ONE_VOICE] + [load_clip(each.sound) for each in load_examples()]
    assert [is_mixed(clip, embed) for clip in clips] == [False] * 11


def test_two_people_one_after_the_other_are_noticed(embed: Embed) -> None:
    clips = [load_clip(AUDIO / name) for name in ("zero_shot_prompt.wav", "en_clean_24k.m4a", "jfk_44k1_stereo.flac")]
    clips += [load_clip(each.sound) for each in load_examples()[::3]]
    samples = [soxr.resample(clip.samples, clip.sample_rate, RATE).astype(np.float32) for clip in clips]
    joined = [AudioClip(np.concatenate(pair), RATE) for pair in combinations(samples, 2)]
    assert sum(is_mixed(clip, embed) for clip in joined) >= len(joined) - 1


def test_a_short_recording_is_not_judged(embed: Embed) -> None:
    assert not is_mixed(load_clip(AUDIO / "fr_44k1_mono.aiff"), embed)
