from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import UsageError
from app.session.master_addr import MAX_TRIED, common_addresses, master_addrs

SSH, IB, DOCKER = "203.0.113.5/32", "192.168.7.5/16", "172.17.0.1/16"


def test_addresses_in_the_networks_of_most_others_are_tried_first() -> None:
    others = [["203.0.113.6/32", "192.168.7.6/16"], ["192.168.7.7/16", "10.9.0.7/24"]]
    assert common_addresses([SSH, "10.9.0.5/24", IB], others) == ["192.168.7.5", "10.9.0.5", "203.0.113.5"]


def test_of_equal_ones_the_one_that_ssh_came_to_is_tried_first() -> None:
    assert common_addresses(["10.0.0.5/24", IB], [["192.168.7.6/16", "10.0.0.6/24"]]) == ["10.0.0.5", "192.168.7.5"]
    assert common_addresses([SSH, IB], [["198.51.100.1/32"]]) == ["203.0.113.5", "192.168.7.5"]


def test_an_address_that_others_have_too_leads_nowhere() -> None:
    assert common_addresses([DOCKER, IB], [[DOCKER, "192.168.7.6/16"]]) == ["192.168.7.5"]
    assert common_addresses([DOCKER], [[DOCKER]]) == []


@pytest.mark.parametrize("first", [[], ["", "nonsense", "1.2.3.4/99"]])
def test_a_node_without_an_address_has_none_to_try(first: list[str]) -> None:
    assert common_addresses(first, [["10.0.0.1/8"]]) == []


@given(st.lists(st.ip_addresses().map(str) | st.text()), st.lists(st.lists(st.ip_addresses().map(str) | st.text())))
def test_few_are_tried_and_only_the_node_s_own(first: list[str], others: list[list[str]]) -> None:
    found = common_addresses(first, others)
    assert len(found) <= MAX_TRIED
    assert len(set(found)) <= len(first)
    assert not {text for texts in others for text in texts} & set(found)


def test_a_single_node_meets_itself_on_loopback_and_one_without_an_address_nobody() -> None:
    addresses = {"a": ["10.0.0.1/24"], "b": ["10.0.0.2/24"], "c": []}
    assert master_addrs(["c"], addresses.__getitem__) == ["127.0.0.1"]
    assert master_addrs(["a", "b"], addresses.__getitem__) == ["10.0.0.1"]
    with pytest.raises(UsageError, match="c has no address"):
        master_addrs(["c", "a"], addresses.__getitem__)
