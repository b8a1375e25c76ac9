"""What `rankdeck` alone offers: by what is there, and nothing else."""

from __future__ import annotations

import pytest

from app.start import (
    KeptFile,
    StartFacts,
    Way,
    attach_argv,
    empty_text,
    file_choices,
    host_choices,
    offers,
    replay_argv,
    shown_choices,
)

BARE = StartFacts(
    home="/home/ada",
    has_torch=False,
    python="/opt/python",
    config_file="~/.ssh/config",
    hosts=None,
    evidence_dir="/s/evidence",
)
KEPT = (KeptFile("/s/evidence/a-1.zip", 60.0, 2048), KeptFile("/s/evidence/b-2.zip", 7200.0, 4096))
FULL = StartFacts(
    home="/home/ada",
    has_torch=True,
    python="/opt/python",
    config_file="~/.ssh/config",
    hosts=("gpu1", "gpu10", "lab"),
    evidence_dir="/s/evidence",
    kept=KEPT,
)


def note(facts: StartFacts, way: Way) -> str:
    return next(offer.note for offer in offers(facts) if offer.way is way)


def test_a_demo_is_offered_only_with_torch_and_else_it_is_said_what_to_install() -> None:
    assert [offer.is_there for offer in offers(FULL)] == [True] * 5
    assert [offer.is_there for offer in offers(BARE)] == [False, True, True, True, True]
    assert "/opt/python has no PyTorch" in note(BARE, Way.DEMO)
    assert "pip install 'rankdeck[train]'" in note(BARE, Way.DEMO)


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        (None, "~/.ssh/config is not there"),
        ((), "~/.ssh/config names none"),
        (("a",), "On one host of ~/.ssh/config"),
        (("a", "b"), "On 2 hosts of ~/.ssh/config"),
    ],
)
def test_it_is_said_where_hosts_come_from(hosts: tuple[str, ...] | None, said: str) -> None:
    facts = StartFacts("/h", has_torch=True, python="p", config_file="~/.ssh/config", hosts=hosts, evidence_dir="/e")
    assert said in note(facts, Way.ATTACH)


def test_it_is_said_how_much_evidence_there_is() -> None:
    assert "2 in /s/evidence, the newest first" in note(FULL, Way.REPLAY)
    assert "None in /s/evidence yet" in note(BARE, Way.REPLAY)


@pytest.mark.parametrize(
    ("typed", "hosts"),
    [
        ("", ["localhost", "gpu1", "gpu10", "lab"]),
        ("GPU1", ["gpu1", "gpu10", "GPU1"]),
        ("gpu10", ["gpu10"]),
        (" ada@new:22 ", ["ada@new:22"]),
        ("loc", ["localhost", "loc"]),
        ("a b", []),
        ("-oProxyCommand=id", []),
    ],
)
def test_hosts_are_narrowed_by_typing_and_any_other_host_can_be_typed(typed: str, hosts: list[str]) -> None:
    assert [choice.value for choice in host_choices(FULL, typed, "here")] == hosts


def test_this_machine_is_always_among_the_hosts_with_what_is_known_of_it() -> None:
    (first, *_) = host_choices(BARE, "", "its agent serves")
    assert first == ("localhost", "its agent serves")


@pytest.mark.parametrize(
    ("typed", "files"),
    [
        ("", ["/s/evidence/a-1.zip", "/s/evidence/b-2.zip"]),
        ("b-2", ["/s/evidence/b-2.zip", "b-2"]),
        ("./own", ["./own"]),
        ("/s/evidence", ["/s/evidence", "/s/evidence/a-1.zip", "/s/evidence/b-2.zip"]),
        ("/s/evidence/a-1.zip", ["/s/evidence/a-1.zip"]),
    ],
)
def test_files_are_narrowed_by_typing_and_any_path_can_be_typed(typed: str, files: list[str]) -> None:
    assert [choice.value for choice in file_choices(FULL, typed)] == files


def test_of_a_file_its_age_and_size_are_told() -> None:
    assert file_choices(FULL, "")[0].note == "1 min ago, 2.0 KiB"


def test_a_list_is_bounded() -> None:
    facts = StartFacts(
        "/h", has_torch=True, python="p", config_file="c", hosts=tuple(f"h{n}" for n in range(999)), evidence_dir="/e"
    )
    assert len(host_choices(facts, "", "")) == 200


def test_what_stands_in_the_place_of_an_empty_list_says_what_to_do() -> None:
    assert "attach and run keep some of each incident" in empty_text(Way.REPLAY, BARE, "")
    assert empty_text(Way.RUN, BARE, "a\x1bb").startswith(r"'a\x1bb' is no host: name an alias")


def test_the_arguments_are_those_of_the_commands() -> None:
    assert attach_argv("gpu1") == ("attach", "--host", "gpu1")
    assert replay_argv("~/x.zip", "/home/ada") == ("replay", "/home/ada/x.zip")
    assert replay_argv("-x", "/home/ada") == ("replay", "--", "-x")


def test_what_a_file_is_called_is_shown_clean() -> None:
    facts = StartFacts(
        "/h",
        has_torch=True,
        python="p",
        config_file="c",
        hosts=(),
        evidence_dir="/e",
        kept=(KeptFile("/e/\x1b[2J.zip", 1, 1),),
    )
    assert shown_choices(file_choices(facts, ""))[0][0] == r"/e/\x1b[2J.zip"
