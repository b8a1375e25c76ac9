"""What a person types is a filter, or a sentence that says what is wrong with it, and where."""

from __future__ import annotations

import pytest

from app.filters.language import MAX_FILTER_CHARS, MAX_TERMS, read_filter
from app.filters.lines import LOG_KEYS
from app.filters.ranks import RANK_KEYS
from app.filters.terms import (
    EVERYTHING,
    FigureTerm,
    Filter,
    NameTerm,
    NumberTerm,
    TextTerm,
    WordTerm,
    WrongFilter,
)

KEYS = "memory, node, phase, rank, state, step, wait"
PHASES = "starting, joining, data, forward, backward, optimizer, barrier, checkpoint, eval, other"


def term(text: str) -> WordTerm | NameTerm | NumberTerm | FigureTerm | TextTerm:
    read = read_filter(text, RANK_KEYS)
    assert isinstance(read, Filter), read
    (only,) = read.terms
    return only


def pattern(text: str) -> str:
    found = term(text)
    assert isinstance(found, TextTerm)
    return found.pattern.source


def wrong(text: str) -> WrongFilter:
    read = read_filter(text, RANK_KEYS)
    assert isinstance(read, WrongFilter), read
    return read


@pytest.mark.parametrize("text", ["", "  ", "\t"])
def test_nothing_is_the_filter_that_shows_everything(text: str) -> None:
    assert read_filter(text, RANK_KEYS) is EVERYTHING
    assert not EVERYTHING


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("state=waiting", WordTerm("state", frozenset({"waiting"}))),
        ("STATE=Waiting", WordTerm("state", frozenset({"waiting"}))),
        ("!state=waiting,frozen", WordTerm("state", frozenset({"waiting", "frozen"}), is_inverse=True)),
        ("state!=waiting", WordTerm("state", frozenset({"waiting"}), is_inverse=True)),
        ("!!state!=waiting", WordTerm("state", frozenset({"waiting"}), is_inverse=True)),
        ("!state!=waiting", WordTerm("state", frozenset({"waiting"}))),
        ("state=s", WordTerm("state", frozenset({"starting", "silent", "slow", "stopped"}))),
        ("rank=0,3-5", NumberTerm("rank", ((0, 0), (3, 5)))),
        ("rank=5-3,", NumberTerm("rank", ((3, 5),))),
        ("rank=8-", NumberTerm("rank", ((8, 2**53),))),
        ("step<100", FigureTerm("step", "<", 100)),
        ("step>=1,000", FigureTerm("step", ">=", 1000)),
        ("step>=1_234,567", FigureTerm("step", ">=", 1_234_567)),
        ("wait>1,000.5", FigureTerm("wait", ">", 1000.5)),
        ("wait>5s", FigureTerm("wait", ">", 5)),
        ("wait>.5", FigureTerm("wait", ">", 0.5)),
        ("wait<=200ms", FigureTerm("wait", "<=", 0.2)),
        ("wait>2m", FigureTerm("wait", ">", 120)),
        ("memory>1.5G", FigureTerm("memory", ">", 1.5 * 2**30)),
        ("memory=512MiB", FigureTerm("memory", "=", 2**29)),
        ("memory!=512mb", FigureTerm("memory", "=", 2**29, is_inverse=True)),
    ],
)
def test_a_term_about_a_key_means_what_it_says(text: str, meant: object) -> None:
    assert term(text) == meant


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("backward", "backward"),
        ("train.py:31", r"train\.py\:31"),
        ('"two words"', "two words"),
        ('"an open quo', "an open quo"),
        (r'"a \" b"', r"a\ \" b".replace(r"\ ", " ")),
        ('"state=waiting"', r"state\=waiting"),
        ("/all_?reduce|broadcast/", "all_?reduce|broadcast"),
        ("/two words/", "two words"),
        ("/still typ", "still typ"),
        ("/home/user/train.py", "home/user/train.py"),
        (r"/a\/b\d/", r"a/b\d"),
        ("/", ""),
        ("<module>", r"\<module\>"),
        ("=5", r"\=5"),
        ("a\u00e9", "a\u00e9"),
    ],
)
def test_what_is_not_about_a_key_is_looked_for_in_the_text(text: str, source: str) -> None:
    assert pattern(text) == source


def test_terms_stand_side_by_side() -> None:
    read = read_filter('  state=waiting !node=gpu1 /x y/  "b c" !last ', RANK_KEYS)

    assert isinstance(read, Filter)
    assert [type(found) for found in read.terms] == [WordTerm, NameTerm, TextTerm, TextTerm, TextTerm]
    assert [found.is_inverse for found in read.terms] == [False, True, False, False, True]
    assert len(read.texts) == 3
    assert read.source == 'state=waiting !node=gpu1 /x y/  "b c" !last'


def test_a_name_may_hold_blanks_in_quotes_and_marks_for_anything() -> None:
    for text, fits, fits_not in [
        ("node=gpu1", ["gpu1"], ["gpu11", "xgpu1", "GPU1"]),
        ("node=gpu*", ["gpu", "gpu1", "gpu11"], ["xgpu1"]),
        ("node=gpu?", ["gpu1"], ["gpu", "gpu11"]),
        ("node=a,b.c", ["a", "b.c"], ["bxc"]),
        ('node="my host"', ["my host"], ["my", "host"]),
    ]:
        found = term(text)
        assert isinstance(found, NameTerm)
        assert [name for name in (*fits, *fits_not) if found.fits(name)] == fits


@pytest.mark.parametrize(
    ("text", "why", "at"),
    [
        ("stat=waiting", "no key is called stat: did you mean state? In quotes it is a text to look for", 0),
        ("a xyz=1", f"no key is called xyz: there are {KEYS}; In quotes it is a text to look for", 2),
        ("state=wiating", "no state is called wiating: did you mean waiting?", 6),
        ("phase=xyz", f"no phase is called xyz: there are {PHASES}", 6),
        ("node=", "behind node= stands a name; * stands for any characters", 5),
        ("phase=,", f"behind phase= stands one of {PHASES}", 6),
        ("rank=", "behind rank= stands numbers, as in 0,3-5", 5),
        ("rank=x", "x is no rank: behind rank= stand numbers, as in 0,3-5", 5),
        ("rank>1", "rank is no figure: it goes with = or !=, as in rank=2-", 4),
        ("state<x", "state is no figure: it goes with = or !=", 5),
        ("step<", "behind step stands a number", 5),
        ("step<x", "x is no step: behind step stands a number", 5),
        ("wait>5y", "5y is no wait: behind wait stands a number with s, ms, m, min, h behind it or none", 5),
        ("wait>1,5", "1,5 is no wait: commas part thousands, a point the rest: 1,000.5", 5),
        ("step>10,00", "10,00 is no step: commas part thousands, a point the rest: 1,000.5", 5),
        ("step>1000,000", "1000,000 is no step: commas part thousands, a point the rest: 1,000.5", 5),
        ("step>1_5", "1_5 is no step: behind step stands a number", 5),
        ("/(/", "/(/ is no pattern: missing ): (", 0),
        ("b /a{2000}/", "/a{2000}/ is no pattern: invalid repetition size: {2000}", 2),
        (f"/{'x' * 1001}/", f"/{'x' * 1001}/ is no pattern: it is longer than 1000 characters", 0),
        (f"node={'x' * 1001}", f"{'x' * 1001} is no name: it is longer than 1000 characters", 5),
        ("a !", "behind ! stands what is not to be shown, as in !state=running", 2),
        ("! a", "behind ! stands what is not to be shown, as in !state=running", 0),
        ("a " * (MAX_TERMS + 1), f"a filter has at most {MAX_TERMS} terms", 2 * (MAX_TERMS + 1)),
        ("a" * (MAX_FILTER_CHARS + 1), f"a filter has at most {MAX_FILTER_CHARS} characters", MAX_FILTER_CHARS),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_a_sentence_with_its_place(text: str, why: str, at: int) -> None:
    assert wrong(text) == WrongFilter(why, at)


def test_a_word_may_stand_for_a_number() -> None:
    read = read_filter("rank=launcher,2", LOG_KEYS)

    assert isinstance(read, Filter)
    assert read.terms == (NumberTerm("rank", ((-1, -1), (2, 2))),)
    refused = read_filter("rank=torchrun", LOG_KEYS)
    assert isinstance(refused, WrongFilter)
    assert "numbers, as in 0,3-5 or launcher" in refused.why
