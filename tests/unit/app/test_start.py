"""What `rankdeck` alone offers: by what is there, and nothing else."""

from __future__ import annotations

import msgspec
import pytest

from app.inventory.inventory import HostEntry, Inventory
from app.inventory.jobs import JobEntry
from app.program import Program, usual_workdir
from app.start import (
    KeptFile,
    StartFacts,
    Way,
    all_hosts_text,
    aside,
    attach_argv,
    empty_text,
    file_choices,
    host_choices,
    job_choices,
    offers,
    program_argv,
    replay_argv,
    shown_choices,
    start_argv,
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


JOBS = (
    JobEntry("gpt", ("train.py", "--config", "a b.toml"), ("gpu*",)),
    JobEntry("eval", ("-m", "pkg.eval")),
    JobEntry("gpt-small", ("train.py",)),
    JobEntry("sweep", ("sweep.py",)),
)


def lab(*hosts: str, name: str = "lab", jobs: tuple[JobEntry, ...] = ()) -> StartFacts:
    """Return what is there in the directory of a cluster."""
    inventory = Inventory(name, tuple(HostEntry(host) for host in hosts), jobs)
    return msgspec.structs.replace(FULL, inventory=inventory, inventory_file="~/lab/rankdeck.toml")


def note(facts: StartFacts, way: Way) -> str:
    return next(offer.note for offer in offers(facts) if offer.way is way)


def test_a_cluster_behind_a_relay_is_offered_without_what_goes_to_each_host() -> None:
    relayed = msgspec.structs.replace(lab().inventory, relay="login1")
    facts = msgspec.structs.replace(FULL, inventory=relayed, inventory_file="~/lab/rankdeck.toml")

    ways = [offer.way for offer in offers(facts)]

    assert ways[:2] == [Way.CLUSTER, Way.RUN_ON_ALL]
    assert Way.EXAMINE not in ways
    assert "the nodes behind the relay on login1" in note(facts, Way.CLUSTER)
    assert all_hosts_text(facts) == "all nodes of the relay"


def test_a_host_that_is_not_the_relay_s_is_gone_to_past_it() -> None:
    relayed = msgspec.structs.replace(lab("gpu1").inventory, relay="login1")
    facts, node = msgspec.structs.replace(FULL, inventory=relayed), relayed.hosts[0].host

    assert attach_argv(facts, "localhost") == ("attach", "--relay", "none", "--host", "localhost")
    assert program_argv(facts, "other", Program(("train.py",)))[:4] == ("run", "--relay", "none", "--host")
    assert attach_argv(facts, node) == ("attach", "--host", node)
    assert "--relay" not in program_argv(facts, None, Program(("train.py",)))


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
    assert empty_text(Way.JOB, lab("a"), "x") == "'x' is in no job of ~/lab/rankdeck.toml: type a part of a name."
    assert empty_text(Way.RUN, BARE, "a\x1bb").startswith(r"'a\x1bb' is no host: name an alias")


def test_the_arguments_are_those_of_the_commands() -> None:
    assert attach_argv(FULL, "gpu1") == ("attach", "--host", "gpu1")
    assert start_argv(FULL, "gpt") == ("start", "gpt")
    assert replay_argv(FULL, "~/x.zip") == ("replay", "/home/ada/x.zip")
    assert replay_argv(FULL, "-x") == ("replay", "--", "-x")
    program = Program(("train.py", "--lr", "1"), 2, 0, "work")
    words = ("--nproc-per-node", "2", "--workdir", "work", "--", "train.py", "--lr", "1")
    assert program_argv(FULL, "gpu1", program) == ("run", "--host", "gpu1", *words)
    assert program_argv(FULL, None, program) == ("run", *words)


def test_settings_that_were_typed_hold_for_what_is_chosen_where_it_takes_them() -> None:
    typed = ("--no-config", "--set=console.theme=light")
    facts = msgspec.structs.replace(lab("gpu1", "gpu2", jobs=JOBS), settings=typed)

    assert attach_argv(facts, "gpu1") == ("attach", *typed, "--host", "gpu1")
    assert program_argv(facts, None, Program(("a",))) == ("run", *typed, "--", "a")
    taken = [offer.way for offer in offers(facts) if offer.argv[1:3] == typed]
    assert set(Way) - set(taken) == {Way.EXAMINE, Way.HELP}
    assert [offer.argv for offer in offers(facts) if offer.way not in taken] == [("doctor",), ("--help",)]


def test_a_cluster_comes_before_all_that_there_is_without_one() -> None:
    titles = [offer.title for offer in offers(lab("gpu1", "gpu2", "gpu3", "gpu4", jobs=JOBS[:1]))]

    assert titles[:4] == [
        "Watch cluster lab: 4 hosts",
        "Start job gpt of rankdeck.toml",
        "Run a program on all 4 hosts",
        "Examine the hosts",
    ]
    assert [offer.way for offer in offers(lab("gpu1"))][3:] == [Way.ATTACH, Way.RUN, Way.DEMO, Way.REPLAY, Way.HELP]
    assert len(offers(lab("gpu1", jobs=JOBS))) == 9, "each has a key of its own"


def test_a_cluster_without_a_name_and_one_of_a_single_host_are_told_so() -> None:
    titles = [offer.title for offer in offers(lab("gpu1", name=""))]

    assert titles[:3] == ["Watch the cluster: 1 host", "Run a program on gpu1", "Examine the host"]
    assert all_hosts_text(lab("a", "b")) == "all 2 hosts"


def test_it_is_said_which_hosts_and_jobs_there_are_and_of_which_file() -> None:
    facts = lab("gpu1", "gpu2", "gpu3", "gpu4", jobs=JOBS)

    assert note(facts, Way.CLUSTER).startswith("The job of gpu1, gpu2 and 2 more, of ~/lab/rankdeck.toml.")
    assert note(facts, Way.JOB) == "gpt, eval, gpt-small and 1 more, each with its command and its hosts."
    assert note(lab("gpu1", jobs=JOBS[:3]), Way.JOB).startswith("gpt, eval, gpt-small, each")
    assert note(lab("gpu1", jobs=JOBS[:1]), Way.JOB) == "train.py --config 'a b.toml', on gpu*."
    assert note(facts, Way.ATTACH).startswith("On one of rankdeck.toml, of ~/.ssh/config, on another")
    assert note(msgspec.structs.replace(facts, hosts=None), Way.ATTACH).startswith(
        "On one of rankdeck.toml, on another"
    )


def test_a_name_from_the_file_is_shown_clean() -> None:
    facts = lab("gpu1", "a\x1b[2Jb", name="la\x1bb")

    assert r"cluster la\x1bb" in offers(facts)[0].title
    assert r"a\x1b[2Jb" in offers(facts)[0].note


@pytest.mark.parametrize(
    ("typed", "jobs"),
    [
        ("", ["gpt", "eval", "gpt-small", "sweep"]),
        ("gpt", ["gpt", "gpt-small"]),
        ("TRAIN.py", ["gpt", "gpt-small"]),
        ("gpu*", ["gpt"]),
        ("e", ["eval", "sweep"]),
        ("nothing", []),
    ],
)
def test_jobs_are_narrowed_by_typing(typed: str, jobs: list[str]) -> None:
    assert [choice.value for choice in job_choices(lab("gpu1", jobs=JOBS), typed)] == jobs


def test_of_a_job_its_command_and_its_hosts_are_told() -> None:
    first, second, *_ = job_choices(lab("gpu1", jobs=JOBS), "")
    assert (first.note, second.note) == ("train.py --config 'a b.toml', on gpu*", "-m pkg.eval")


def test_hosts_of_the_cluster_come_first_each_once() -> None:
    choices = host_choices(lab("trainer", "gpu10"), "", "its agent serves")
    assert choices[:2] == [("trainer", "rankdeck.toml"), ("gpu10", "rankdeck.toml")]
    assert choices[2:] == [("localhost", "its agent serves"), ("gpu1", ""), ("lab", "")]

    here = host_choices(lab("gpu9", "localhost"), "", "its agent serves")
    assert here[:2] == [("gpu9", "rankdeck.toml"), ("localhost", "its agent serves")]


def test_a_hint_says_how_a_cluster_comes_here_and_trouble_is_told() -> None:
    def told(facts: StartFacts, **changes: object) -> tuple[str, bool]:
        return aside(msgspec.structs.replace(facts, **changes))

    assert "`rankdeck init` writes them" in told(BARE)[0]
    assert told(BARE, inventory_file="~/x/rankdeck.toml")[0].startswith(
        "~/x/rankdeck.toml names no hosts: `rankdeck init`"
    )
    assert "(--no-config)" in told(BARE, has_no_files=True)[0]
    assert told(lab("gpu1")) == ("", False)
    trouble, is_trouble = told(BARE, inventory_trouble="/x/rankdeck.toml:3: host: \x1b is no host")
    assert trouble == r"Without the cluster of this directory: /x/rankdeck.toml:3: host: \x1b is no host"
    assert is_trouble


@pytest.mark.parametrize(
    ("hosts", "where"),
    [
        (["localhost"], "the inventory's, else this directory"),
        (["gpu1"], "the inventory's, else home"),
        (["gpu1", "localhost"], "the inventory's, else home; on localhost this directory"),
    ],
)
def test_it_is_said_where_a_program_runs_unless_it_is_told_otherwise(hosts: list[str], where: str) -> None:
    assert usual_workdir(hosts) == where


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
