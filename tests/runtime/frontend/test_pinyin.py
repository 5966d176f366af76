"""Pinyin in brackets becomes the model's tokens."""

import pytest

from runtime.frontend.pinyin import spell_pinyin
from runtime.frontend.text import TextFrontend, notices
from runtime.frontend.tokenizer import SPECIAL_TOKENS, TextTokenizer


@pytest.mark.parametrize(
    ("written", "tokens"),
    [
        ("[hao3]", "[h][ǎo]"),
        ("[hǎo]", "[h][ǎo]"),
        ("[Zhong4]", "[zh][òng]"),
        ("[hang2][zhang3]", "[h][áng][zh][ǎng]"),
        ("[er4]", "[èr]"),
        ("[ān]", "[ān]"),
        ("[yuan2]", "[y][uán]"),
        ("[wo3]", "[w][ǒ]"),
        ("[liu2]", "[l][iú]"),
        ("[gui4]", "[g][uì]"),
        ("[jiong3]", "[j][iǒng]"),
        ("[nü3]", "[n][ǚ]"),
        ("[nv3]", "[n][ǚ]"),
        ("[lüe4]", "[l][vè]"),
        ("[lǜ]", "[l][ǜ]"),
        ("[de5]", "[d][e]"),
        ("[shì]", "[sh][ì]"),
    ],
)
def test_syllables_are_taken_apart(written: str, tokens: str) -> None:
    assert spell_pinyin(written, SPECIAL_TOKENS) == tokens


@pytest.mark.parametrize("text", ["[he]", "[sic]", "[foo3]", "[j][ǐ]", "[AH0]", "[B]", "[3]", "[résumé]", "[laughter]"])
def test_what_is_no_syllable_with_a_tone_stays(text: str) -> None:
    assert spell_pinyin(text, SPECIAL_TOKENS) == text


def test_most_syllables_of_a_newspaper_are_known() -> None:
    syllables = """de5 yi1 shi4 bu4 le5 zai4 ren2 you3 wo3 ta1 zhe4 ge4 men5 zhong1 lai2 shang4 da4 wei4 he2 guo2 di4
        dao4 shuo1 shi2 yao4 jiu4 chu1 hui4 ke3 ye3 ni3 dui4 sheng1 neng2 er2 zi3 na4 xia4 guo4 jia1 xue2 quan2 xiang4
        kai1 qing2 jing1 qian2 xian4 nian2 fang1 hou4 zuo4 li3 yong4 xing2 xin1 mian4 cong2 ran2 qi2 shui3 liang3 ti3
        jun1 duo1 ding4 shen2 xian1 yin1 ming2 lao3 tou2 ri4 dian3 ju4 chang2 gong1 wen2 wu2 huo4 bei4 zhi2 tian1 xin4
        lü4 yun4 yue4 nü3 qiong2 xiong2 chuang1 zhuang4 shuai4 kuai4 zen3 me5 nuan3 cun1 jue2 zui4"""
    unknown = [s for s in syllables.split() if spell_pinyin(f"[{s}]", SPECIAL_TOKENS) == f"[{s}]"]
    assert unknown == []


def test_pinyin_reaches_the_model_also_from_the_word_list(qwen: TextTokenizer) -> None:
    frontend = TextFrontend(qwen.count)
    (piece,) = frontend.pieces("他是[hang2][zhǎng]，住重庆。", words={"重庆": "[chong2][qing4]"})
    assert piece.text == "他是[h][áng][zh][ǎng]，住[ch][óng][q][ìng]。"
    assert piece.written == "他是[hang2][zhǎng]，住重庆。"
    assert notices("[hang2]") == [] and "[foo3]" in notices("[foo3]")[0]
