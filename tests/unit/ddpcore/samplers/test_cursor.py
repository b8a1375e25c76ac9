"""States of samplers that belong to something else, are damaged, or are hostile: one clear error, nothing changed."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ddpcore.errors import SamplerStateError
from ddpcore.samplers.batch_sampler import ElasticBatchSampler
from ddpcore.samplers.cursor import Cursor, cursor_state, parse_cursor_state
from ddpcore.samplers.distributed_sampler import ElasticDistributedSampler
from ddpcore.samplers.order import Order, SequentialOrder, ShuffledOrder
from ddpcore.samplers.weighted_order import WeightedOrder

ORDER = ShuffledOrder(1000, seed=7)
STATE = cursor_state(ORDER, Cursor(3, 440))


def nested(depth: int) -> list[Any]:
    innermost: list[Any] = []
    for _ in range(depth):
        innermost = [innermost]
    return innermost


def test_a_state_outlives_json() -> None:
    assert parse_cursor_state(json.loads(json.dumps(STATE)), ORDER) == Cursor(3, 440)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (ShuffledOrder(999, seed=7), "num_samples was 1000 and is 999"),
        (ShuffledOrder(1000, seed=8), "seed was 7 and is 8"),
        (SequentialOrder(1000), "kind was 'xm8-v1' and is 'sequential-v1', seed was 7 and is None"),
        (WeightedOrder([1.0] * 1000, seed=7), "kind was 'xm8-v1' and is 'weighted-replaced-v1'"),
    ],
)
def test_a_state_of_another_data_set_seed_or_kind_is_refused_with_what_differs(order: Order, message: str) -> None:
    with pytest.raises(SamplerStateError, match=message) as caught:
        parse_cursor_state(STATE, order)

    assert "resume with the same data set, seed and sampler" in str(caught.value)


def test_other_weights_are_noticed() -> None:
    state = cursor_state(WeightedOrder([1.0, 2.0, 3.0]), Cursor(0, 1))

    with pytest.raises(SamplerStateError, match="weights_crc32 was"):
        parse_cursor_state(state, WeightedOrder([1.0, 2.0, 4.0]))


DAMAGES: list[tuple[Any, str]] = [
    (None, "is a dict, not None"),
    ([1, 2], "is a dict, not "),
    ({}, "lacks epoch, order, position, version"),
    ({**STATE, "version": "cursor-v9"}, "has version 'cursor-v9'"),
    ({**STATE, "order": "xm8-v1"}, "order is 'xm8-v1' instead of a dict"),
    ({**STATE, "order": {}}, "kind was None and is 'xm8-v1'"),
    ({**STATE, "order": {**ORDER.fingerprint(), 5: 5}}, "5 was 5 and is None"),
    ({**STATE, "epoch": -1}, "epoch -1 is not within"),
    ({**STATE, "epoch": 10**5000}, "epoch something of type int is not within"),
    ({**STATE, "epoch": True}, "epoch is True instead of an integer"),
    ({**STATE, "position": 440.0}, "position is 440.0 instead of an integer"),
    ({**STATE, "position": "440"}, "position is '440' instead of an integer"),
    ({**STATE, "position": float("nan")}, "position is nan instead"),
    ({**STATE, "position": -1}, "position -1 is not within 0 to 1000"),
    ({**STATE, "position": 1001}, "position 1001 is not within 0 to 1000"),
    ({**STATE, "position": "x" * 10**6}, "position is 'x{79}\\.\\.\\. instead"),
    ({**STATE, "position": nested(100_000)}, "position is something of type list instead"),
]


@pytest.mark.parametrize(("state", "message"), DAMAGES, ids=[message for _, message in DAMAGES])
def test_a_damaged_state_is_refused_and_changes_nothing(state: Any, message: str) -> None:
    elastic = ElasticBatchSampler(ORDER, 20)
    elastic.load_state_dict(STATE)
    drop_in = ElasticDistributedSampler(range(1000), 4, 1, seed=7)
    drop_in.load_state_dict(STATE)
    before = drop_in.state_dict()

    for sampler in (elastic, drop_in):
        with pytest.raises(SamplerStateError, match=message):
            sampler.load_state_dict(state)

    assert elastic.cursor == Cursor(3, 440)
    assert drop_in.state_dict() == before


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(sorted(STATE)), inner),
        max_leaves=20,
    )
    | st.fixed_dictionaries(
        dict.fromkeys(STATE, st.none() | st.integers() | st.text() | st.just(STATE["order"]) | st.just("cursor-v1"))
    )
)
def test_garbage_is_a_state_or_is_refused(state: Any) -> None:
    try:
        cursor = parse_cursor_state(state, ORDER)
    except SamplerStateError:
        return

    assert cursor.epoch >= 0
    assert 0 <= cursor.position <= 1000
