"""`rankdeck demo` as a script meets it: real agents, real torchrun, real gloo ranks."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.support.demo_runs import RUN_S, DemoHouse
from tests.support.file_contents import contents
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

START_S = 150.0
"""Two torchruns and four ranks on a machine with other work."""
END_S = 60.0
"""Of what takes a second or two."""

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]


@pytest.fixture
def house() -> Iterator[DemoHouse]:
    with DemoHouse() as house:
        yield house


@pytest.mark.slow
def test_a_clean_run_ends_well_with_a_falling_loss_and_no_verdict(house: DemoHouse) -> None:
    done = house.run("--json", "--steps", "120")

    assert done.code == 0, f"{done.stderr}{done.stdout}"
    summary = done.summary
    assert summary["schema"] == 1
    assert summary["job"]["exit_code"] == 0
    assert summary["job"]["state"] == "succeeded"
    assert summary["steps"] == 120
    assert summary["loss_first"] > 5.0
    assert summary["loss_last"] < 3.2
    assert summary["verdicts"] == []
    assert summary["barriers"] == []
    assert [row["rank"] for row in summary["ranks"]] == [0, 1, 2, 3]
    assert {row["node"] for row in summary["ranks"]} == {"demo-0", "demo-1"}
    house.assert_nothing_is_left()


@pytest.mark.fault(row=5)
def test_a_frozen_rank_is_named_with_its_node_its_victims_and_its_line(house: DemoHouse) -> None:
    done = house.run("--json", "--ranks", "2", "--fault", "freeze:1@10")

    assert done.code == 10, f"{done.stderr}{done.stdout}"
    (verdict,) = done.summary["verdicts"]
    assert verdict["cause"] == "frozen"
    assert verdict["culprits"] == [1]
    assert verdict["node"] == "demo-1"
    assert verdict["where"].startswith("bytegpt.py:")
    assert "your own program under this console: rankdeck run train.py" in done.stderr
    house.assert_nothing_is_left()


@pytest.mark.slow
def test_evidence_of_a_frozen_rank_is_kept_where_it_is_wanted_and_shows_it_again(house: DemoHouse) -> None:
    place = house.home / "evidence"

    done = house.run("--json", "--fault", "freeze:2@10", "--evidence", str(place))

    (bundle,) = place.glob("demo-*.zip")
    assert f"rankdeck replay {bundle}" in done.stderr
    with zipfile.ZipFile(bundle) as files:
        names = {name.partition("/")[2] for name in files.namelist()}
        stacks = files.read(next(name for name in files.namelist() if name.endswith("stacks.txt"))).decode()
    assert {"about.txt", "logs/demo-0.log", "jobs/demo-1.json", "recording.rankdeck"} <= names
    assert "rank 2 (1 rank): frozen" in stacks
    assert "flight recorder of rank 0" in stacks
    again = subprocess.run(
        [sys.executable, "-P", "-m", "app", "replay", str(bundle), "--json"],
        env=house.environment,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert again.returncode == 10, again.stderr
    assert "rank 2 on demo-1 is frozen" in again.stderr
    shown = json.loads(again.stdout)
    assert shown["verdicts"][0]["culprits"] == done.summary["verdicts"][0]["culprits"] == [2]
    assert [row["step"] for row in shown["ranks"]] == [row["step"] for row in done.summary["ranks"]]
    shutil.rmtree(place)
    house.assert_nothing_is_left()


@pytest.mark.fault(row=4)
@pytest.mark.slow
def test_a_killed_rank_is_named_as_exited_with_its_signal_and_its_victims_are_not(house: DemoHouse) -> None:
    done = house.run("--json", "--fault", "kill:1@10")

    assert done.code == 10, f"{done.stderr}{done.stdout}"
    (verdict,) = done.summary["verdicts"]
    assert verdict["cause"] == "exited"
    assert verdict["culprits"] == [1]
    assert "SIGKILL" in verdict["text"]
    house.assert_nothing_is_left()


@pytest.mark.slow
def test_a_slowed_rank_is_named_as_the_straggler(house: DemoHouse) -> None:
    done = house.run("--json", "--fault", "slow:3@20", "--steps", "2000")

    assert done.code == 10, f"{done.stderr}{done.stdout}"
    assert [(v["cause"], v["culprits"]) for v in done.summary["verdicts"]] == [("straggler", [3])]
    house.assert_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "cause", "words"),
    [
        ("gil", "silent", "has not reported for "),
        ("mismatch", "mismatch", "rank 2 calls barrier #"),
        ("oom", "oom", "DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_a_rank_s_own_fault_is_named_with_what_it_does(house: DemoHouse, kind: str, cause: str, words: str) -> None:
    done = house.run("--json", "--fault", f"{kind}:2@20")

    assert done.code == 10, f"{done.stderr}{done.stdout}"
    told = [verdict["text"] for verdict in done.summary["verdicts"] if verdict["cause"] == cause]
    assert len(told) == 1, done.summary["verdicts"]
    assert words in told[0]
    assert [verdict["culprits"] for verdict in done.summary["verdicts"]] == [[2]]
    house.assert_nothing_is_left()


@pytest.mark.slow
def test_a_fault_that_is_not_named_before_the_job_ends_is_exit_code_1(house: DemoHouse) -> None:
    done = house.run("--json", "--fault", "slow:3@31", "--steps", "31")  # no step is left to be slow

    assert done.code == 1, f"{done.stderr}{done.stdout}"
    assert done.summary["verdicts"] == []
    assert done.summary["job"]["exit_code"] == 0
    house.assert_nothing_is_left()


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        signal.SIGTERM,
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_everything_and_is_exit_code_130(house: DemoHouse, number: signal.Signals) -> None:
    demo = house.start("--headless", "--steps", "100000")
    until(lambda: len(house.ranks()) == 4, START_S, "four ranks")

    demo.send_signal(number)

    assert demo.wait(END_S) == 130
    house.assert_nothing_is_left()


@pytest.mark.slow
def test_a_console_killed_outright_leaves_nothing_after_ten_seconds(house: DemoHouse) -> None:
    demo = house.start("--headless", "--steps", "100000")
    until(lambda: len(house.ranks()) == 4, START_S, "four ranks")

    demo.kill()

    demo.wait(END_S)
    house.assert_nothing_is_left(within_s=10.0)


@pytest.mark.slow
def test_nothing_listens_beyond_this_machine(house: DemoHouse) -> None:
    demo = house.start("--headless", "--steps", "100000")
    until(lambda: len(house.ranks()) == 4, START_S, "four ranks")

    def listening() -> set[str]:
        found = set()
        for process in house.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                connections = process.net_connections(kind="inet")
                found |= {one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN}
        return found

    def printed() -> bytes:
        return b"".join(text for path, text in contents(house.runtime).items() if path.name == "rank-0.stdout.log")

    until(lambda: len(listening()) > 0, START_S, "the store listens")
    until(lambda: b"step" in printed(), START_S, "training")
    assert all(ip.startswith("127.") or ip == "::1" for ip in listening()), listening()

    demo.send_signal(signal.SIGTERM)
    demo.wait(END_S)
    house.assert_nothing_is_left()


@pytest.mark.slow
def test_a_single_rank_trains_on_one_node_without_a_home(house: DemoHouse) -> None:
    process = house.start(
        "--json", "--ranks", "1", "--steps", "20", environment={**house.environment, "HOME": "/nowhere"}
    )

    stdout, stderr = process.communicate(timeout=RUN_S)

    assert process.returncode == 0, stderr
    assert [row["rank"] for row in json.loads(stdout)["ranks"]] == [0]
    house.assert_nothing_is_left()
