from __future__ import annotations

import pytest

from agent.node_state.progress import CpuUse


def test_cores_are_counted_over_whole_windows() -> None:
    use = CpuUse()
    for tick in range(11):
        use.take(cpu_s=5.0 + 1.5 * tick / 10, now_s=100.0 + tick / 10)

    assert use.cores == pytest.approx(1.5, rel=0.15)


def test_nothing_is_known_before_the_first_window() -> None:
    use = CpuUse()
    use.take(5.0, 100.0)
    use.take(5.9, 100.9)

    assert use.cores == 0.0


def test_a_process_that_stops_is_idle_a_window_later() -> None:
    use = CpuUse()
    for now_s, cpu_s in ((0.0, 0.0), (1.0, 2.0), (2.5, 2.0)):
        use.take(cpu_s, now_s)

    assert use.cores == 0.0
