"""What counts as a word, and as a word misheard."""

import pytest

from benchmarks.words import word_errors, words


@pytest.mark.parametrize(
    ("text", "heard"),
    [
        ("At five she was still awake.", "at 5 she was still awake"),
        ("She lost 1,200 euros.", "She lost one thousand, two hundred euros."),
        ("On the 2nd of May, the 21st day.", "on the second of may the twenty-first day"),
        ("First of the north, he lost 3 times.", "first of the north he lost three times"),
        ("In nineteen thirty-three", "in 1933"),
        ("Mr. Gray's favourite theatre", "Mister Grays favorite theater"),
        ("They realised the colour.", "they realized the color"),
        ("Is it a go or no-go?", "Is it a go or no go?"),
    ],
)
def test_writing_is_no_matter_of_speech(text, heard):
    assert words(text) == words(heard)
    assert word_errors(text, heard)[0] == 0


def test_words_joined_or_split_alone_are_no_error():
    assert word_errors("some one came into the class room", "someone came in to the classroom") == (0, 7)


@pytest.mark.parametrize(
    ("heard", "errors"),
    [
        ("the cat sat on the mat", 0),
        ("the cat sat on mat", 1),  # lost
        ("the cat sat sat on the mat", 1),  # repeated
        ("the bat sat on the mat", 1),  # taken for another
        ("the bat sat on mat mat", 2),
        ("", 6),
        ("the cat sat on the mat and all of it again and again", 7),
    ],
)
def test_errors_are_the_fewest_changes_from_what_was_due(heard, errors):
    assert word_errors("The cat sat on the mat.", heard) == (errors, 6)
