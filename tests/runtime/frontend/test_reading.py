import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from runtime.frontend.reading import Reader, language_runs


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader()


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("I took 5 ml of it.", "I took five milliliters of it."),
        ("120 mmHg", "one hundred and twenty millimeters of mercury"),
        ("It costs $3.50.", "It costs three dollars and fifty cents."),
        ("$1,234", "one thousand two hundred and thirty four dollars"),
        ("£5m and $1.50 billion", "five million pounds and one point five billion dollars"),
        ("€20, 5€, £1 and $0.01", "twenty euros, five euros, one pound and one cent"),
        ("¥30 or ₹100", "thirty yen or one hundred rupees"),
        ("$20-30", "twenty to thirty dollars"),
        ("50% at 20°C", "fifty percent at twenty degrees Celsius"),
        ("3 km/h, 10kg, 100 MB", "three kilometers per hour, ten kilograms, one hundred megabytes"),
        ("3 m at 5 m/s, 1 L and 2 l", "three meters at five meters per second, one liter and two liters"),
        ("5 µg, 3²", "five micrograms, three squared"),
        ("1,234 km in 2024", "one thousand two hundred and thirty four kilometers in twenty twenty four"),
        ("1000 or 1,500", "one thousand or one thousand five hundred"),
        ("the 1990s", "the nineteen nineties"),
        ("<3 and ≥ 5", "less than three and at least five"),
        ("2½ cups, #1, +3", "two and a half cups, number one, plus three"),
        ("version 2.5.1 on 24/7", "version two point five point one on twenty four seven"),
        ("Flight 705A, bus 121B on E100", "Flight seven hundred five A, bus one hundred twenty one B on E one hundred"),
        ('say "3" and [3] now', 'say "three" and [three] now'),
        ("Word: 11111111111 (word)", "Word: " + "one " * 10 + "one (word)"),
    ],
)
def test_english_is_read(reader: Reader, written: str, spoken: str) -> None:
    assert " ".join(reader.read(written).split()) == spoken


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("喝5 ml水", "喝五毫升水"),
        ("血压120 mmHg,喝5 mL,<3,V,IPTH。", "血压一百二十毫米汞柱,喝五毫升,小于三,V,IPTH。"),
        ("花了$3.50或€20或£5", "花了三点五零美元或二十欧元或五英镑"),
        ("卖¥1,234.50或30¥", "卖一千二百三十四点五零元或三十元"),
        ("涨了50 %到50-60%", "涨了百分之五十到百分之五十到百分之六十"),
        ("今天20°C,速度3 km/h,重10kg", "今天二十摄氏度,速度每小时三公里,重十千克"),
        ("文件100 MB,频率24 kHz", "文件一百 MB,频率二十四千赫兹"),
        ("血糖5 mmol/L", "血糖五毫摩尔每升"),
        ("面积3²", "面积三平方"),
        ("坐705A、121B路和E100", "坐七百零五A、一百二十一B路和E一百"),
        ("F-16战机", "F 十六战机"),
        ("版本2.5.1", "版本二点五点一"),
        ("哪儿有3个花儿", "哪儿有三个花儿"),
        ('第"3"个', '第"三"个'),
    ],
)
def test_chinese_is_read(reader: Reader, written: str, spoken: str) -> None:
    assert reader.read(written) == spoken


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("我说 I have 3 apples 和3个梨", "我说 I have three apples 和三个梨"),
        ("The word 你好 has 2 characters.", "The word 你好 has two characters."),
        ("私は3人で東京へ", "私は三人で東京へ"),
        ("カタカナ100 kmです", "カタカナ百キロメートルです"),
        ("У меня 3 яблока", "У меня 3 яблока"),
        ("사과 3개", "사과 3개"),
    ],
)
def test_figures_follow_the_language_around_them(reader: Reader, written: str, spoken: str) -> None:
    assert reader.read(written) == spoken


def test_german_keeps_umlauts_and_figures(reader: Reader) -> None:
    """Two marked letters tell that it is not English; without any, German cannot be told from English here."""
    sentence = "Für 3² Äpfel zahlt man in Köln 5 €."
    assert reader.read(sentence) == sentence


@pytest.mark.parametrize("line", ["abc", "我说 I have 3 apples 好", "", "3", "あ3x", "Привет 3 you and me", "1中2"])
def test_runs_add_up_to_the_line(line: str) -> None:
    assert "".join(text for _, text in language_runs(line)) == line


@pytest.mark.parametrize(
    "odd", ["at example.com! 3 Really", "3Ü4 und", "#$3", "[3", "a ]3", "3\\", "_3_", "={3}", "\ue0003 y"]
)
def test_what_wetext_cannot_take_survives(reader: Reader, odd: str) -> None:
    """wetext drops the whole of such texts or raises; we keep every letter."""
    letters = [char for char in odd if char.isalpha()]
    spoken = iter(reader.read(odd))
    assert all(letter in spoken for letter in letters)


def test_threads_share_one_reader() -> None:
    reader = Reader()
    texts = [f"第{i}个, about {i} of them" for i in range(100)]
    alone = [reader.read(text) for text in texts]
    fresh = Reader()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(fresh.read, texts)) == alone


def test_normalisers_load_with_the_first_figure() -> None:
    """They take two seconds, which a page that starts does not have."""
    program = (
        "import sys; from runtime.frontend.text import TextFrontend; frontend = TextFrontend(len);"
        "frontend.sentences('no figures'); frontend.sentences('没有数字');"
        "sys.exit(bool({'wetext', 'inflect'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("line", "language", "read"),
    [
        ("12", "auto", "twelve"),
        ("12", "zh", "十二"),
        ("12", "de", "12"),
        ("Die 3 Tische sind 12 m breit.", "de", "Die 3 Tische sind 12 m breit."),
        ("Die 3 Bäume.", "en", "Die three Bäume."),
        ("3 tables", "zh", "three tables"),  # letters decide where there are any
        ("我有3个。", "de", "我有三个。"),
        ("Il y a 5 chats.", "fr", "Il y a 5 chats."),
    ],
)
def test_a_chosen_language_decides_where_letters_do_not(line: str, language: str, read: str) -> None:
    assert Reader().read(line, language) == read
