"""How text is cut into words, a query understood, and a hit shown. Knows no tables.

SQLite's ``unicode61`` tokenizer takes a run of letters for one word. Scripts that put no spaces between
words would become one word a sentence, so each of their characters is made a word of its own, in the
text and in the query; a query's word is then looked for as a phrase.
"""

from __future__ import annotations

import re
import unicodedata

MAX_QUERY_WORDS = 32
MAX_QUERY_LENGTH = 1000
_SNIPPET_BEFORE, _SNIPPET_AFTER = 40, 120
"""Characters of a snippet before and after the start of the first match."""
_FOLD_LIMIT = 20_000
"""Characters of a text in which a match is looked for without accents: it costs a step a character."""

_UNSPACED = re.compile(
    "["
    "\u0e01-\u0e4f\u0e81-\u0edf\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Myanmar, Khmer
    "\u3040-\u30ff\u31f0-\u31ff"  # Hiragana, Katakana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han
    "]"
)
_BLANK = str.maketrans(dict.fromkeys((*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029), " "))


def segmented(text: str) -> str:
    """The text with characters of scripts without spaces set apart. Called by SQL when text is indexed."""
    return text if text.isascii() else _UNSPACED.sub(r" \g<0> ", text)


def query_words(query: str) -> list[str]:
    """The words that are looked for; a message matches if it has words that begin with all of them."""
    return query[:MAX_QUERY_LENGTH].translate(_BLANK).split()[:MAX_QUERY_WORDS]


def match_expression(words: list[str]) -> str | None:
    """The words as an FTS5 query in which they are nothing but text; None if there is no letter or digit."""
    phrases = [segmented(word).replace('"', " ") for word in words if any(map(str.isalnum, word))]
    return " ".join(f'"{phrase}" *' for phrase in phrases) or None


def like_pattern(words: list[str]) -> str:
    """A pattern for ``LIKE … ESCAPE '\\'`` that finds the words in their order."""
    escaped = [re.sub(r"([\\%_])", r"\\\1", word) for word in words]
    return f"%{'%'.join(escaped)}%"


def snippet(text: str, words: list[str]) -> tuple[str, tuple[tuple[int, int], ...]]:
    """One line around the first match, and where the words are in it."""
    pattern = re.compile("|".join(map(_word_pattern, words)), re.IGNORECASE)
    found = pattern.search(text)
    if found is None:
        pattern = re.compile("|".join(re.escape(_without_accents(word)) for word in words), re.IGNORECASE)
        found = pattern.search(_without_accents(text[:_FOLD_LIMIT]))
    first = found.start() if found is not None else 0
    start = max(0, first - _SNIPPET_BEFORE)
    # As many characters as in the text, so that places in one are places in the other.
    line = text[start : first + _SNIPPET_AFTER].translate(_BLANK)
    spans = [match.span() for match in pattern.finditer(line)] or [
        match.span() for match in pattern.finditer(_without_accents(line))
    ]
    head, tail = "…" * (start > 0), "…" * (first + _SNIPPET_AFTER < len(text))
    shift = len(head)
    return f"{head}{line}{tail}", tuple((begin + shift, end + shift) for begin, end in spans)


def _word_pattern(word: str) -> str:
    starts_anywhere = _UNSPACED.match(word) or not word[0].isalnum()
    return re.escape(word) if starts_anywhere else rf"(?<!\w){re.escape(word)}"


def _without_accents(text: str) -> str:
    """Each character as its base letter; the length stays."""
    return "".join(unicodedata.normalize("NFD", character)[0] for character in text)
