"""What the page says of a text's language before it is spoken."""

from app.languages import AUTO, KNOWN, notices, scripts
from runtime import LANGUAGES


def test_letters_tell_the_script() -> None:
    assert set(scripts("Größe 中文 かな 한글 мир")) == {"latin", "zh", "ja", "ko", "ru"}
    assert set(scripts("مرحبا")) == {"Arabic"}
    assert not scripts("12 + 3 … 🙂")


def test_letters_that_the_model_never_saw_are_told_in_any_choice() -> None:
    for language in (AUTO, "en"):
        (said,) = notices("नमस्ते", language)
        assert "Devanagari" in said


def test_known_languages_need_no_words() -> None:
    for text in ("Hello there.", "你好。", "Grüß Gott.", "Привет.", "こんにちは", "안녕하세요", ""):
        assert notices(text, AUTO) == []


def test_a_text_without_words_is_told() -> None:
    """Input 9: before the engine is asked."""
    for text in ("...", "？！", "🙂 🙂"):
        assert "nothing to speak" in notices(text, AUTO)[0], text
    assert notices("Hi 🙂🙂, 20 °C", AUTO) == ["Not spoken: 🙂"]
    assert notices("   ", AUTO) == []


def test_a_choice_that_the_text_contradicts_is_told() -> None:
    assert "not written in 中文" in notices("Hello there.", "zh")[0]
    assert notices("你好，Jack。", "zh") == []
    assert "katakana" in notices("今日は天気です", "ja")[0]  # input 4: never silent Chinese


def test_numbers_are_english_words_in_no_german_text() -> None:
    """Input 1: a German text keeps its digits, and that is said."""
    assert "Numbers" in notices("Die 3 Bäume sind 12 m² groß.", "de")[0]


def test_the_page_offers_the_languages_of_the_engine() -> None:
    assert {AUTO, *KNOWN} == set(LANGUAGES)
