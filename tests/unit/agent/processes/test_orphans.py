from __future__ import annotations

from agent.processes.orphans import ProcessFacts, SharedMemoryFacts, find_orphans, find_unused


def facts(pid: int, parent: int, **more: object) -> ProcessFacts:
    known: dict[str, object] = {"is_watchful": False, "job_id": "", "rank": None, **more}
    return ProcessFacts(pid, parent, 100 + pid, **known)  # type: ignore[arg-type]


def orphans(*processes: ProcessFacts) -> dict[int, bool]:
    return {one.pid: is_ours for one, is_ours in find_orphans({one.pid: one for one in processes}, {1, 50})}


def test_what_lives_below_a_shim_is_no_orphan_whatever_it_carries() -> None:
    shim = facts(10, 1, is_watchful=True, job_id="train")
    launcher = facts(11, 10, job_id="train")
    assert orphans(shim, launcher, facts(12, 11, job_id="train", rank=0), facts(13, 12, job_id="train", rank=0)) == {}


def test_what_a_dead_shim_has_left_is_ours_with_all_below_it() -> None:
    rank = facts(12, 1, job_id="train", rank=0)
    assert orphans(rank, facts(13, 12), facts(14, 13)) == {12: True, 13: True, 14: True}


def test_ranks_of_another_launcher_are_foreign_once_it_is_dead() -> None:
    alive = [facts(20, 5), facts(21, 20, rank=0), facts(22, 21, rank=0)]
    dead = [facts(31, 1, rank=0), facts(32, 31, rank=0), facts(41, 50, rank=1)]
    assert orphans(*alive, *dead) == {31: False, 32: False, 41: False}


def test_a_process_without_any_mark_is_nobodys_leftover() -> None:
    assert orphans(facts(60, 1), facts(61, 60)) == {}


def test_parents_that_go_in_a_circle_end_the_search() -> None:
    """Pids are read one after the other, and may be used again meanwhile."""
    assert orphans(facts(70, 71, rank=1), facts(71, 70, rank=0)) == {}


def test_shared_memory_is_a_leftover_by_its_name_and_if_nothing_uses_it() -> None:
    files = [
        SharedMemoryFacts("torch_123_4_0", is_in_use=False),
        SharedMemoryFacts("torch_124_4_0", is_in_use=True),
        SharedMemoryFacts("nccl-AbCdEf", is_in_use=False),
        SharedMemoryFacts("somebodys", is_in_use=False),
    ]
    assert [file.name for file in find_unused(files)] == ["torch_123_4_0", "nccl-AbCdEf"]
