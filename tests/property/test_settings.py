"""Whatever files, variables and assignments say: the highest word holds, and every accepted set of keys can be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from app.settings.layers import DEFAULT, KEPT, Entry, Known, Layer, Origin, assigned_settings, key_troubles, merged
from app.settings.loading import load
from app.settings.schema import TABLE, Choice, Seconds, key_settings
from app.settings.toml_lines import NotTomlError, parse
from app.tui.actions import ACTIONS

if TYPE_CHECKING:
    from app.settings.schema import Setting, Value

KNOWN = Known([*TABLE, *key_settings(ACTIONS)])
FILES = ("one.toml", "two.toml", "three.toml")
SOME_KEYS = st.sampled_from(["q", "f", "s", "z", "f2", "question_mark", "ctrl+p", "n", "x"])


def value_of(setting: Setting) -> st.SearchStrategy[Value]:
    if isinstance(setting, Choice):
        return st.sampled_from(setting.choices)
    if isinstance(setting, Seconds):
        return st.floats(setting.low, setting.high)
    return st.lists(SOME_KEYS, max_size=3, unique=True).map(tuple)


VALUES = st.sampled_from(sorted(KNOWN.by_name)).flatmap(
    lambda name: st.tuples(st.just(name), value_of(KNOWN.by_name[name]))
)
CHOSEN = st.dictionaries(st.sampled_from(sorted(KNOWN.by_name)), st.none(), max_size=6).flatmap(
    lambda names: st.fixed_dictionaries({name: value_of(KNOWN.by_name[name]) for name in names})
)


def toml_of(values: dict[str, Value], blanks: list[int]) -> tuple[str, dict[str, int]]:
    """Return a file that says so, and in which line it says what."""
    lines, found = [], {}
    for place, (name, value) in enumerate(values.items()):
        table, _, key = name.partition(".")
        lines += [""] * blanks[place % len(blanks)] if blanks else []
        written = json.dumps(list(value)) if isinstance(value, tuple) else json.dumps(value)
        if "\n" not in written and isinstance(value, tuple) and len(value) > 1:
            written = written.replace(", ", ",\n  ")  # an array may take several lines
        lines.append(f"{table}.{key} = {written}  # [{key}]")
        found[name] = "\n".join(lines).count("\n") + 1 - written.count("\n")
    return "\n".join(lines), found


@given(st.lists(CHOSEN, min_size=1, max_size=3), st.lists(st.integers(0, 3), max_size=4))
def test_the_highest_file_that_names_a_setting_decides_it_and_tells_its_line(
    said: list[dict[str, Value]], blanks: list[int]
) -> None:
    layers = [KNOWN.defaults()]
    expected: dict[str, tuple[Value, str, int]] = {}
    for place, values in zip(FILES, said, strict=False):
        text, lines = toml_of(values, blanks)
        layer = KNOWN.file_layer(text, place, is_shared=False)
        assert layer.troubles == []
        layers.append(layer)
        expected |= {name: (value, place, lines[name]) for name, value in values.items()}

    entries = merged(layers)

    assert set(entries) == set(KNOWN.by_name)
    for name, entry in entries.items():
        value, place, line = expected.get(name, (KNOWN.by_name[name].default, DEFAULT, 0))
        assert entry == Entry(name, value, Origin(place, line))


@given(VALUES)
def test_what_is_shown_of_a_value_can_be_written_again(chosen: tuple[str, Value]) -> None:
    name, value = chosen
    setting = KNOWN.by_name[name]
    shown = "" if value == () else setting.shown(value).replace(" ", ",")

    again = setting.take_text(shown)

    assert again == value if not isinstance(value, float) else abs(float(str(again)) - value) <= 1e-5 * value


@given(st.dictionaries(st.sampled_from([action.name for action in ACTIONS]), st.lists(SOME_KEYS, max_size=3)))
def test_keys_that_are_accepted_lead_to_one_action_each_and_never_lock_anybody_in(
    chosen: dict[str, list[str]],
) -> None:
    layer = Layer([Entry(f"keys.{name}", tuple(dict.fromkeys(keys)), Origin("f", 1)) for name, keys in chosen.items()])
    entries = merged([KNOWN.defaults(), layer])

    troubles = key_troubles(entries, ACTIONS, [DEFAULT, "f"])

    clashes = []
    for context in ("live", "replay"):
        keys = [key for a in ACTIONS if context in a.contexts for key in entries[f"keys.{a.name}"].value]  # type: ignore[union-attr]
        clashes += [key for key in set(keys) if keys.count(key) > 1]
    is_locked_in = any(not entries[f"keys.{name}"].value for name in KEPT)
    assert bool(troubles) is (bool(clashes) or is_locked_in)
    assert all(trouble.origin == Origin("f", 1) for trouble in troubles), "the usual keys are well"


@given(st.text(max_size=200))
def test_no_text_brings_the_reader_down(text: str) -> None:
    layer = KNOWN.file_layer(text, "f", is_shared=False)
    assert all(str(trouble).isprintable() for trouble in layer.troubles)
    assert all(1 <= trouble.origin.line <= text.count("\n") + 1 for trouble in layer.troubles)


PIECES = (
    *(
        "[console]",
        "[keys]",
        "[[keys]]",
        "theme",
        "=",
        '"light"',
        "'''",
        '"""',
        "\\",
        "[",
        "]",
        "{",
        "}",
        ".",
        ",",
        "#",
    ),
    *("1", "true", "quit", '"q"', "console", '"a b"', "1979-05-27", "-inf", " ", "\n", "\r\n"),
)
TOML_PIECES = st.lists(st.sampled_from(PIECES), max_size=25).map("".join)


@given(TOML_PIECES)
def test_whatever_is_toml_has_a_line_for_every_table(text: str) -> None:
    try:
        content, lines = parse(text)
    except NotTomlError:
        return
    assert {path[0] for path in lines} == set(content)
    assert all(1 <= line <= text.count("\n") + 1 for line in lines.values())


@given(st.lists(st.text(max_size=40), max_size=5))
def test_no_assignment_brings_the_console_down(assignments: list[str]) -> None:
    said, troubles = assigned_settings(assignments)
    loaded = load(ACTIONS, assignments, has_files=False, environ={}, directory=Path("/"))

    assert len(said) + len(troubles) == len(assignments)
    assert all(str(trouble).startswith("--set: ") and str(trouble).isprintable() for trouble in loaded.troubles)
    assert loaded.troubles or not any("=" not in assignment for assignment in assignments)
