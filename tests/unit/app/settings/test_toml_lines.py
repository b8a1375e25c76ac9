"""Every key of a TOML file is found in its line."""

from __future__ import annotations

import pytest

from app.settings.toml_lines import NotTomlError, parse

TEXT = '''# a comment = [not a table]
top = 1  # "quoted

[console] # [keys]
theme = "light"
"ascii" = true
'odd key' = """
[thresholds]
stall_s = 1 \\""" still ""it"""""
after = \'\'\'
x = 'y'\'\'\'

  [ thresholds ]
stall_s = 12.5
nested.silent_s = 3
inline = { a = 1, b = "}" }

[keys]
quit = [
  "q", # ]
  "f2",
]
help = ["]", '[']

[[node]]
host = "a"
[[node]]
host = "b"
[job."my job".env]
X = "1"'''


def test_every_key_is_found_in_its_line() -> None:
    content, lines = parse(TEXT)

    assert content["console"]["odd key"] == '[thresholds]\nstall_s = 1 """ still ""it""'
    assert lines == {
        ("top",): 2,
        ("console",): 4,
        ("console", "theme"): 5,
        ("console", "ascii"): 6,
        ("console", "odd key"): 7,
        ("console", "after"): 10,
        ("thresholds",): 13,
        ("thresholds", "stall_s"): 14,
        ("thresholds", "nested"): 15,
        ("thresholds", "nested", "silent_s"): 15,
        ("thresholds", "inline"): 16,
        ("keys",): 18,
        ("keys", "quit"): 19,
        ("keys", "help"): 23,
        ("node",): 25,
        ("node", "0"): 25,
        ("node", "0", "host"): 26,
        ("node", "1"): 27,
        ("node", "1", "host"): 28,
        ("job",): 29,
        ("job", "my job"): 29,
        ("job", "my job", "env"): 29,
        ("job", "my job", "env", "X"): 30,
    }


def test_lines_count_alike_however_they_end() -> None:
    assert parse(TEXT.replace("\n", "\r\n"))[1] == parse(TEXT)[1]


def test_an_empty_file_says_nothing() -> None:
    assert parse("") == ({}, {})
    assert parse("# nothing\n\n") == ({}, {})


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("[console]\ntheme = light\n", 2, "Invalid value"),
        ("[console]\ntheme = 'light\n", 2, "Expected"),
        ("[console\n", 1, "Expected ']' at the end of a table declaration"),
        ("a = 1\na = 2\n", 2, "Cannot overwrite a value"),
        ("a = 1\n\nb = [1,\n", 3, "Invalid value"),
        ("x = " + "[" * 5000, 1, "nested too deeply"),
        ("x = " + "1" * 5000, 1, "too many digits"),
        ("\n" + ".".join("a" * 100) + " = 1", 2, "a key has more than 64 parts"),
    ],
)
def test_what_is_not_toml_is_refused_with_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(NotTomlError) as caught:
        parse(text)

    assert words in str(caught.value)
    assert "(at" not in str(caught.value)
    assert caught.value.line == line
