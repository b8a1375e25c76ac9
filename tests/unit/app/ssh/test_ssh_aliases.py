"""The hosts that a person may choose from, as ~/.ssh/config names them."""

from __future__ import annotations

from app.ssh.config import MAX_ALIASES, MAX_DEPTH, host_aliases

CONFIG = """
# Host commented
Host gpu1 gpu2
  HostName 10.0.0.1
host=gpu3
HOST  "gpu4"   gpu1
Host *.lab !gpu9 gpu? *
Host -oProxyCommand=id with;semicolon
Match host gpu8
  User ada
Include conf.d/*
  Include "other file"
Host last
"""


def test_hosts_come_once_in_the_order_of_the_file_and_patterns_do_not() -> None:
    asked: list[str] = []

    def included(pattern: str) -> list[str]:
        asked.append(pattern)
        return ["Host inner gpu2\n"] if pattern == "conf.d/*" else []

    assert host_aliases(CONFIG, included) == ["gpu1", "gpu2", "gpu3", "gpu4", "inner", "last"]
    assert asked == ["conf.d/*", "other file"]


def test_files_that_include_each_other_end() -> None:
    num_asked = 0

    def included(_pattern: str) -> list[str]:
        nonlocal num_asked
        num_asked += 1
        return ["Host a\nInclude me\n"]

    assert host_aliases("Include me", included) == ["a"]
    assert num_asked == MAX_DEPTH


def test_what_is_no_configuration_has_no_hosts() -> None:
    assert host_aliases("", lambda _: []) == []
    assert host_aliases("\x00\xff Host\nHost\nHostName x\n\n=\n", lambda _: []) == []


def test_a_configuration_without_end_is_cut() -> None:
    text = "Host " + " ".join(f"h{number}" for number in range(MAX_ALIASES + 5))

    assert len(host_aliases(text, lambda _: [])) == MAX_ALIASES


def test_a_comment_behind_a_host_names_none() -> None:
    assert host_aliases('Host gpu1 # the one in rack four\nHost "gpu2" #x\nHost gpu#3\n', lambda _: ()) == [
        "gpu1",
        "gpu2",
    ]
