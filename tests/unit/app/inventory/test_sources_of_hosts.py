"""Hosts are taken from hostfiles and Slurm allocations, and written as a file that reads as the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import UsageError
from app.inventory.hostfile import allocated_hosts, allocation, read_hostfile
from app.inventory.inventory import HostEntry, Inventory, inventory_text, read_inventory

HOSTFILE = """\
# the lab
gpu1 slots=8
gpu2\tmax_slots=8 slots = 4   # half of it

gpu3
gpu4:2
gpu2 slots=2
gpu5 max_slots=4
"""


def test_a_hostfile_is_a_host_a_line_and_its_slots() -> None:
    assert read_hostfile(HOSTFILE, "hosts") == [
        HostEntry("gpu1", 8),
        HostEntry("gpu2", 6),
        HostEntry("gpu3", None),
        HostEntry("gpu4", 2),
        HostEntry("gpu5", None),
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gpu1 slots=8\n-oProxyCommand=x slots=1\n", "hosts:2: '-oProxyCommand=x' is not a host"),
        ("gpu1 slots=0\n", "hosts:1: slots=0 is not from 1 to 4096"),
        ("gpu1 slots=" + "9" * 5000, "hosts:1: slots=999999999 is not from 1 to 4096"),
        ("gpu1 slots=4000\n\ngpu1 slots=4000\n", "hosts:3: gpu1 has more than 4096 slots by now"),
        ("$(reboot)\n", r"hosts:1: '\$\(reboot\)' is not a host"),
    ],
)
def test_a_line_that_cannot_be_is_said_with_its_number(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        read_hostfile(text, "hosts")


@pytest.mark.parametrize(
    ("environ", "counts"),
    [
        ({}, [None, None, None]),
        ({"SLURM_TASKS_PER_NODE": "8(x2),4"}, [8, 8, 4]),
        ({"SLURM_TASKS_PER_NODE": "1(x3)", "SLURM_GPUS_ON_NODE": "8"}, [8, 8, 8]),
        ({"SLURM_TASKS_PER_NODE": "1(x3)"}, [None, None, None]),
        ({"SLURM_TASKS_PER_NODE": "8(x2)"}, [None, None, None]),
        ({"SLURM_GPUS_ON_NODE": "4"}, [4, 4, 4]),
        ({"SLURM_GPUS_ON_NODE": "\u00b2"}, [None, None, None]),
    ],
)
def test_an_allocation_has_its_tasks_or_its_gpus_as_ranks(environ: dict[str, str], counts: list[int | None]) -> None:
    hosts = allocated_hosts(["n1", "n2", "n3"], environ)

    assert hosts == [HostEntry(f"n{number}", count) for number, count in enumerate(counts, start=1)]


@pytest.mark.parametrize("text", ["many", "0(x2)", "8(x99999)", "8(x2", "8,,4"])
def test_what_slurm_does_not_say_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is nothing that Slurm sets"):
        allocated_hosts(["n1"], {"SLURM_TASKS_PER_NODE": text})


def test_outside_of_an_allocation_there_are_no_hosts() -> None:
    assert allocation({"SLURM_JOB_NODELIST": "n[1-3]"}) == "n[1-3]"
    with pytest.raises(UsageError, match="in no Slurm allocation"):
        allocation({})


TEXTS = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=20)


@given(
    st.builds(
        Inventory,
        st.one_of(st.just(""), TEXTS),
        st.lists(
            st.builds(
                HostEntry,
                st.from_regex(r"[a-z][a-z0-9.-]{0,12}", fullmatch=True),
                st.one_of(st.none(), st.integers(1, 4096)),
                st.one_of(st.just(""), TEXTS),
                st.one_of(st.just(""), TEXTS),
            ),
            unique_by=lambda entry: entry.host,
            max_size=8,
        ).map(tuple),
    )
)
def test_what_is_written_reads_as_the_same(inventory: Inventory) -> None:
    assert read_inventory(inventory_text(inventory), "rankdeck.toml") == inventory
