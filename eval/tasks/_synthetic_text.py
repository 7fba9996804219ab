# ruff: noqa: RUF001  # Chinese punctuation is meant
"""Sentences made from a seed: filler with names in it, English or Chinese, that says nothing a question asks for."""

import random
from dataclasses import dataclass

_SYLLABLES = "bar bel cor dan dor el fen gal har il jor kel lam mor nel or pal quin ros sel tam ul ver yor zan".split()
_ENDINGS = "a an e en ia in is o on us".split()
_SUBJECTS = "river valley council market harbour library garden bridge station museum orchard theatre school".split()
_VERBS = "opened closed welcomed described repaired surveyed visited measured painted renamed moved studied".split()
_OBJECTS = ("the old records", "a small group", "the northern road", "several visitors", "its first map", "a new roof")
_TIMES = ("in spring", "last year", "before noon", "after the storm", "for the first time", "during the festival")
_ZH_NAMES = "安宁 白石 长河 东山 福田 高原 海宁 江口 兰溪 明川 南湖 青林 石桥 望海 西岭 新城 永安 玉泉".split()
_ZH_SUBJECTS = "图书馆 博物馆 车站 市场 学校 剧院 公园 大桥 港口 果园".split()
_ZH_VERBS = "开放了 修复了 介绍了 参观了 测量了 更换了 记录了 整理了".split()
_ZH_OBJECTS = "旧档案 新屋顶 北边的道路 第一张地图 几件展品 一段城墙".split()
_ZH_TIMES = "春天 去年 中午以前 暴雨之后 节日期间".split()

# what a fact is about; the second of each pair is the Chinese word
ATTRIBUTES = (
    ("access code", "通行码"),
    ("founding year", "成立年份"),
    ("street number", "门牌号"),
    ("budget", "预算"),
    ("inventory number", "馆藏编号"),
)


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes from a random stream; ``zh`` chooses the language."""

    rng: random.Random
    zh: bool

    def name(self) -> str:
        """A name that hardly occurs twice."""
        if self.zh:
            return self.rng.choice(_ZH_NAMES) + self.rng.choice(_ZH_NAMES) + self.rng.choice(_ZH_SUBJECTS)
        return ("".join(self.rng.choices(_SYLLABLES, k=2)) + self.rng.choice(_ENDINGS)).capitalize()

    def number(self) -> str:
        """Five digits."""
        return str(self.rng.randrange(10_000, 100_000))

    def sentence(self) -> str:
        """A sentence without a number, with its full stop."""
        pick = self.rng.choice
        if self.zh:
            return f"{pick(_ZH_TIMES)}，{self.name()}{pick(_ZH_VERBS)}{pick(_ZH_OBJECTS)}。"
        return f"The {pick(_SUBJECTS)} of {self.name()} {pick(_VERBS)} {pick(_OBJECTS)} {pick(_TIMES)}."

    def filler(self, length: int) -> list[str]:
        """Sentences of about ``length`` words, or characters in Chinese, in all."""
        sentences: list[str] = []
        written = 0
        while written < length:
            sentences.append(self.sentence())
            written += self.measure(sentences[-1])
        return sentences

    def fact(self) -> tuple[str, str, str]:
        """A statement, the question it answers, and the answer."""
        attribute, attribute_zh = self.rng.choice(ATTRIBUTES)
        name, value = self.name(), self.number()
        if self.zh:
            return f"{name}的{attribute_zh}是{value}。", f"{name}的{attribute_zh}是多少？", value
        return f"The {attribute} of {name} is {value}.", f"What is the {attribute} of {name}?", value

    def join(self, sentences: list[str]) -> str:
        """Sentences as one paragraph."""
        return ("" if self.zh else " ").join(sentences)

    def measure(self, text: str) -> int:
        """Words, or characters in Chinese, as LongBench counts them."""
        return len(text) if self.zh else len(text.split())

    def hide(self, sentences: list[str], planted: list[str]) -> list[str]:
        """``planted`` in the same order at random places among ``sentences``."""
        places = sorted(self.rng.randrange(len(sentences) + 1) for _ in planted)
        mixed = list(sentences)
        for shift, (place, sentence) in enumerate(zip(places, planted, strict=True)):
            mixed.insert(place + shift, sentence)
        return mixed
