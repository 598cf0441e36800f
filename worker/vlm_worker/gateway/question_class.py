"""Decides from the text of a request which of eight classes of questions it belongs to.

texts of the user turns ─▶ words ─▶ features ─▶ logits ─▶ class of a turn ─▶ join ─▶ Classified

The class is all that an encoder learns of a question, so that cache keys repeat. A wrong class
costs accuracy, because the class chooses how an image is reduced. UNSURE is the safe answer, for
which nothing is reduced.

`Learned` is a softmax regression over hashed words, word pairs and beginnings of words. Its weights
are `question_class.bin`, which `tools/question_class` trains from wordings. `Words` looks up words.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import itertools
import re
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

Method = Literal["Learned", "Words"]


class QuestionClass(enum.StrEnum):
    """What a question needs to see. The order is that of the columns in the weights file."""

    ATTRIBUTE = "attribute"
    LOCATE = "locate"
    READ = "read"
    COUNT = "count"
    CELL = "cell"
    CHART = "chart"
    SCENE = "scene"
    UNSURE = "unsure"


class Why(enum.StrEnum):
    """The reason of a class. All but CLASSIFIED belong to UNSURE."""

    CLASSIFIED = "classified"
    NO_TEXT = "no_text"
    UNKNOWN_WORDS = "unknown_words"
    UNCERTAIN = "uncertain"
    TURNS_DIFFER = "turns_differ"
    TOO_LONG = "too_long"


@dataclasses.dataclass(frozen=True, slots=True)
class Classified:
    """The class of a request; `probability` is the least of the turns that were read.

    It is the probability of the best class even if that is too low, and 0.0 if none was computed.
    """

    question_class: QuestionClass
    probability: float
    why: Why


MIN_PROBABILITY: Final = 0.6
MIN_KNOWN: Final = 0.5
"""Least share of words that occur in the training set. Other languages are far below it."""
MAX_CHARACTERS: Final = 2_000
"""Length of the end of a turn that is read. Instructions tend to come first, the question last."""
MAX_SENTENCES: Final = 32
"""Sentences of a turn that are classified apart."""
MAX_TURNS: Final = 32
MAX_TOTAL_CHARACTERS: Final = 4_000
"""Limits of what is read in total, above which a request is UNSURE, so that its time is bounded."""

NUM_FEATURES: Final = 2_048
KNOWN_BYTES: Final = 1_536
LEARNED: Final = tuple(QuestionClass)[:-1]
"""Classes with a column of weights."""

_JOINS: Final = (
    frozenset({QuestionClass.ATTRIBUTE, QuestionClass.LOCATE}),
    frozenset({QuestionClass.COUNT, QuestionClass.CELL}),
)
"""Classes that all tiers treat alike. The later one of a set serves both."""


def classify(texts: Sequence[str], *, method: Method) -> Classified:
    """Classify a request by the texts of its user turns, in any order.

    One more turn leaves the class, makes it UNSURE, or replaces it by the one that serves both:
    LOCATE for ATTRIBUTE, CELL for COUNT. `why` is the first reason that was found for UNSURE.

    Any text is accepted, and of each only the last MAX_CHARACTERS are read.
    """
    if not texts:
        return Classified(QuestionClass.UNSURE, 0.0, Why.NO_TEXT)
    read = sum(min(len(text), MAX_CHARACTERS) for text in texts[:MAX_TURNS])
    if len(texts) > MAX_TURNS or read > MAX_TOTAL_CHARACTERS:
        return Classified(QuestionClass.UNSURE, 0.0, Why.TOO_LONG)
    classify_turn = _by_weights if method == "Learned" else _by_words
    first, *others = dict.fromkeys(texts)
    result = classify_turn(first)
    for text in others:
        if result.question_class is QuestionClass.UNSURE:
            break
        result = join(result, classify_turn(text))
    return result


def join(one: Classified, other: Classified) -> Classified:
    """The class that serves two turns. Associative and commutative in the class."""
    probability = min(one.probability, other.probability)
    for turn in (one, other):
        if turn.question_class is QuestionClass.UNSURE:
            return dataclasses.replace(turn, probability=probability)
    classes = {one.question_class, other.question_class}
    if len(classes) == 1 or any(classes <= alike for alike in _JOINS):
        return Classified(max(classes, key=LEARNED.index), probability, Why.CLASSIFIED)
    return Classified(QuestionClass.UNSURE, probability, Why.TURNS_DIFFER)


def words(text: str) -> list[str]:
    """The lowercase words of a text. A run of digits is `0`.

    Punctuation, symbols and lone surrogates belong to no word.
    """
    return _WORD.findall(_DIGITS.sub("0", text.lower()))


def features(turn: Sequence[str]) -> Counter[int]:
    """Counts by hashed feature: words and ends, pairs of frequent words, beginnings of 4 letters.

    The beginning of a longer word is the feature of the word that it equals: "reading" is "read".
    Pairs with other words are many and rare: they would share features with words.
    """
    marked = ["^", *turn, "$"]
    grams = marked + [word[:4] for word in turn if len(word) > 4]
    pairs = itertools.pairwise(marked)
    grams += [f"{one}_{next_}" for one, next_ in pairs if one in _FREQUENT and next_ in _FREQUENT]
    return Counter(zlib.crc32(gram.encode()) % NUM_FEATURES for gram in grams)


def fingerprint() -> str:
    """SHA-256 of the shipped weights in hexadecimal. Gateways that agree on it classify alike."""
    return hashlib.sha256(_shipped().body()).hexdigest()


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """A trained classifier.

    `columns` is int8 [NUM_FEATURES, len(LEARNED)]; one unit of it is `unit` of a logit. `known` is
    a Bloom filter of KNOWN_BYTES with the words of the training set.

    file: magic, SHA-256 of the body, body = unit (float32), columns (row by row), known
    """

    unit: float
    columns: npt.NDArray[np.int8]
    known: bytes

    def probabilities(self, counts: Counter[int]) -> npt.NDArray[np.float64]:
        """float64 [len(LEARNED)] for the features of a turn, which are scaled to length 1."""
        indices, values = list(counts.keys()), np.array(list(counts.values()), np.int64)
        logits = (values @ self.columns[indices].astype(np.int64)) * self.unit
        logits /= np.sqrt(values @ values)
        exponentials = np.exp(logits - logits.max())
        return np.asarray(exponentials / exponentials.sum(), np.float64)

    def known_share(self, turn: Sequence[str]) -> float:
        """Share of the words of a turn, at least one, that are ASCII and in the filter."""
        known = self.known
        plain = filter(str.isascii, turn)
        held = (all(known[at >> 3] >> (at & 7) & 1 for at in _bits(word)) for word in plain)
        return sum(held) / len(turn)

    def body(self) -> bytes:
        """All bytes of the file that the digest covers."""
        return struct.pack("<f", self.unit) + self.columns.tobytes() + self.known

    def to_bytes(self) -> bytes:
        """The file."""
        body = self.body()
        return _MAGIC + hashlib.sha256(body).digest() + body

    @classmethod
    def from_bytes(cls, data: bytes) -> Weights:
        """Read a file.

        Raises:
            ValueError: the file has another format, or was changed.
        """
        head, digest, body = data[:8], data[8:40], data[40:]
        if head != _MAGIC or len(body) != _BODY_BYTES:
            raise ValueError("these are no weights of the question classifier of this version")
        if hashlib.sha256(body).digest() != digest:
            raise ValueError("the weights of the question classifier do not match their digest")
        columns = np.frombuffer(body, np.int8, NUM_FEATURES * len(LEARNED), offset=4)
        (unit,) = struct.unpack_from("<f", body)
        return cls(unit, columns.reshape(NUM_FEATURES, len(LEARNED)), body[4 + columns.size :])


def bloom_filter(known: Iterable[str]) -> bytes:
    """KNOWN_BYTES that hold the given words."""
    held = bytearray(KNOWN_BYTES)
    for at in (at for word in known for at in _bits(word)):
        held[at >> 3] |= 1 << (at & 7)
    return bytes(held)


_MAGIC: Final = b"TRIPQC01"
_BODY_BYTES: Final = 4 + NUM_FEATURES * len(LEARNED) + KNOWN_BYTES


def _bits(word: str) -> tuple[int, ...]:
    """The 4 bits of a word in the Bloom filter; 1 % of unknown words have all of theirs set."""
    digest = hashlib.blake2b(word.encode(), digest_size=16).digest()
    return tuple(number % (8 * KNOWN_BYTES) for number in struct.unpack("<4I", digest))


@functools.cache
def _shipped() -> Weights:
    return Weights.from_bytes(Path(__file__).with_suffix(".bin").read_bytes())


_FREQUENT: Final = frozenset(
    re.findall(
        r"\S+",
        "^ $ what is are does do how many much which who where when why the a an this of in on at"
        " there to it for has have did was with s you i me my can any more than or",
    )
)
_WORD = re.compile(r"[^\W_]+")
_SENTENCES = re.compile(r"(?<=[.?!;])\s+|\n+")
_SPACE = re.compile(r"\s")
_DIGITS = re.compile(r"[0-9]+")


# The word lists are those of the seed design: detail, small, text, read need most; count, many,
# where need less; all else the least. It matches inside words ("bread" reads); whole words are
# matched here, so inflections are listed. UNSURE is the class that needs most.
_WORD_LISTS: Final = (
    (
        QuestionClass.UNSURE,
        frozenset({"detail", "details", "detailed", "small", "smaller", "smallest"}),
    ),
    (QuestionClass.READ, frozenset({"text", "texts", "read", "reads", "reading"})),
    (QuestionClass.COUNT, frozenset({"count", "counts", "counting", "many"})),
    (QuestionClass.LOCATE, frozenset({"where"})),
)
_OTHER_WORDS: Final = QuestionClass.ATTRIBUTE


def _end(text: str) -> str:
    """The last MAX_CHARACTERS of a text, without a word that is cut."""
    if len(text) <= MAX_CHARACTERS:
        return text
    end = text[-MAX_CHARACTERS - 1 :]
    space = _SPACE.search(end)
    return end[space.end() :] if space else ""


def _by_words(text: str) -> Classified:
    """The first list with a word of the turn, else ATTRIBUTE, with probability 1.0."""
    turn = words(_end(text))
    refused = _refuse(turn)
    if refused is not None:
        return refused
    lists = (one for one, listed in _WORD_LISTS if not listed.isdisjoint(turn))
    question_class = next(lists, _OTHER_WORDS)
    if question_class is QuestionClass.UNSURE:
        return Classified(question_class, 0.0, Why.UNCERTAIN)
    return Classified(question_class, 1.0, Why.CLASSIFIED)


def _by_weights(text: str) -> Classified:
    """The class of the whole turn, if no sentence of it is of a class with other needs.

    A sentence that is UNSURE, such as "Answer briefly.", has no say.
    """
    end = _end(text)
    result = _weigh(words(end))
    sentences = _SENTENCES.split(end.strip())
    for sentence in sentences[:MAX_SENTENCES] if len(sentences) > 1 else ():
        if result.question_class is QuestionClass.UNSURE:
            break
        asked = _weigh(words(sentence))
        if asked.question_class is not QuestionClass.UNSURE:
            result = join(result, asked)
    return result


def _weigh(turn: Sequence[str]) -> Classified:
    """The class of some words by the shipped weights."""
    refused = _refuse(turn)
    if refused is not None:
        return refused
    probabilities = _shipped().probabilities(features(turn))
    best = int(probabilities.argmax())
    probability = float(probabilities[best])
    if probability < MIN_PROBABILITY:
        return Classified(QuestionClass.UNSURE, probability, Why.UNCERTAIN)
    return Classified(LEARNED[best], probability, Why.CLASSIFIED)


def _refuse(turn: Sequence[str]) -> Classified | None:
    """UNSURE for a turn without words or of mostly unknown ones, such as another language's."""
    if not turn:
        return Classified(QuestionClass.UNSURE, 0.0, Why.NO_TEXT)
    if _shipped().known_share(turn) < MIN_KNOWN:
        return Classified(QuestionClass.UNSURE, 0.0, Why.UNKNOWN_WORDS)
    return None
