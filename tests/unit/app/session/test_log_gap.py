from __future__ import annotations

from app.session.log_pulls import gap_line


def test_lines_that_a_node_no_longer_keeps_are_stood_for_by_one() -> None:
    assert gap_line(0, 1, 3.0) is None
    assert gap_line(7, 8, 3.0) is None
    assert gap_line(7, 3, 3.0) is None
    one, many = gap_line(7, 9, 3.0), gap_line(0, 12_346, None)
    assert one is not None
    assert many is not None
    assert (one.seq, one.rank, one.text) == (8, -1, "(1 line is older than what the node keeps: see its files)")
    assert many.text.startswith("(12,345 lines are older")
    assert (one.age_s, many.age_s) == (3.0, None)
