"""Shares of a state cover it exactly, are balanced, and are the same whoever computes them."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from ddpcore.checkpoint.catalog import Mode, Published, Retention, best_first, is_among_best, victims
from ddpcore.checkpoint.formats import ITEM_BYTES, SMALL_BYTES, Spec, assign, num_rows

shapes = st.lists(st.one_of(st.integers(0, 8), st.integers(0, 3000)), max_size=3).map(tuple)
spec_lists = st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), shapes), max_size=30).map(
    lambda drawn: [Spec(f"t{number}", dtype, shape) for number, (dtype, shape) in enumerate(drawn)]
)


def row_bytes(spec: Spec) -> int:
    return spec.num_bytes // max(1, num_rows(spec.shape))


@given(spec_lists, st.integers(1, 9))
def test_every_row_is_in_exactly_one_share_and_each_share_has_one_piece_of_a_tensor_at_most(
    specs: list[Spec], num_shares: int
) -> None:
    shares = assign(specs, num_shares)

    assert len(shares) == num_shares
    for share in shares:
        names = [piece.name for piece in share]
        assert len(names) == len(set(names))
    for spec in specs:
        pieces = [piece for share in shares for piece in share if piece.name == spec.name]
        ends = [0, *(piece.end for piece in pieces)]
        assert [piece.begin for piece in pieces] == ends[:-1]
        assert ends[-1] == num_rows(spec.shape)


@given(spec_lists, st.integers(1, 9))
def test_small_tensors_are_the_first_rank_s_and_all_others_are_balanced(specs: list[Spec], num_shares: int) -> None:
    shares = assign(specs, num_shares)

    by_name = {spec.name: spec for spec in specs}
    loads = [sum((end - begin) * row_bytes(by_name[name]) for name, begin, end in share) for share in shares]
    small = [spec for spec in specs if spec.num_bytes <= SMALL_BYTES]
    assert {spec.name for spec in small} <= {piece.name for piece in shares[0]}
    largest_step = max([SMALL_BYTES, *(row_bytes(spec) for spec in specs)])
    mean = sum(spec.num_bytes for spec in specs) / num_shares
    # What one share leaves or takes too much is spread over those after it.
    slack = largest_step * (2 + math.log(num_shares))
    assert max(loads) <= max(mean, sum(spec.num_bytes for spec in small)) + slack


def test_a_tensor_larger_than_a_fair_share_is_cut() -> None:
    specs = [Spec("small", "F32", (10,)), Spec("large", "F32", (1000, 1000)), Spec("other", "F32", (400, 1000))]

    shares = assign(specs, 4)

    assert [[tuple(piece) for piece in share] for share in shares] == [
        [("small", 0, 10), ("large", 0, 350)],
        [("large", 350, 700)],
        [("large", 700, 1000), ("other", 0, 50)],
        [("other", 50, 400)],
    ]


published_lists = st.lists(
    st.tuples(st.integers(0, 12), st.booleans(), st.none() | st.sampled_from([0.5, 1.0, 2.0, math.nan])), max_size=20
).map(lambda drawn: [(Published(f"c{n}", row[0], n + 1, f"id{n}"), *row[1:]) for n, row in enumerate(drawn)])


@given(
    published_lists,
    st.none() | st.integers(1, 5),
    st.none() | st.integers(1, 4),
    st.none() | st.tuples(st.integers(1, 4), st.sampled_from(["min", "max"])),
)
def test_retention_keeps_what_it_says_and_never_deletes_the_newest_sound_one(
    drawn: list[tuple[Published, bool, float | None]],
    keep_last: int | None,
    keep_every: int | None,
    best: tuple[int, Mode] | None,
) -> None:
    published = [one for one, *_ in drawn]
    invalid = {one.name for one, is_sound, _ in drawn if not is_sound}
    metrics = {one.name: metric for one, _, metric in drawn if metric is not None}
    keep_best, mode = best or (None, "min")
    retention = Retention(keep_last, keep_every, keep_best, "loss" if best else None, mode)

    doomed = set(victims(published, retention, metrics=metrics, invalid=invalid))

    sound = [one for one in published if one.name not in invalid]
    left = [one for one in sound if one.name not in doomed]
    if sound:
        assert sound[-1].name not in doomed
    newest = {one.step: one for one in sound}
    steps = list(dict.fromkeys(one.step for one in reversed(sound)))
    wanted = set(steps if keep_last is None else steps[:keep_last])
    if keep_every is not None:
        wanted |= {step for step in steps if step % keep_every == 0}
    if keep_best is not None:
        measured = [one for one in newest.values() if metrics.get(one.name, math.nan) == metrics.get(one.name)]
        sign = 1 if mode == "min" else -1
        measured.sort(key=lambda one: (sign * metrics[one.name], one.sequence))
        wanted |= {one.step for one in measured[:keep_best]}
    assert {one.step for one in left} == wanted
    assert len(left) == len(wanted), "two of one step"


@given(st.lists(st.floats(0, 3).map(round) | st.just(math.nan), max_size=8), st.integers(1, 3), st.booleans())
def test_a_checkpoint_is_taken_for_its_metric_if_it_would_stay_for_it(
    values: list[float], keep_best: int, is_max: bool
) -> None:
    retention = Retention(1, None, keep_best, "loss", "max" if is_max else "min")
    *others, value = [*values, 1.0]
    published = [Published(f"c{n}", n, n, "") for n in range(len(values) + 1)]
    kept = best_first(published, {f"c{n}": one for n, one in enumerate([*others, value])}, retention.mode)[:keep_best]
    assert is_among_best(value, others, retention) == (published[-1] in kept)


def test_a_damaged_checkpoint_among_the_last_stays_for_people_to_look_at_until_it_is_old() -> None:
    published = [Published(f"c{n}", n, n, "") for n in range(1, 6)]

    assert victims(published, Retention(2), invalid={"c4"}) == ["c1", "c2"]
    assert victims(published, Retention(2), invalid={"c2"}) == ["c1", "c2", "c3"]
