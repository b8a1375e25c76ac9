"""Whatever is typed, a filter is read without an exception; what is shown is what each line or rank alone would say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.filters.language import MAX_FILTER_CHARS, read_filter
from app.filters.lines import EVENT_KEYS, LOG_KEYS, LineWish, lines_of
from app.filters.patterns import PatternError, TextPattern, literal
from app.filters.ranks import RANK_KEYS
from app.filters.terms import Filter, Key, NumberTerm, TextTerm, WrongFilter
from app.tui.logs.matches import MAX_PIECE_BYTES
from app.tui.logs.store import LogStore

ALL_KEYS = (RANK_KEYS, LOG_KEYS, EVENT_KEYS)
PARTS = st.sampled_from(
    [
        "state",
        "rank",
        "node",
        "step",
        "=",
        "!=",
        "<",
        ">=",
        "!",
        "/",
        '"',
        "\\",
        " ",
        ",",
        "-",
        "0",
        "17",
        "5s",
        "wait",
        "*",
    ]
)
TYPED = st.one_of(st.text(max_size=60), st.lists(PARTS, max_size=12).map("".join))
MARKS = st.sampled_from("ab\u00e9.*+?|()[]^$\\")
ESCAPES = st.sampled_from("CAznbBsWQE").map("\\{}".format)
FLAGS = st.sampled_from(["(?:", "[^", "(?-m)", "(?-m:", "(?is-m:", "(?s)", "(?U)", "{2}", "\\x0a", "\\pL"])
CLEAN = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Zl", "Zp"]), max_size=12)


@given(text=TYPED, keys=st.sampled_from(ALL_KEYS))
def test_whatever_is_typed_is_a_filter_or_a_sentence_with_a_place(text: str, keys: tuple[Key, ...]) -> None:
    read = read_filter(text, keys)

    if isinstance(read, WrongFilter):
        assert 0 <= read.at <= len(text)
        assert read.why
        assert "\n" not in read.why or "\n" in text
    else:
        assert isinstance(read, Filter)
        assert bool(read) == bool(text.strip())


@given(text=st.text(min_size=MAX_FILTER_CHARS + 1, max_size=MAX_FILTER_CHARS + 9))
def test_what_is_too_long_is_said_to_be(text: str) -> None:
    assert isinstance(read_filter(text, RANK_KEYS), WrongFilter)


@given(words=st.lists(CLEAN.filter(lambda word: '"' not in word and "\\" not in word), min_size=1, max_size=4))
def test_words_in_quotes_are_looked_for_as_they_are(words: list[str]) -> None:
    read = read_filter(" ".join(f'"{word}"' for word in words), RANK_KEYS)

    assert isinstance(read, Filter)
    for word, term in zip(words, read.terms, strict=True):
        assert isinstance(term, TextTerm)
        assert term.pattern.source == literal(word)
        assert term.pattern.is_in(f"before {word} after")


@given(ranks=st.sets(st.integers(0, 10**6), min_size=1, max_size=8))
def test_numbers_are_read_as_they_are_written(ranks: set[int]) -> None:
    read = read_filter("rank=" + ",".join(map(str, sorted(ranks))), RANK_KEYS)

    assert isinstance(read, Filter)
    (term,) = read.terms
    assert isinstance(term, NumberTerm)
    assert term.ranges == tuple((rank, rank) for rank in sorted(ranks))


@given(lines=st.lists(CLEAN, min_size=1, max_size=20), word=CLEAN.filter(str.strip), is_inverse=st.booleans())
def test_many_lines_at_once_are_shown_as_each_alone_would_be(lines: list[str], word: str, is_inverse: bool) -> None:
    store = LogStore()
    for line in lines:
        store.append("gpu1", 0, line, is_stderr=False)
    read = read_filter(("!" if is_inverse else "") + '"' + word.replace("\\", "").replace('"', "") + '"', LOG_KEYS)
    assert isinstance(read, Filter)
    (term,) = read.terms
    assert isinstance(term, TextTerm)

    found = lines_of(store.piece(0, MAX_PIECE_BYTES), LineWish(read)).tolist()

    assert found == [place for place, line in enumerate(lines) if term.pattern.is_in(line) is not is_inverse]


@given(
    lines=st.lists(st.text("ab\u00e9\u4e16 ", max_size=4), min_size=1, max_size=6),
    source=st.lists(MARKS | ESCAPES | FLAGS, min_size=1, max_size=6).map("".join),
)
def test_a_pattern_that_is_taken_finds_the_same_in_many_lines_as_in_each(lines: list[str], source: str) -> None:
    try:
        pattern = TextPattern(source)
    except PatternError:
        return
    store = LogStore()
    for line in lines:
        store.append("gpu1", 0, line, is_stderr=False)
    wish = LineWish(Filter(source, (TextTerm(pattern),)))

    found = lines_of(store.piece(0, MAX_PIECE_BYTES), wish).tolist()

    assert found == [place for place, line in enumerate(lines) if pattern.is_in(line)]
    for line in lines:
        first, stop = pattern.span(line) or (0, 0)
        assert 0 <= first <= stop <= len(line)
