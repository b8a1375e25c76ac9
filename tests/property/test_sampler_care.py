"""Whatever happens to GPU samplers: one is wanted at a time, few hang about, and each is killed once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent.machine.sampler_care import (
    MAX_ABANDONED,
    KillSampler,
    SamplerCare,
    SamplerEnded,
    SamplerNotStarted,
    SamplerSpoke,
    SamplerStarted,
    StartSampler,
    Ticked,
)

happenings = st.lists(
    st.tuples(st.sampled_from(["tick", "speak", "absent", "end", "end oldest", "fail"]), st.floats(0.0, 400.0)),
    max_size=60,
)


@given(happenings)
def test_samplers_are_few_and_none_is_forgotten(script: list[tuple[str, float]]) -> None:
    care, now_s, alive, killed, next_pid = SamplerCare(), 0.0, [], set(), 1  # type: ignore[var-annotated]
    for what, after_s in script:
        now_s += after_s
        if what == "end" and alive:
            care.handle(SamplerEnded(alive.pop(), 1), now_s)
        elif what == "end oldest" and alive:
            care.handle(SamplerEnded(alive.pop(0), -9), now_s)
        elif what in ("speak", "absent") and alive:
            care.handle(SamplerSpoke(alive[-1], "no driver" if what == "absent" else ""), now_s)
        else:
            for effect in care.handle(Ticked(), now_s):
                if isinstance(effect, StartSampler) and what == "fail":
                    care.handle(SamplerNotStarted("no memory"), now_s)
                elif isinstance(effect, StartSampler):
                    care.handle(SamplerStarted(next_pid), now_s)
                    alive.append(next_pid)
                    next_pid += 1
                elif isinstance(effect, KillSampler):
                    assert effect.pid in alive
                    assert effect.pid not in killed
                    killed.add(effect.pid)
        care.validate()
        assert care.pids == set(alive)
        assert len(alive) <= MAX_ABANDONED + 1
        assert len(set(alive) - killed) <= 1
        state, detail = care.status(now_s)
        assert state.value
        assert len(detail) < 200
