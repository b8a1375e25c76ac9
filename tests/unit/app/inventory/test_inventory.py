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


def test_how_reports_come_is_said_of_all_hosts_or_of_one() -> None:
    inventory = read_inventory(
        "[cluster]\ntelemetry = 'curve'\ntelemetry_interface = '10.0.0.0/24'\ntelemetry_port = '47000-47009'\n"
        "[[node]]\nhost = 'a'\n"
        "[[node]]\nhost = 'b'\ntelemetry = 'ssh'\n"
        "[[node]]\nhost = 'c'\ntelemetry_interface = 'ib0'\ntelemetry_port = 47000\n",
        "rankdeck.toml",
    )

    told = [(host.telemetry, host.telemetry_interface, host.telemetry_ports) for host in inventory.hosts]
    assert told == [
        ("curve", "10.0.0.0/24", (47000, 47009)),
        ("ssh", "10.0.0.0/24", (47000, 47009)),
        ("curve", "ib0", (47000, 47000)),
    ]
    assert HostEntry("d").telemetry == "ssh"


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
            "[cluster]\ntelemetry = 'udp'\n[[node]]\nhost = 'a'\n",
            'rankdeck.toml:2: telemetry: \'udp\' is neither "ssh" nor "curve"',
        ),
        (
            "[cluster]\ntelemetry = 'curve'\n[[node]]\nhost = 'a'\n[[node]]\nhost = 'b'\n",
            'rankdeck.toml:2: telemetry = "curve" needs an interface to listen on: telemetry_interface = "eth0"',
        ),
        ("[[node]]\nhost = 'a'\ntelemetry = 'curve'\n", 'rankdeck.toml:3: telemetry = "curve" needs an interface'),
        (
            "[cluster]\ntelemetry_interface = '0.0.0.0'\n",
            "rankdeck.toml:2: telemetry_interface: 0.0.0.0 would be every interface",
        ),
        ("[cluster]\ntelemetry_interface = '*'\n", "rankdeck.toml:2: telemetry_interface: '*' is neither a network"),
        ("[cluster]\ntelemetry_interface = '127.0.0.1'\n", "rankdeck.toml:2: telemetry_interface: 127.0.0.1 is loop"),
        ("[cluster]\ntelemetry_port = '5-4'\n", "rankdeck.toml:2: telemetry_port: '5-4' is no port from 1 to 65535"),
        ("[cluster]\ntelemetry_port = 70000\n", "rankdeck.toml:2: telemetry_port: 70000 is no port"),
        ("[cluster]\ntelemetry_port = true\n", "rankdeck.toml:2: telemetry_port: true is no port"),
        ("[cluster]\ntelemetry_port = [1]\n", "rankdeck.toml:2: telemetry_port: [1] is no port"),
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
