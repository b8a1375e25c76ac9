"""The shim against real process trees: it ends them whole, and tells how the launcher ended."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from agent.processes.shim_process import Invocation, ShimProcess, exit_status, spawn_shim
from ddpcore.checkpoint.writer import NAME
from tests.support.filesystems import small_disk
from tests.support.ranks import is_alive
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

END_S = 10.0

# A launcher that leaves: a child in another session, a grandchild whose parent has gone, and one that ignores SIGTERM.
TREE = """
import os, signal, subprocess, sys, time
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
children = [
    subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE, start_new_session=True),
    subprocess.Popen(["sleep", "600"], start_new_session=True),
]
subprocess.run(["sh", "-c", "setsid sleep 600 & echo $! > orphan.pid"], check=True)
children[0].stdout.readline()
open("tree.ready", "w").close()
"""


FILLS_THE_DISK = """
import os, sys
with open("filler", "wb", buffering=0) as file:
    try:
        while file.write(b"x" * 4096):
            pass
    except OSError:
        sys.exit(7)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ShimProcess]]:
    """Start a shim over a Python program; what is left of it at the end is killed."""
    started: list[ShimProcess] = []

    def start(program: str, *, grace_s: float = 5.0, store_fd: int | None = None, **env: str) -> ShimProcess:
        argv = [sys.executable, "-c", textwrap.dedent(program)]
        invocation = Invocation(argv, {**os.environ, **env}, str(tmp_path), store_fd)
        shim = spawn_shim(invocation, run_dir=tmp_path, grace_s=grace_s, dies_with_us=True)
        started.append(shim)
        return shim

    yield start
    for shim in started:
        if not shim.has_ended():
            shim.kill_tree()
            wait_for_end(shim)
        shim.close()


def wait_for_end(shim: ShimProcess) -> None:
    select.select([shim.pidfd], [], [], END_S)
    until(shim.has_ended, 1.0, "the shim is collected")


def tree_of(shim: ShimProcess, tmp_path: Path) -> list[int]:
    until((tmp_path / "tree.ready").exists, END_S, "the tree stands")
    return [child.pid for child in psutil.Process(shim.pid).children(recursive=True)]


def is_in(process: psutil.Process, directory: Path) -> bool:
    try:
        return process.cwd() == str(directory)
    except psutil.Error:
        return False


def test_it_tells_the_launchers_exit_code(start: Callable[..., ShimProcess], tmp_path: Path) -> None:
    shim = start("import sys; print('said', flush=True); sys.exit(7)")
    wait_for_end(shim)
    assert shim.exit_code() == 7
    assert (tmp_path / "launcher.log").read_text() == "said\n"
    assert json.loads((tmp_path / "exit.json").read_text()) == {"exit_code": 7, "num_killed": 0}


def test_it_tells_the_signal_that_ended_the_launcher(start: Callable[..., ShimProcess]) -> None:
    shim = start("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    wait_for_end(shim)
    assert shim.exit_code() == -signal.SIGSEGV


@pytest.mark.parametrize(("python", "workdir"), [("/no/such/python", "/usr"), (sys.executable, "/no/such/dir")])
def test_a_launcher_that_cannot_be_executed_says_so(tmp_path: Path, python: str, workdir: str) -> None:
    shim = spawn_shim(Invocation([python], {}, workdir), run_dir=tmp_path, grace_s=1.0, dies_with_us=False)
    wait_for_end(shim)
    shim.close()
    assert shim.exit_code() == 127
    missing = python if "no" in Path(python).parts else workdir
    assert (tmp_path / "launcher.log").read_text() == f"{missing}: No such file or directory\n"


def test_only_the_launcher_enters_its_directory(start: Callable[..., ShimProcess], tmp_path: Path) -> None:
    shim = start("import os, time; print(os.getcwd(), flush=True); open('tree.ready', 'w').close(); time.sleep(600)")
    tree_of(shim, tmp_path)
    assert (tmp_path / "launcher.log").read_text() == f"{tmp_path}\n"
    assert psutil.Process(shim.pid).cwd() == "/", "a dead disk would hold up whoever enters it"


def test_what_the_launcher_leaves_behind_is_killed(start: Callable[..., ShimProcess], tmp_path: Path) -> None:
    shim = start(TREE)
    wait_for_end(shim)
    assert shim.exit_code() == 0
    assert not is_alive(int((tmp_path / "orphan.pid").read_text()))
    assert json.loads((tmp_path / "exit.json").read_text())["num_killed"] >= 3


# A launcher that leaves a checkpoint's writer at work, and something else.
LEFT_AT_WORK = f"""
import subprocess, sys
writer = '''
import sys
open("/proc/self/comm", "w").write("{NAME}")
print("up", flush=True)
sys.stdin.read()
open("written", "w").close()
'''
child = subprocess.Popen(
    [sys.executable, "-c", writer], stdin=open("go"), stdout=subprocess.PIPE, start_new_session=True
)
child.stdout.readline()
open("writer.pid", "w").write(str(child.pid))
other = subprocess.Popen(["sleep", "600"], start_new_session=True)
open("other.pid", "w").write(str(other.pid))
"""


def test_a_checkpoints_writer_may_finish_and_nobody_else(start: Callable[..., ShimProcess], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    go = os.open(tmp_path / "go", os.O_RDWR)
    shim = start(LEFT_AT_WORK)
    until(lambda: (tmp_path / "other.pid").exists() and (tmp_path / "other.pid").read_text(), END_S, "all have started")
    other = int((tmp_path / "other.pid").read_text())
    until(lambda: not is_alive(other), END_S, "what is no writer has been killed")
    assert is_alive(int((tmp_path / "writer.pid").read_text()))
    assert not shim.has_ended()

    os.close(go)
    wait_for_end(shim)

    assert (tmp_path / "written").exists()
    assert shim.exit_code() == 0


def test_a_kill_does_not_wait_for_a_checkpoints_writer(start: Callable[..., ShimProcess], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    go = os.open(tmp_path / "go", os.O_RDWR)
    shim = start(LEFT_AT_WORK)
    until(lambda: (tmp_path / "other.pid").exists() and (tmp_path / "other.pid").read_text(), END_S, "all have started")
    other = int((tmp_path / "other.pid").read_text())
    until(lambda: not is_alive(other), END_S, "the launcher has ended")

    shim.kill_tree()
    wait_for_end(shim)

    os.close(go)
    assert not (tmp_path / "written").exists()
    assert not is_alive(int((tmp_path / "writer.pid").read_text()))


def test_killing_the_tree_leaves_nobody(start: Callable[..., ShimProcess], tmp_path: Path) -> None:
    shim = start(TREE + "time.sleep(600)")
    tree = tree_of(shim, tmp_path)
    assert len(tree) >= 4
    shim.kill_tree()
    wait_for_end(shim)
    assert shim.exit_code() == -signal.SIGKILL
    assert [pid for pid in tree if is_alive(pid)] == []


def test_a_termination_is_passed_on_and_then_enforced(start: Callable[..., ShimProcess], tmp_path: Path) -> None:
    shim = start(
        TREE
        + "signal.signal(15, lambda *_: (time.sleep(0.2), sys.exit(3)))\nopen('armed', 'w').close()\ntime.sleep(600)"
    )
    tree = tree_of(shim, tmp_path)
    until((tmp_path / "armed").exists, END_S, "the launcher listens")
    shim.terminate()
    wait_for_end(shim)
    assert shim.exit_code() == 3
    assert [pid for pid in tree if is_alive(pid)] == []


@pytest.mark.fault(row=27)
def test_a_launcher_that_ignores_termination_is_killed_after_the_grace_period(
    start: Callable[..., ShimProcess], tmp_path: Path
) -> None:
    shim = start(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open('tree.ready', 'w'); time.sleep(600)",
        grace_s=-1.5,  # the shim adds 2 s
    )
    tree_of(shim, tmp_path)
    shim.terminate()
    wait_for_end(shim)
    assert shim.exit_code() == -signal.SIGKILL


def test_a_second_termination_kills(start: Callable[..., ShimProcess], tmp_path: Path) -> None:
    program = """
        import signal, time
        signal.signal(signal.SIGTERM, lambda *_: open('termed', 'w').close())
        open('tree.ready', 'w').close()
        while True: time.sleep(1)
    """
    shim = start(program, grace_s=600.0)
    tree_of(shim, tmp_path)
    shim.terminate()
    until((tmp_path / "termed").exists, END_S, "the first termination arrives")
    asked_s = time.monotonic()

    def terminated_again() -> bool:
        shim.terminate()
        return shim.exit_code() is not None

    until(terminated_again, END_S, "a later one kills")
    assert shim.exit_code() == -signal.SIGKILL
    assert time.monotonic() - asked_s > 0.5, "those that follow at once are the same wish"


def test_a_termination_that_comes_twice_leaves_the_launcher_its_time(
    start: Callable[..., ShimProcess], tmp_path: Path
) -> None:
    program = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: open('termed', 'w').close())
        open('tree.ready', 'w').close()
        signal.pause()
        while not __import__('os').path.exists('again'): time.sleep(0.01)
        sys.exit(7)
    """
    shim = start(program, grace_s=600.0)
    tree_of(shim, tmp_path)
    shim.terminate()
    until((tmp_path / "termed").exists, END_S, "the first termination arrives")
    shim.terminate()
    status = Path(f"/proc/{shim.pid}/status")
    until(lambda: re.search(r"ShdPnd:\t0+\n", status.read_text()), END_S, "the second one is taken")
    (tmp_path / "again").touch()
    wait_for_end(shim)
    assert shim.exit_code() == 7


def test_a_frozen_tree_is_continued_to_be_stopped(start: Callable[..., ShimProcess], tmp_path: Path) -> None:
    program = "import time; open('tree.ready', 'w').close(); time.sleep(600)"
    shim = start(program, grace_s=600.0)
    (launcher,) = tree_of(shim, tmp_path)
    os.kill(launcher, signal.SIGSTOP)
    until(lambda: psutil.Process(launcher).status() == psutil.STATUS_STOPPED, END_S, "the launcher is frozen")
    shim.terminate()
    wait_for_end(shim)
    assert shim.exit_code() == -signal.SIGTERM


@pytest.mark.fault(row=27)
def test_a_tree_that_forks_without_end_is_ended(start: Callable[..., ShimProcess], tmp_path: Path) -> None:
    program = """
        import os, time
        open('tree.ready', 'w').close()
        while True:
            if os.fork():
                os._exit(0)
            os.setsid()
            time.sleep(0.002)
    """
    # The launcher's first fork ends it: the shim must then end the chain that goes on.
    shim = start(program)
    wait_for_end(shim)
    assert shim.exit_code() == 0
    assert [process for process in psutil.process_iter() if is_in(process, tmp_path)] == []


def test_the_death_of_the_launcher_ends_the_rest(start: Callable[..., ShimProcess], tmp_path: Path) -> None:
    shim = start(TREE + "time.sleep(600)")
    tree = tree_of(shim, tmp_path)
    # The tree may stand before the shim has written down whom it forked.
    launcher_pid = until(shim.launcher_pid, END_S, "the shim names its launcher")
    assert launcher_pid in tree
    os.kill(launcher_pid, signal.SIGKILL)
    wait_for_end(shim)
    assert shim.exit_code() == -signal.SIGKILL
    assert [pid for pid in tree if is_alive(pid)] == []


# Plays the agent in a process of its own, since it adopts and kills whatever it finds below itself.
AGENT = """
import os, sys, time
from pathlib import Path
from agent.processes.leftovers import sweep
from agent.processes.shim_process import Invocation, spawn_shim
from agent.processes.shim import become_subreaper
become_subreaper()
here = Path(sys.argv[1])
shim = spawn_shim(
    Invocation([sys.executable, "-c", sys.argv[2]], os.environ, str(here)), run_dir=here, grace_s=5.0, dies_with_us=True
)
print(shim.pid, flush=True)
while not shim.has_ended():
    time.sleep(0.01)
print(shim.exit_code(), flush=True)
while sweep(str(here), set(), owns_all_below=True):
    time.sleep(0.01)
print("swept", flush=True)
"""


def play_agent(tmp_path: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """Return a process that has started a shim over the tree, and the pids of both."""
    argv = [sys.executable, "-P", "-c", AGENT, str(tmp_path), TREE + "time.sleep(600)"]
    agent = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    shim_pid = int(agent.stdout.readline())
    until((tmp_path / "tree.ready").exists, END_S, "the tree stands")
    return agent, [shim_pid, *(child.pid for child in psutil.Process(shim_pid).children(recursive=True))]


def test_what_a_killed_shim_leaves_is_swept_up_by_the_agent(tmp_path: Path) -> None:
    agent, (shim_pid, *tree) = play_agent(tmp_path)
    os.kill(shim_pid, signal.SIGKILL)
    stdout, _ = agent.communicate(timeout=END_S)
    assert stdout.split() == ["None", "swept"]
    assert [pid for pid in tree if is_alive(pid)] == []


def test_the_death_of_the_agent_ends_the_tree(tmp_path: Path) -> None:
    agent, tree = play_agent(tmp_path)
    agent.kill()
    agent.communicate()
    until(lambda: not any(map(is_alive, tree)), END_S, "the tree is gone")


def test_arguments_variables_and_the_socket_arrive_byte_for_byte(tmp_path: Path) -> None:
    program = (
        "import os, socket, sys; fd = int(os.environ['STORE']); "
        "open('seen', 'wb').write(b'\\0'.join([*map(os.fsencode, sys.argv[1:]), os.environb[b'ODD'], "
        "str(socket.socket(fileno=fd).getsockname()[1]).encode(), os.environb.get(b'PYTHONPATH', b'-')]))"
    )
    arguments = ["$HOME `id` \"'", "-x", "", "new\nline", "\u00e9\udcff"]
    with socket.create_server(("127.0.0.1", 0)) as store:
        env = {"ODD": "a=b\n\udcfe", "STORE": str(store.fileno()), "PYTHONPATH": "/nowhere"}
        invocation = Invocation([sys.executable, "-c", program, *arguments], env, str(tmp_path), store.fileno())
        shim = spawn_shim(invocation, run_dir=tmp_path, grace_s=1.0, dies_with_us=True)
        port = store.getsockname()[1]
    wait_for_end(shim)
    shim.close()
    assert shim.exit_code() == 0, (tmp_path / "launcher.log").read_text()
    seen = (tmp_path / "seen").read_bytes().split(b"\0")
    assert seen == [*map(os.fsencode, arguments), b"a=b\n\xfe", str(port).encode(), b"/nowhere"]


def test_signals_are_as_a_program_expects_them(start: Callable[..., ShimProcess], tmp_path: Path) -> None:
    shim = start("print(*open('/proc/self/status'), sep='')")
    wait_for_end(shim)
    fields = dict(
        line.split(":\t", 1) for line in (tmp_path / "launcher.log").read_text().splitlines() if ":\t" in line
    )
    assert int(fields["SigBlk"], 16) == 0


def test_a_shim_is_light(start: Callable[..., ShimProcess], tmp_path: Path) -> None:
    shim = start("import time; open('tree.ready', 'w').close(); time.sleep(600)")
    tree_of(shim, tmp_path)
    assert psutil.Process(shim.pid).memory_full_info().pss <= 12 * 2**20


def test_the_exit_status_of_a_strangers_child_is_known() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(5)"])
    pidfd = os.pidfd_open(process.pid)
    try:
        process.wait()
        status = exit_status(pidfd)
        assert status is None or os.waitstatus_to_exitcode(status) == 5
        kernel = tuple(map(int, os.uname().release.split("-")[0].split(".")[:2]))
        assert kernel < (6, 15) or status is not None
    finally:
        os.close(pidfd)
    with Path("/dev/null").open("rb") as no_pidfd:
        assert exit_status(no_pidfd.fileno()) is None


def test_how_a_launcher_ended_is_told_on_a_full_disk(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path / "disk", 1_000_000) as disk:
        invocation = Invocation([sys.executable, "-c", FILLS_THE_DISK], dict(os.environ), str(disk))
        shim = spawn_shim(invocation, run_dir=disk, grace_s=5.0, dies_with_us=True)
        wait_for_end(shim)
        assert shim.exit_code() == 7
        shim.close()
