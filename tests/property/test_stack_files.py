"""Whatever is in a stack file, or comes from py-spy, is stacks or is refused; what is sent fits."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.processes.py_spy import MalformedOutputError, stacks_of_output
from agent.wire.codec import MAX_COMMAND_BYTES
from agent.wire.commands import encode_reply
from agent.wire.stacks import RankStacks, Stacks, StackSource, sendable_ranks
from app.stacks.groups import NodeStacks, picture_of
from app.stacks.stack_text import picture_lines
from app.text import clean
from ddpcore.wire import WIRE_VERSION, MalformedReportError
from ddpcore.wire_stacks import (
    MAX_FRAMES,
    MAX_THREADS,
    Frame,
    PendingCall,
    StackDump,
    ThreadStack,
    decode_stack_dump,
    encode_stack_dump,
    fitting,
)
from tests.support.examples import few_and_many
from tests.support.stacks import answer

texts = st.text(max_size=40) | st.sampled_from(
    ["\x1b]52;c;x\x07", "\u202egnp", "[/b]", "<frozen runpy>", "a.b.<locals>.c"]
)
frames = st.builds(
    Frame,
    file=texts,
    line=st.integers(0, 2**40),
    function=texts,
    is_own=st.booleans(),
    is_native=st.booleans(),
)
threads = st.builds(
    ThreadStack,
    name=texts,
    native_id=st.integers(0, 2**31),
    frames=st.lists(frames, max_size=12),
    is_cut=st.booleans(),
)
calls = st.builds(PendingCall, group=texts, seq=st.integers(0, 2**40), op=texts, label=texts)
entries = st.builds(
    RankStacks,
    rank=st.integers(0, 9),
    source=st.sampled_from(StackSource),
    pid=st.integers(0, 2**22),
    threads=st.lists(threads, max_size=4),
    num_threads_left_out=st.integers(0, 9),
    pending=st.lists(calls, max_size=2),
    note=texts,
)

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["frames", "name", "line"]), inner),
    max_leaves=12,
)


@given(st.lists(threads, max_size=8), st.lists(calls, max_size=3))
def test_what_a_probe_writes_is_read_as_it_was(stacks: list[ThreadStack], pending: list[PendingCall]) -> None:
    dump = StackDump(WIRE_VERSION, 7, 2, 4002, stacks, pending=pending)

    assert decode_stack_dump(encode_stack_dump(dump)) == dump


@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_anything_else_is_refused(content: bytes) -> None:
    with pytest.raises(MalformedReportError):
        decode_stack_dump(content)


@given(st.binary(max_size=200) | st.lists(json_values, max_size=3).map(lambda value: json.dumps(value).encode()))
def test_whatever_py_spy_prints_is_stacks_or_is_refused(output: bytes) -> None:
    try:
        stacks, num_left_out = stacks_of_output(output, 1)
    except MalformedOutputError:
        return
    assert stacks
    assert num_left_out == 0


@given(st.lists(threads, max_size=8), st.integers(0, 4000))
def test_threads_that_are_kept_fit_and_the_first_one_is_always_kept(stacks: list[ThreadStack], max_bytes: int) -> None:
    kept = fitting(stacks, max_bytes)

    assert [thread.name for thread in kept] == [thread.name for thread in stacks[: len(kept)]]
    assert bool(kept) == bool(stacks)
    if kept and (len(kept) > 1 or kept[0].frames):
        assert len(msgspec.json.encode(kept)) <= max_bytes + 2
    if kept and kept[0] != stacks[0]:
        assert kept[0].is_cut
        left = iter(stacks[0].frames)
        assert all(frame in left for frame in kept[0].frames), "in their order"


def test_a_node_of_deep_ranks_answers_in_one_line() -> None:
    deep = ThreadStack("MainThread", 1, [Frame("/" + "d" * 200 + ".py", line, "f" * 60) for line in range(MAX_FRAMES)])
    ranks = [RankStacks(rank, StackSource.PROBE, 1, [deep] * MAX_THREADS) for rank in range(64)]

    sent = sendable_ranks(ranks)

    assert len(encode_reply(Stacks("train", 0, 0.1, sent))) < MAX_COMMAND_BYTES
    assert all(one.threads and one.threads[0].frames for one in sent)
    assert all(len(one.threads) + one.num_threads_left_out == MAX_THREADS for one in sent)


def test_the_odd_one_of_many_deep_ranks_is_still_odd() -> None:
    modules = "/v/lib/python3.11/site-packages/torch/nn/modules"
    library = [Frame(f"{modules}/m{line}.py", line, "f" * 40) for line in range(70)]

    def deep(rank: int) -> RankStacks:
        own = Frame("/home/me/train.py", 41 if rank == 3 else 40, "step", is_own=True)
        return RankStacks(rank, StackSource.PROBE, 1, [ThreadStack("MainThread", 1, [*library, own])])

    sent = sendable_ranks([deep(rank) for rank in range(256)])

    assert len(encode_reply(Stacks("train", 0, 0.1, sent))) < MAX_COMMAND_BYTES
    groups = picture_of([answer("n", *sent)]).groups
    assert [len(group.ranks) for group in groups] == [1, 255]
    assert groups[0].ranks == [3]


@few_and_many(
    30, 100, st.lists(entries, max_size=8, unique_by=lambda entry: entry.rank), st.randoms(use_true_random=False)
)
def test_every_rank_is_in_one_group_whatever_comes_in_whatever_order(ranks: list[RankStacks], random: Any) -> None:
    picture = picture_of([answer("n", *ranks)])
    shuffled = list(ranks)
    random.shuffle(shuffled)

    assert sorted(rank for group in picture.groups for rank in group.ranks) == sorted(one.rank for one in ranks)
    keys = [(group.is_waiting, len(group.ranks), group.ranks[0]) for group in picture.groups]
    assert keys == sorted(keys)
    assert picture_of([answer("n", *shuffled)]).groups == picture.groups


@few_and_many(30, 100, st.lists(entries, max_size=4, unique_by=lambda entry: entry.rank), texts, st.booleans())
def test_every_line_is_clean(ranks: list[RankStacks], trouble: str, is_whole: bool) -> None:
    picture = picture_of([answer("n", *ranks), NodeStacks(trouble, None, clean(trouble) or "no reply")])

    for line in picture_lines(picture, is_whole=is_whole):
        assert clean(line.text, 100_000) == line.text
