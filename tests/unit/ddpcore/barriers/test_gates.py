"""Named gates over a real TCPStore; ranks are threads here, processes in the integration tests."""

from __future__ import annotations

import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, TCPStore

from ddpcore import barriers
from ddpcore.barriers import first_one_first
from ddpcore.barriers.arrivals import heartbeat_key
from ddpcore.barriers.barrier_session import BarrierSession
from ddpcore.barriers.heartbeat import DeadlockCheck, HeartbeatThread
from ddpcore.barriers.observer import process_state, started_ticks
from ddpcore.barriers.own_collectives import OwnCollectives
from ddpcore.barriers.rank_status import BarrierKind, ProcessState, RankHeartbeat, encode_heartbeat
from ddpcore.barriers.store_barrier import pass_barrier
from ddpcore.errors import BarrierTimeoutError, BarrierUseError, StoreLostError
from ddpcore.placement import Placement
from ddpcore.probe import probe
from ddpcore.process_group.machine import Neighbours
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch._C._distributed_c10d import Store

WORLD_SIZE = 3
NEVER_DELETED = 1
"""TCPStore's own count of workers."""


def serve() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


@pytest.fixture
def server() -> TCPStore:
    return serve()


def session_of(store: Store, rank: int, machine: str = "here", world_size: int = WORLD_SIZE) -> BarrierSession:
    placement = Placement(rank, world_size, rank, world_size, 0)
    return BarrierSession(store, placement, machine=machine, is_open=lambda: True)


@pytest.fixture
def sessions(server: TCPStore) -> list[BarrierSession]:
    return [session_of(server, rank) for rank in range(WORLD_SIZE)]


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(WORLD_SIZE) as pool:
        yield pool


def come(session: BarrierSession, label: str, timeout_s: float = 60.0) -> None:
    pass_barrier(session, BarrierKind.BARRIER, label, timeout_s)


def meet(threads: ThreadPoolExecutor, sessions: list[BarrierSession], label: str) -> None:
    for passing in [threads.submit(come, session, label) for session in sessions]:
        passing.result()


def test_all_pass_when_the_last_has_come(threads: ThreadPoolExecutor, sessions: list[BarrierSession]) -> None:
    early = [threads.submit(come, session, "load") for session in sessions[:2]]
    assert not any(passing.done() for passing in early)

    come(sessions[2], "load")

    for passing in early:
        passing.result(timeout=60)


def test_every_rank_that_gives_up_names_all_that_are_missing(sessions: list[BarrierSession]) -> None:
    with pytest.raises(BarrierTimeoutError) as caught:
        come(sessions[1], "load", 0.1)

    assert (caught.value.missing, caught.value.label, caught.value.timeout_s) == ([0, 2], "load", 0.1)
    assert str(caught.value) == (
        "ranks 0, 2 did not reach barrier 'load' in 0.1 s: "
        "each of ranks 0, 2 has reported nothing: it has come to no barrier of ddpcore yet"
    )


def test_ranks_that_have_called_other_barriers_differently_often_still_meet(
    threads: ThreadPoolExecutor, sessions: list[BarrierSession]
) -> None:
    with pytest.raises(BarrierTimeoutError):
        come(sessions[0], "only rank 0", 0.05)

    for _ in range(3):
        meet(threads, sessions, "all")


def test_a_rank_that_comes_after_the_others_gave_up_finds_them_at_the_next(
    threads: ThreadPoolExecutor, sessions: list[BarrierSession]
) -> None:
    for session in sessions[:2]:
        with pytest.raises(BarrierTimeoutError):
            come(session, "epoch", 0.05)
    come(sessions[2], "epoch", 1.0)

    meet(threads, sessions, "epoch")


def test_texts_are_exchanged_in_the_order_of_ranks(threads: ThreadPoolExecutor, sessions: list[BarrierSession]) -> None:
    for text in ("", "ümlaut", "x" * 100_000):
        passing = [
            threads.submit(pass_barrier, session, BarrierKind.EXCHANGE, "settings", 60.0, f"{rank}{text}")
            for rank, session in enumerate(sessions)
        ]
        assert [one.result() for one in passing] == [[f"0{text}", f"1{text}", f"2{text}"]] * WORLD_SIZE


def test_texts_that_are_too_large_together_are_one_error_on_every_rank(
    server: TCPStore, threads: ThreadPoolExecutor
) -> None:
    sessions = [session_of(server, rank, world_size=5) for rank in range(5)]
    with ThreadPoolExecutor(5) as pool:
        passing = [
            pool.submit(pass_barrier, session, BarrierKind.EXCHANGE, "state", 60.0, "x" * 900_000)
            for session in sessions
        ]
        messages = {str(one.exception()) for one in passing}
    (message,) = messages
    assert message.startswith("exchange 'state': the ranks' texts have 4,500,0")
    assert "at most 4,194,304 can be exchanged" in message


def test_a_text_too_large_alone_and_a_time_of_nothing_are_refused_before_any_waiting(
    sessions: list[BarrierSession],
) -> None:
    with pytest.raises(BarrierUseError, match="exchange 'state': a text of 2,000,000 characters, at most 1,048,576"):
        pass_barrier(sessions[0], BarrierKind.EXCHANGE, "state", 10.0, "x" * 2_000_000)
    for timeout_s in (0.0, -1.0, float("nan")):
        with pytest.raises(BarrierUseError, match="timeout_s is"):
            come(sessions[0], "epoch", timeout_s)


@pytest.mark.parametrize("label", ["", "a/b|go", "ü" * 1000, "\udcff", "x" * 20_000, "line\nbreak"])
def test_any_label_is_a_label(threads: ThreadPoolExecutor, sessions: list[BarrierSession], label: str) -> None:
    meet(threads, sessions, label)
    meet(threads, sessions, label)
    with pytest.raises(BarrierTimeoutError):
        come(sessions[0], label, 0.05)


def test_the_heart_deletes_the_keys_of_gates_that_everybody_has_left(
    server: TCPStore, threads: ThreadPoolExecutor, sessions: list[BarrierSession]
) -> None:
    hearts = [HeartbeatThread(session) for session in sessions]
    for heartbeat_thread in hearts:
        heartbeat_thread.start(server)
    for number in range(200):
        meet(threads, sessions, f"epoch {number % 2}")
        pass_gates = [threads.submit(pass_barrier, one, BarrierKind.EXCHANGE, "x", 60.0, "text") for one in sessions]
        assert [one.result() for one in pass_gates] == [["text"] * WORLD_SIZE] * WORLD_SIZE

    # Each thread of the pool is a way of its own: each keeps its last gate.
    most = NEVER_DELETED + WORLD_SIZE + 3 * WORLD_SIZE * (2 + WORLD_SIZE)
    until(lambda: server.num_keys() <= most, 60, "old keys are gone")
    for heartbeat_thread in hearts:
        heartbeat_thread.end()


def test_a_store_that_has_gone_is_said_to_be_gone() -> None:
    server = serve()
    client = TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=2))
    session = session_of(client, 0, world_size=1)
    come(session, "alone", 1.0)
    del server

    with pytest.raises(StoreLostError, match="store does not answer at barrier 'alone'"):
        come(session, "alone", 1.0)


def test_gates_work_over_a_file(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    path = str(tmp_path / "store")
    sessions = [session_of(FileStore(path, WORLD_SIZE), rank) for rank in range(WORLD_SIZE)]

    for _ in range(3):
        meet(threads, sessions, "epoch")
    with pytest.raises(BarrierTimeoutError):
        come(sessions[0], "only rank 0", 0.05)


def test_outside_of_a_job_and_alone_in_one_a_gate_returns_at_once(tmp_path: Path) -> None:
    def pass_all() -> list[object]:
        barriers.barrier("nobody else")
        with barriers.master_first() as is_first, barriers.local_master_first("x") as is_local_first:
            return [is_first, is_local_first, barriers.exchange("nobody else", "mine")]

    told = (probe.marks.barrier, probe.marks.firsts)
    assert pass_all() == [True, True, ["mine"]]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert pass_all() == [True, True, ["mine"]]
    finally:
        dist.destroy_process_group()
    assert (probe.marks.barrier, probe.marks.firsts) == told


def test_what_raises_in_a_block_without_a_job_is_not_changed() -> None:
    with pytest.raises(OSError, match="disk full"), barriers.master_first():
        raise OSError("disk full")


def test_a_heart_beats_at_once_and_says_goodbye_at_its_end(server: TCPStore) -> None:
    session = session_of(server, 0, machine=None)  # type: ignore[arg-type] # as in a real process
    heartbeat_thread = HeartbeatThread(session)
    heartbeat_thread.start(server)

    seen = session.observer.look_at(server, 0, 0.0)
    assert seen.process is ProcessState.RUNNING
    assert not seen.has_ended
    heartbeat_thread.end()
    assert session.observer.look_at(server, 0, 0.0).has_ended
    assert not any(thread.name == "rankdeck-heart" for thread in threading.enumerate())


def test_a_process_that_dies_without_a_word_is_told_to_other_machines_by_its_neighbour(server: TCPStore) -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        tick = RankHeartbeat(1.0, 2.0, "here", "here", sleeper.pid, started_ticks(sleeper.pid))
        server.set(heartbeat_key(1), encode_heartbeat(tick))
        neighbour, far_away = session_of(server, 0), session_of(server, 2, machine="elsewhere")
        heartbeat_thread = HeartbeatThread(neighbour)
        heartbeat_thread.start(server)
        assert not far_away.observer.look_at(server, 1, 0.0).has_ended
        assert far_away.observer.look_at(server, 1, 0.0).process is ProcessState.UNKNOWN
        sleeper.kill()

    until(lambda: far_away.observer.look_at(server, 1, 0.0).process is ProcessState.GONE, 60, "the death is told")
    heartbeat_thread.end()


class StoreThatIsFar:
    """Where connecting takes so long that others look at this rank meanwhile."""

    def __init__(self, store: Store, look: Callable[[], None]) -> None:
        self._store, self._look = store, look

    def clone(self) -> Store:
        self._look()
        return self._store


def test_a_thread_that_is_still_connecting_is_one_that_may_come(server: TCPStore) -> None:
    seen: list[int] = []
    far = StoreThatIsFar(server, lambda: seen.append(session.journal.num_threads))
    session = session_of(cast("Store", far), 0)

    session.connection()

    assert seen == [1]


def test_a_thread_that_does_not_get_through_to_the_store_is_counted_once_however_often_it_tries(
    server: TCPStore,
) -> None:
    is_cut = [True, True, False]

    def look() -> None:
        if is_cut.pop(0):
            raise ConnectionError("no way there")

    session = session_of(cast("Store", StoreThatIsFar(server, look)), 0)
    for _ in range(2):
        with pytest.raises(Exception, match=r"no way there|does not answer"):
            session.connection()

    session.connection()

    assert session.journal.num_threads == 1


def test_the_end_of_the_rank_that_went_first_fails_nobody_who_has_not_read_its_result_yet(
    server: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def go_through(session: BarrierSession) -> bool:
        monkeypatch.setattr(first_one_first, "current_session", lambda: session)
        with barriers.master_first("load") as is_first:
            return is_first

    master, looker, follower = (session_of(server, rank, world_size=2) for rank in (0, 1, 1))
    assert go_through(master)
    has_left = RankHeartbeat(1.0, 2.0, "h", "here", 0, 0, has_left=True)
    server.set(heartbeat_key(0), encode_heartbeat(has_left))

    wait = looker.journal.calls(BarrierKind.FIRST, "load").enter(0.0, None, master=0)
    DeadlockCheck(looker, server, OwnCollectives(1), HeartbeatThread(looker).wait_report).examine(wait, 10.0)

    assert not go_through(follower)


def test_what_a_rank_said_in_an_earlier_process_group_is_past(server: TCPStore) -> None:
    session = session_of(server, 0)
    heartbeat_thread = HeartbeatThread(session)
    heartbeat_thread.start(server)
    heartbeat_thread.end()
    second = BarrierSession(server, session.placement, machine="here", number=2, is_open=lambda: True)

    assert second.observer.look_at(server, 0, 0.0).heartbeat is None


def test_the_kernel_tells_processes_that_run_stop_and_have_gone() -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        started = started_ticks(sleeper.pid)
        assert process_state(sleeper.pid, started) is ProcessState.RUNNING
        assert process_state(sleeper.pid, started + 1) is ProcessState.GONE
        assert process_state(sleeper.pid, 0) is ProcessState.UNKNOWN
        sleeper.send_signal(19)
        until(lambda: process_state(sleeper.pid, started) is ProcessState.STOPPED, 60, "it stops")
        sleeper.kill()
        until(lambda: process_state(sleeper.pid, started) is ProcessState.GONE, 60, "it is a zombie")
    assert process_state(sleeper.pid, started) is ProcessState.GONE
    assert started_ticks(sleeper.pid) == 0


def test_neighbours_are_known_whatever_order_the_launcher_has_numbered_them_in(server: TCPStore) -> None:
    placements = [Placement(rank, 6, rank // 2, 3, rank % 2) for rank in range(6)]
    neighbours = [Neighbours(placement) for placement in placements]
    assert neighbours[4].rank_of(server, 2) == 4
    assert Neighbours(Placement(5, 8, 1, 4, 1)).ranks(server) == (4, 5, 6, 7)

    for one in neighbours:
        one.publish(server)

    assert [one.ranks(server) for one in neighbours] == [(0, 2, 4), (1, 3, 5)] * 3
