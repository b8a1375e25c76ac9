"""What `rankdeck.toml` says of hosts, and that each thing that is wrong in it is said with its line."""

from __future__ import annotations

import pytest

from app.errors import UsageError
from app.inventory.inventory import HostEntry, Inventory, WrongInventoryError, read_inventory
from app.inventory.jobs import JobEntry

LAB = """\
[cluster]
name = "lab"
python = "~/venvs/train/bin/python"

[[node]]
host = "gpu1"

[[node]]
host = "me@gpu2:2222"
nproc = 4
python = "python3.12"
workdir = "~/project"

[[node]]
host = "local"
nproc = "gpu"

[thresholds]
stall_s = 5
[job.gpt]
command = ["train.py"]
"""


def wrong(text: str) -> list[str]:
    with pytest.raises(WrongInventoryError) as caught:
        read_inventory(text, "rankdeck.toml")
    return [str(trouble) for trouble in caught.value.troubles]


def test_hosts_have_what_is_said_of_them_and_else_what_is_said_of_all() -> None:
    inventory = read_inventory(LAB, "rankdeck.toml")

    assert inventory == Inventory(
        "lab",
        (
            HostEntry("gpu1", None, "~/venvs/train/bin/python", ""),
            HostEntry("me@gpu2:2222", 4, "python3.12", "~/project"),
            HostEntry("localhost", None, "~/venvs/train/bin/python", ""),
        ),
        (JobEntry("gpt", ("train.py",)),),
    )


def test_the_number_of_ranks_of_all_hosts_is_that_of_each_without_its_own() -> None:
    nodes = '[[node]]\nhost = "a"\n[[node]]\nhost = "b"\nnproc = 4\n[[node]]\nhost = "c"\nnproc = "gpu"\n'
    inventory = read_inventory(f"[cluster]\nnproc = 2\n{nodes}", "rankdeck.toml")

    assert [host.num_ranks for host in inventory.hosts] == [2, 4, None]
    assert inventory.behind_relay(["new"]).hosts == (HostEntry("new", 2),)
    (trouble,) = wrong(f"[cluster]\nnproc = 0\n{nodes}")
    assert trouble.startswith("rankdeck.toml:2: nproc: 0 is neither")


def test_a_file_without_hosts_is_an_empty_inventory() -> None:
    assert read_inventory("[console]\ntheme = 'light'\n", "rankdeck.toml") == Inventory()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[node]\n", "rankdeck.toml:1: it is not TOML: Expected ']]' at the end of an array declaration"),
        ("[[node]]\nhots = 'a'\nhost = 'b'", "rankdeck.toml:2: hots: no such key of node; the nearest is host"),
        ("[[node]]\nnproc = 2\n", 'rankdeck.toml:1: a node has a host: host = "gpu1"'),
        (
            "[[node]]\nhost = 'a'\n[[node]]\n\nhost = '-oProxyCommand=x'\n",
            "rankdeck.toml:5: host: '-oProxyCommand=x' is not a host",
        ),
        ("[[node]]\nhost = 'a'\n[[node]]\nhost = 'a'\n", "rankdeck.toml:4: host: 'a' is also the host of line 2"),
        (
            "[[node]]\nhost = 'a'\nnproc = 0\n",
            'rankdeck.toml:3: nproc: 0 is neither "gpu" nor a number from 1 to 4096',
        ),
        ("[[node]]\nhost = 'a'\nnproc = true\n", "rankdeck.toml:3: nproc: true is neither"),
        ("[[node]]\nhost = 'a'\npython = 3\n", "rankdeck.toml:3: python: 3 is no text of one line"),
        ('[[node]]\nhost = "a"\nworkdir = "x\\u001b[2J"\n', r"rankdeck.toml:3: workdir: 'x\x1b[2J' is no text"),
        ("[node]\nhost = 'a'\n", "rankdeck.toml:1: node is a list of tables: write [[node]] above each host"),
        ("node = [1]\n", "rankdeck.toml:1: node is a table: write [[node]] above its keys"),
        ("cluster = 'lab'\n", "rankdeck.toml:1: cluster is a table: write [cluster] above its keys"),
        (
            "[cluster]\ntelemetry = 'curve'\n[[node]]\nhost = 'a'\n",
            "rankdeck.toml:2: telemetry: no longer a key: reports come by SSH; for hundreds of hosts start a relay",
        ),
        ("[[node]]\nhost = 'a'\ntelemetry_port = 47000\n", "rankdeck.toml:3: telemetry_port: no longer a key"),
        ("[cluster]\npyton = 'x'\n", "rankdeck.toml:2: pyton: no such key of cluster; the nearest is python"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text: str, told: str) -> None:
    (trouble,) = wrong(text)

    assert trouble.startswith(told)
    assert "\x1b" not in trouble


def test_all_that_is_wrong_is_known_in_the_order_of_the_file() -> None:
    troubles = wrong("[[node]]\nnproc = -1\nhost = 'a'\nx = 1\n[cluster]\nname = ''\n")

    assert [trouble.split(" ")[0] for trouble in troubles] == [
        "rankdeck.toml:2:",
        "rankdeck.toml:4:",
        "rankdeck.toml:6:",
    ]


def test_more_hosts_than_anybody_has_are_refused() -> None:
    troubles = wrong("".join(f"[[node]]\nhost = 'h{number}'\n" for number in range(4097)))

    assert troubles == ["rankdeck.toml:1: 4097 hosts are more than 4096"]


@pytest.mark.parametrize(
    ("include", "exclude", "hosts"),
    [
        ((), (), ["a1", "a2", "b1"]),
        (("a*",), (), ["a1", "a2"]),
        (("a1", "b*"), (), ["a1", "b1"]),
        ((), ("a*",), ["b1"]),
        (("*1",), ("a?",), ["b1"]),
    ],
)
def test_hosts_are_chosen_by_patterns(include: tuple[str, ...], exclude: tuple[str, ...], hosts: list[str]) -> None:
    inventory = Inventory("", (HostEntry("a1"), HostEntry("a2"), HostEntry("b1")))

    assert [entry.host for entry in inventory.chosen(include, exclude)] == hosts


def test_a_pattern_that_matches_nothing_is_a_mistake() -> None:
    inventory = Inventory("", (HostEntry("gpu1"), HostEntry("gpu2")))

    with pytest.raises(UsageError, match="'gpu3' matches no host of the inventory; the nearest is gpu"):
        inventory.chosen(("gpu3",))
    with pytest.raises(UsageError, match="no host of the inventory is left"):
        inventory.chosen((), ("gpu*",))


def test_a_host_with_brackets_is_chosen_by_its_name() -> None:
    inventory = Inventory("", (HostEntry("[::1]:22"), HostEntry("a")))

    assert [entry.host for entry in inventory.chosen(("[::1]:22",))] == ["[::1]:22"]
    assert [entry.host for entry in inventory.chosen((), ("[::1]:22",))] == ["a"]


@pytest.mark.parametrize("nproc", ["1" * 400, "0x" + "1" * 5000])
def test_numbers_beyond_all_measure_are_refused(nproc: str) -> None:
    (trouble,) = wrong(f"[[node]]\nhost = 'a'\nnproc = {nproc}\n")

    assert len(trouble) < 200
    assert "nproc: " in trouble


def test_nodes_behind_a_relay_are_those_that_it_knows_with_what_the_inventory_says_of_each() -> None:
    written = (
        '[cluster]\nrelay = "login1"\nrelay_dir = "/r"\nworkdir = "~/p"\n[[node]]\nhost = "gpu2"\nnproc = 4\n'
        '[[node]]\nhost = "away"\n'
    )
    inventory = read_inventory(written, "rankdeck.toml")

    assert (inventory.relay, inventory.relay_dir) == ("login1", "/r")
    known = inventory.behind_relay(["gpu1", "gpu2"])
    assert known.hosts == (HostEntry("gpu1", workdir="~/p"), HostEntry("gpu2", 4, workdir="~/p"))
    with pytest.raises(UsageError, match="'away' matches no host of the relay on login1"):
        known.chosen(("away",))
    assert wrong('[cluster]\nrelay = "no host"\n')
