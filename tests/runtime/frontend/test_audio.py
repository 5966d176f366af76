"""Reference audio: what is decoded, what is refused and with which words, and the resampler of spec 2.1."""

import io
import math
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
import torch

from runtime.errors import RequestError
from runtime.frontend.audio import LONGEST_FILE_SECONDS, check_reference, load_clip, resample
from runtime.types import AudioClip
from tests import golden

CLIPS = Path(__file__).parents[2] / "audio"


def voice(seconds: float, rate: int, level: float = 0.3) -> np.ndarray:
    """A buzz that swells and fades: [n] float32."""
    t = np.arange(round(seconds * rate)) / rate
    return (level * np.sin(2 * np.pi * 220 * t) * np.sin(2 * np.pi * 1.5 * t) ** 2).astype(np.float32)


def encode_with_av(samples: np.ndarray, rate: int, container: str, codec: str, video: bool = False) -> bytes:
    """One-channel samples in a container that libsndfile does not read."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as out:
        if video:
            picture = out.add_stream("mpeg4", rate=10)
            picture.width = picture.height = 32
        stream = out.add_stream(codec, rate=rate, layout="mono")
        if video:
            out.mux(picture.encode(av.VideoFrame(32, 32, "yuv420p")))
            out.mux(picture.encode(None))
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.sample_rate = rate
        out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return buffer.getvalue()


# Decoding


@pytest.mark.parametrize(
    ("file", "rate", "seconds"),
    [
        ("zero_shot_prompt.wav", 24_000, 3.48),
        ("cross_lingual_prompt.wav", 22_050, 13.75),
        ("en_clean_24k.m4a", 24_000, 6.10),
        ("en_u8_44k1_mono.wav", 44_100, 2.745),
        ("en_s24_44k1_stereo.wav", 44_100, 2.745),
        ("fr_44k1_mono.aiff", 44_100, 2.533),
        ("zh_quiet_16k_mono.wav", 16_000, 4.204),
        ("voice_note_16k.opus", 16_000, 8.064),
    ],
)
def test_recordings_of_users_are_decoded_and_accepted(file: str, rate: int, seconds: float) -> None:
    clip = load_clip(CLIPS / file)
    assert (clip.sample_rate, clip.samples.dtype, clip.samples.ndim) == (rate, np.float32, 1)
    assert clip.seconds == pytest.approx(seconds, abs=0.01)
    checked, warnings = check_reference(clip, trim=False)
    assert np.array_equal(checked.samples, clip.samples)
    assert warnings == []


@pytest.mark.parametrize(
    ("subtype", "tolerance"), [("PCM_U8", 8e-3), ("PCM_16", 4e-5), ("PCM_24", 2e-7), ("PCM_32", 1e-7), ("FLOAT", 0)]
)
def test_every_wav_sample_format_gives_the_same_sound(subtype: str, tolerance: float) -> None:
    buffer, samples = io.BytesIO(), voice(1, 16_000)
    soundfile.write(buffer, samples, 16_000, subtype=subtype, format="WAV")
    assert np.abs(load_clip(buffer.getvalue()).samples - samples).max() <= tolerance


@pytest.mark.parametrize(
    ("container", "subtype"), [("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III")]
)
def test_compressed_files_are_decoded(container: str, subtype: str) -> None:
    buffer, samples = io.BytesIO(), voice(1, 24_000)
    soundfile.write(buffer, samples, 24_000, format=container, subtype=subtype)
    buffer.seek(0)
    clip = load_clip(buffer, "clip")  # an open stream, as an upload is
    assert clip.sample_rate == 24_000
    assert np.corrcoef(clip.samples[:24_000], samples)[0, 1] > 0.99


@pytest.mark.parametrize(
    ("container", "codec", "rate", "video"),
    [("webm", "libopus", 48_000, False), ("mp4", "aac", 44_100, True), ("adts", "aac", 32_000, False)],
)
def test_sound_tracks_of_webm_and_mp4_are_decoded(container: str, codec: str, rate: int, video: bool) -> None:
    clip = load_clip(encode_with_av(voice(1, rate), rate, container, codec, video))
    assert clip.sample_rate == rate
    assert clip.seconds == pytest.approx(1, abs=0.1)
    assert np.abs(clip.samples).max() == pytest.approx(0.3, abs=0.03)


def test_content_decides_and_not_the_file_name(tmp_path: Path) -> None:
    misnamed = tmp_path / "song.raw"
    misnamed.write_bytes((CLIPS / "fr_44k1_mono.aiff").read_bytes())
    assert load_clip(misnamed).seconds == pytest.approx(2.533, abs=0.01)


def test_channels_are_averaged() -> None:
    """Trap 67, stereo: a documented conversion."""
    buffer = io.BytesIO()
    left, right = voice(1, 16_000), np.full(16_000, 0.1, np.float32)
    soundfile.write(buffer, np.stack([left, right], 1), 16_000, subtype="FLOAT", format="WAV")
    np.testing.assert_allclose(load_clip(buffer.getvalue()).samples, (left + right) / 2, atol=1e-7)


# Files that cannot be used: trap 67


def wav_header_only() -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.empty(0, np.float32), 16_000, format="WAV")
    return buffer.getvalue()


def silent_video() -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as out:
        picture = out.add_stream("mpeg4", rate=10)
        picture.width = picture.height = 32
        out.mux(picture.encode(av.VideoFrame(32, 32, "yuv420p")))
        out.mux(picture.encode(None))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"Dear diary, today I recorded nothing. " * 50, "cannot be decoded"),
        (b"RIFF\x24\x00\x00\x00WAVE", "cannot be decoded"),
        (bytes(5000), "cannot be decoded"),
        (wav_header_only(), "holds no sound"),
        (silent_video(), "holds no sound"),
        (b"#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\n/home/me/secret.mp3\n#EXT-X-ENDLIST\n", "cannot be decoded"),
    ],
)
def test_useless_files_are_refused_by_their_base_name(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "clip.wav"
    path.write_bytes(content)
    with pytest.raises(RequestError, match=f"^clip.wav {reason}") as refused:
        load_clip(path)
    assert str(tmp_path) not in str(refused.value)


def test_a_playlist_does_not_open_the_files_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CLIPS)
    with pytest.raises(RequestError, match="cannot be decoded"):
        load_clip(b"ffconcat version 1.0\nfile en_clean_24k.m4a\n")


def test_a_missing_file_is_named_without_its_folder(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"^gone.wav cannot be read: No such file") as refused:
        load_clip(tmp_path / "gone.wav")
    assert str(tmp_path) not in str(refused.value)


def test_a_client_path_is_cut_to_its_base_name() -> None:
    with pytest.raises(RequestError, match=r"^me.wav is empty"):
        load_clip(b"", "C:\\Users\\me\\me.wav")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_in_a_file_are_refused(bad: float) -> None:
    samples, buffer = voice(1, 16_000), io.BytesIO()
    samples[100] = bad
    soundfile.write(buffer, samples, 16_000, subtype="FLOAT", format="WAV")
    with pytest.raises(RequestError, match="NaN or infinite"):
        load_clip(buffer.getvalue())


def test_a_small_file_that_unpacks_to_hours_is_refused() -> None:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros(int(LONGEST_FILE_SECONDS * 8000) + 1, np.int16), 8000, format="FLAC")
    with pytest.raises(RequestError, match="longer than 10 minutes"):
        load_clip(buffer.getvalue())


def test_half_a_file_is_refused_or_gives_its_half() -> None:
    whole = (CLIPS / "fr_44k1_mono.aiff").read_bytes()
    assert load_clip(whole[: len(whole) // 2]).seconds == pytest.approx(2.533 / 2, abs=0.02)
    m4a = (CLIPS / "en_clean_24k.m4a").read_bytes()
    with pytest.raises(RequestError, match="cannot be decoded"):
        load_clip(m4a[: len(m4a) // 2])


# Bounds of a reference: trap 67


@pytest.mark.parametrize(
    ("samples", "rate", "reason"),
    [
        (np.empty(0, np.float32), 16_000, "is empty"),
        (voice(0.49, 16_000), 16_000, r"0.49 s long; give 0.5 s"),
        (voice(42, 16_000), 16_000, r"42.00 s long; cut it to 30 s or less, or ask for trim"),
        (voice(1, 16_000, level=5e-4), 16_000, "silent"),
        (np.full(16_000, math.nan, np.float32), 16_000, "NaN"),
        (voice(1, 16_000) * 32768, 16_000, "scale its samples"),
        (voice(1, 7_999), 7_999, "sample rate of 7999 Hz; give 8000"),
        (voice(1, 16_000), 10**9, "sample rate of 1000000000 Hz"),
        (np.zeros((16_000, 2), np.float32), 16_000, "mono"),
        (np.ones(16_000, np.int16), 16_000, "int16"),
    ],
)
def test_unusable_references_are_refused_with_fact_and_limit(samples: np.ndarray, rate: int, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        check_reference(AudioClip(samples, rate), trim=False)


def test_the_bounds_themselves_are_accepted() -> None:
    for seconds in (0.5, 30):
        _, warnings = check_reference(AudioClip(voice(seconds, 16_000), 16_000), trim=False)
        assert warnings == []


def test_trim_keeps_the_first_30_seconds_and_says_so() -> None:
    clip = AudioClip(voice(42, 16_000), 16_000)
    trimmed, warnings = check_reference(clip, trim=True)
    assert trimmed.seconds == 30
    assert np.array_equal(trimmed.samples, clip.samples[: 30 * 16_000])
    assert warnings == ["reference is 42.0 s long; its first 30 s are used"]


def test_a_trimmed_reference_that_starts_with_30_silent_seconds_is_refused() -> None:
    samples = np.concatenate([np.zeros(30 * 16_000, np.float32), voice(5, 16_000)])
    with pytest.raises(RequestError, match="silent"):
        check_reference(AudioClip(samples, 16_000), trim=True)


def test_telephone_recordings_pass_with_a_warning() -> None:
    """Trap 67, 8 kHz: let in, a deliberate departure from spec 2.1."""
    _, warnings = check_reference(AudioClip(voice(1, 8_000), 8_000), trim=False, name="source")
    assert len(warnings) == 1
    assert "source has a sample rate of 8000 Hz" in warnings[0]


def test_the_checked_clip_is_a_copy() -> None:
    """Trap 64: what the caller writes into its array afterwards does not reach us."""
    samples = voice(1, 16_000)
    checked, _ = check_reference(AudioClip(samples, 16_000), trim=False)
    samples[:] = 0
    assert np.abs(checked.samples).max() > 0.1


# Resampling


def test_resampling_equals_the_reference() -> None:
    expected = golden.load("audio_features")
    prompt = load_clip(CLIPS / "zero_shot_prompt.wav").samples[12_000:60_000]
    resampled = resample(torch.from_numpy(prompt)[None], 24_000, 16_000)
    assert resampled.shape == (1, 32_000)
    torch.testing.assert_close(resampled[:, -4000:], expected["wav16k"], atol=1e-5, rtol=0)
    odd = torch.from_numpy(load_clip(CLIPS / "cross_lingual_prompt.wav").samples)[None]
    for rate, length in ((24_000, 329_992), (16_000, 219_995)):
        resampled = resample(odd, 22_050, rate)
        assert resampled.shape == (1, length)
        head = expected[f"cross_lingual_{rate // 1000}k_first{rate // 5}"]
        torch.testing.assert_close(resampled[:, : rate // 5], head, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rate", [16_000, 24_000])
def test_resampling_from_44100_equals_the_reference(rate: int) -> None:
    """Trap 67, 44.1 kHz. The fixture's input is a 440 Hz sine in float32."""
    sine = 0.5 * torch.sin(torch.arange(44_100, dtype=torch.float32) * 2 * math.pi * 440 / 44_100)
    expected = golden.load("audio_features")[f"resample_44100_to_{rate}"]
    resampled = resample(sine[None], 44_100, rate)
    torch.testing.assert_close(resampled[:, : rate // 10], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("orig", "new"), [(11_025, 16_000), (16_001, 24_000), (8_000, 24_000), (192_000, 16_000)])
def test_rates_without_a_common_divisor_resample_a_tone_to_itself(orig: int, new: int) -> None:
    def tone(rate: int) -> torch.Tensor:
        return torch.sin(2 * math.pi * 300 * torch.arange(rate, dtype=torch.float64) / rate).float()

    resampled = resample(tone(orig), orig, new)
    assert resampled.shape == (new,)
    inner = slice(new // 10, -new // 10)
    assert (resampled - tone(new))[inner].abs().max() < 2e-3


def test_resampling_treats_rows_alike_and_keeps_equal_rates() -> None:
    rows = torch.randn(2, 3, 4410)
    together = resample(rows, 44_100, 16_000)
    torch.testing.assert_close(together[1, 2], resample(rows[1, 2], 44_100, 16_000))
    assert resample(rows, 24_000, 24_000) is rows


def test_resampling_follows_its_input_to_another_device() -> None:
    assert resample(torch.empty(2, 44_100, device="meta"), 44_100, 16_000).device.type == "meta"
