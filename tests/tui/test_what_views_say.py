"""Each view says in words what an engineer needs to know of a stuck, a starting and a healthy training."""

from __future__ import annotations

import re
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import msgspec
import pytest

from app.diagnosis.diagnoser import Diagnoser
from app.model.cluster import Cluster
from app.tui.actions import VIEW_NAMES
from app.tui.theme import Look
from app.tui.widgets.chart_panel import no_loss_text
from app.tui.widgets.columns import Table, rank_columns
from app.tui.widgets.drawing import fact_lines
from app.view.ranks import rank_text
from app.view.rows import Figure
from app.view.view import View
from ddpcore.wire import Phase
from tests.support.consoles import SimSource, TalkingSource, desk, frozen_source, starting_source, training_source
from tests.support.node_reports import job_status, node_report
from tests.support.screens import screen_strips
from tests.support.sim import SimCluster
from tests.support.sim_node import SimNode
from tests.support.sim_program import Action, Call, EndStep, Training, Work

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.wire.jobs import JobStatus

VERDICT = re.compile(
    r"rank 2 on demo-1 is frozen \(SIGSTOP\) for 6\.\d s; ranks 0-1, 3 wait for it in all_reduce #\d+ for [56]\.\d s; "
    r"last seen at bytegpt\.py:\d+ in \w+"
)
PLACE = r"bytegpt\.py:\d+ in \w+"


@pytest.mark.parametrize("number", range(1, len(VIEW_NAMES) + 1))
async def test_every_view_begins_with_the_verdict_and_what_to_do(number: int) -> None:
    async with desk(frozen_source(), (80, 24)) as console:
        await console.press(str(number))
        top = " ".join(" ".join(console.lines()[1:6]).split())

        assert "CRITICAL" in top
        assert VERDICT.search(top)
        assert "thaw it: kill -CONT 4002 on demo-1" in top


@pytest.mark.parametrize("size", [(80, 24), (120, 35), (200, 50)])
async def test_overview_shows_the_frozen_rank_the_wait_and_the_missing_rank(size: tuple[int, int]) -> None:
    async with desk(frozen_source(), size) as console:
        text = console.text()

        assert re.search(rf"2  demo-1  \S frozen .*{PLACE}", text)
        assert len(re.findall(r"demo-\d  \S waiting", text)) == 3
        assert re.search(r"all_reduce #\d+: ranks 0-1, 3 \S missing rank 2", text)
        assert re.search(r"demo-0\s+\S up\s+0-1\s+2/2", text)


async def test_ranks_shows_all_that_is_known_of_the_culprit() -> None:
    async with desk(frozen_source(), (80, 24)) as console:
        await console.press("2")
        text = console.text()

        assert "RANK 2" in text
        assert re.search(rf"now at\s+{PLACE}", text)
        assert re.search(r"state\s+frozen for \d", text)
        assert "pid 4002 on demo-1, local rank 0" in text
        assert re.search(r"report\s+[67]\.\d s old", text)


async def test_no_phase_is_shown_where_none_of_a_step_is_known() -> None:
    sim = SimCluster(program=lambda _rank: iter([Work(Phase.OTHER, 50, "loop", 99.0, True)]))
    sim.run(20)
    rows = sim.view().ranks()
    assert {(row.phase, row.phase_text) for row in rows} == {("other", "")}
    async with desk(SimSource(sim.view), (200, 50)) as console:
        await console.show("ranks")
        assert "other" not in console.text()
        assert " phase " not in console.text()
    assert "other" not in rank_text(rows[0])


async def test_barriers_shows_who_waits_where_for_whom_and_how_long() -> None:
    async with desk(frozen_source(), (80, 24)) as console:
        await console.press("3")
        text = console.text()

        assert re.search(r"all_reduce #\d+ +job demo", text)
        assert re.search(r"for +[56]\.\ds +\S+ +stall at 10 s", text)
        assert re.search(rf"waiting +ranks 0-1, 3 +at {PLACE}", text)
        assert re.search(rf"missing +rank 2 +at {PLACE}", text)
        assert "SHARE OF THE LAST SECONDS SPENT WAITING" in text


async def test_a_rank_in_another_call_is_named_in_the_wait_and_selected() -> None:
    sim = SimCluster()
    sim.run_to_step(20)
    sim.mismatch(1, Call("broadcast", 18, "main", sizes=((3,),)))
    sim.run(5)
    for size, where in (((80, 24), ""), ((120, 35), " at bytegpt.py:18 in main")):
        async with desk(SimSource(sim.view), size) as console:
            assert f"all_reduce #21: ranks 0, 2-3; rank 1 calls broadcast{where}" in console.text()
            assert "nobody is missing" not in console.text()
            await console.press("3")
            assert re.search(r"waiting +ranks 0, 2-3 +at bytegpt\.py:142", console.text())
            assert re.search(r"differs +rank 1 +calls broadcast at bytegpt\.py:18 in main", console.text())
            assert console.console.shown.selected_rank == 1


KILLED = "rank 2 was killed by SIGKILL"
WAITS = "waiting for the launcher to end the others"


@pytest.mark.parametrize("size", [(80, 24), (120, 35)])
async def test_the_line_of_a_job_has_only_what_the_verdict_has_not(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    status = SimNode.status

    def detailed(node: SimNode, now_s: float) -> JobStatus:
        return msgspec.structs.replace(status(node, now_s), detail=f"{KILLED}; {WAITS}")

    monkeypatch.setattr(SimNode, "status", detailed)
    sim = SimCluster()
    sim.run_to_step(20)
    sim.kill(2)
    sim.run_until(lambda: bool(sim.verdicts()), 5, "the verdict")
    async with desk(SimSource(sim.view), size) as console:
        (line,) = [line for line in console.lines() if line.startswith(" demo ")]
        assert "running" in line
        assert line.rstrip().endswith(WAITS)
        assert KILLED not in line


@pytest.mark.parametrize("size", [(80, 24), (120, 35)])
async def test_the_line_of_a_job_has_room_for_what_the_verdict_is_not_about(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, detail = SimNode.status, "rank 3 on gpu-2 was killed by SIGKILL"
    monkeypatch.setattr(
        SimNode, "status", lambda node, now_s: msgspec.structs.replace(status(node, now_s), detail=detail)
    )
    sim = SimCluster()
    sim.run_to_step(20)
    sim.freeze(2)
    sim.run(5)
    async with desk(SimSource(sim.view), size) as console:
        assert "rank 2 on demo-1 is frozen" in console.text()
        assert re.search(rf"^ demo  .*step \d+\+ .*{detail}$", console.text(), re.MULTILINE)


@pytest.mark.parametrize("size", [(80, 24), (120, 35)])
async def test_a_long_fact_of_a_rank_takes_more_lines(size: tuple[int, int]) -> None:
    sim = SimCluster()
    sim.run_to_step(20)
    sim.kill(2)
    sim.run(4)
    async with desk(SimSource(sim.view), size) as console:
        await console.show("ranks")
        words = " ".join(re.sub(r"step .*|wait share .*", "", line) for line in console.lines())
        assert "exited: killed by SIGKILL; last seen 0.2 s before its end" in " ".join(words.split())


def test_a_long_fact_without_room_is_cut_with_an_ellipsis() -> None:
    sim = SimCluster()
    sim.run_to_step(20)
    sim.kill(2)
    sim.run(4)
    (row,) = sim.view().ranks([2])
    error = msgspec.structs.replace(row, detail="ValueError: corrupt shard /data/shards/00012.bin of rank 2, see there")

    first, *_ = fact_lines(Look(), error, 120)
    assert "".join(segment.text for segment in first.segments)[:60].rstrip().endswith("\N{HORIZONTAL ELLIPSIS}")
    lines = fact_lines(Look(), error, 120, room=9)
    left = ["".join(segment.text for segment in line.segments)[:60].strip() for line in lines]
    assert " ".join(left[:2]) == f"state      {row.state}: {error.detail}"


async def test_a_named_barrier_is_shown_with_its_label() -> None:
    sim = SimCluster()
    sim.run_to_step(30)
    sim.run_until(lambda: any(row.label for row in sim.view().barriers()), 60, "a wait in the named barrier")
    async with desk(SimSource(sim.view)) as console:
        for name in ("overview", "barriers"):
            await console.show(name)

            assert re.search(r'barrier "epoch" #\d', console.text())


async def test_memory_shows_every_rank_beside_the_median_and_the_hosts() -> None:
    async with desk(frozen_source(), (80, 24)) as console:
        await console.show("memory")
        text = console.text()

        assert "918 MiB PSS in 4 ranks; most RSS on rank 3: 312 MiB, 2 % over median 306 MiB" in text
        assert re.search(r"3 +demo-1 +312M +234M +312M +\+2 %", text)
        assert "6.0 GiB / 16 GiB" in text


async def test_a_rank_that_others_wait_for_is_not_taken_for_one_without_a_process() -> None:
    def program(rank: int) -> Iterator[Action]:
        for step, action in enumerate(Training()(rank)):
            if rank == 3 and step == 400:
                yield Work(Phase.DATA, 50, "load", 99.0, True)
            yield action

    sim = SimCluster(program=program)
    sim.run(20)
    async with desk(SimSource(sim.view), (80, 24)) as console:
        await console.show("ranks")
        await console.press("end")
        assert "missing: it runs, and others wait for it" in console.text()


async def test_the_number_of_a_lone_rank_is_not_taken_for_a_count() -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=1)
    sim.run_to_step(20)
    async with desk(SimSource(sim.view), (80, 24)) as console:
        await console.show("overview")
        assert re.search(r"demo-0 +\S+ up +rank 0 +1/1", console.text())


OF_TORCH = (
    "[W1127 06:41:12.504361188 socket.cpp:767] [c10d] The client socket cannot be initialized to connect to [h1]:29500",
    "[rank1]:[W1127 06:41:13.110871043 ProcessGroupGloo.cpp:516] Warning: Unable to resolve hostname to an address.",
    "W1127 06:41:11.123000 4242 site-packages/torch/distributed/run.py:803] Setting OMP_NUM_THREADS to be 1",
    "[Gloo] Rank 1 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3",
)


@pytest.mark.parametrize("size", [(80, 24), (120, 35)])
async def test_the_overview_prefers_the_programs_own_lines_to_those_of_torch(size: tuple[int, int]) -> None:
    source = training_source(12)
    source.drain_logs()
    for text in OF_TORCH * 5:
        source.print("demo-0", 1, text, "stderr")
    async with desk(source, size) as console:
        assert "[Gloo]" in console.text(), "nothing else has been printed"
        source.print("demo-0", 1, "vocabulary: 256 bytes")
        source.print("demo-0", 1, f"[rank1]:[E1127 06:41:13.1 socket.cpp:1] {OF_TORCH[0][-40:]}")
        for text in OF_TORCH * 5:
            source.print("demo-0", 1, text, "stderr")
        await console.frames()
        log = console.text().partition(" LOG")[2]
        assert "vocabulary: 256 bytes" in log
        assert [word in log for word in ("[E1127", "[W1127", "OMP_NUM", "[Gloo]")] == [True, False, False, False]
        await console.show("logs")
        assert "[Gloo] Rank 1" in console.text()


async def test_logs_shows_who_printed_each_line() -> None:
    source = frozen_source()
    source.print("demo-1", 3, "a warning", "stderr")
    source.print("demo-1", -1, "launcher speaks", "stderr")
    async with desk(source, (80, 24)) as console:
        await console.show("logs")
        text = console.text()

        assert "following" in text
        assert re.search(r"demo-0:r0 +step 40 epoch 0 loss", text)
        assert re.search(r"demo-1:r3 +\S a warning", text)
        assert re.search(r"demo-1:launcher +\S launcher speaks", text)


@pytest.mark.parametrize("number", range(1, len(VIEW_NAMES) + 1))
async def test_every_view_of_a_starting_job_says_what_is_waited_for(number: int) -> None:
    async with desk(starting_source(), (80, 24)) as console:
        await console.press(str(number))

        assert "waiting for ranks 0-3 to import torch (0 of 4 ready)" in console.text()


async def test_before_the_job_overview_tells_what_the_session_did() -> None:
    source = SimSource(SimCluster().view)
    source.notice("3 ranks share 2 CPU cores: steps take longer than with a core a rank")
    source.notice("agents demo-0 and demo-1 are up")
    async with desk(source, (80, 24)) as console:
        assert "3 ranks share 2 CPU cores: steps take longer than with a core a rank" in console.text()
        assert "agents demo-0 and demo-1 are up" in console.text()


@pytest.mark.parametrize("height", [15, 24])
@pytest.mark.parametrize("num_lines", [0, 40])
async def test_before_the_job_overview_keeps_the_latest_sentences_and_lines_in_sight(
    height: int, num_lines: int
) -> None:
    source = SimSource(SimCluster().view)
    for number in range(40):
        source.notice(f"sentence {number}.")
    for number in range(num_lines):
        source.print("demo-0", -1, f"line {number}.")
    async with desk(source, (80, height)) as console:
        shown = [int(number) for number in re.findall(r" · sentence (\d+)\.", console.text())]
        assert shown == list(range(shown[0], 40))
        assert f"\n and {shown[0]} earlier\n" in console.text()
        assert len(shown) == height - 9 - 4 * bool(num_lines), "and no row is left over"
        assert ("line 39." in console.text()) is bool(num_lines)


async def test_a_notice_is_shown_whole_or_its_first_clause_or_its_beginning() -> None:
    async with desk(starting_source(), (160, 35)) as console:
        assert console.lines()[-1].endswith("torchrun started on 2 nodes; importing torch takes some seconds")
        await console.resize(120, 35)
        assert console.lines()[-1].endswith("torchrun started on 2 nodes")
        assert " Freeze picture" not in console.lines()[-1]  # it makes room for what is new
        await console.resize(80, 24)
        assert console.lines()[-1].endswith("q Quit         torchrun started on 2 nodes")

        await console.resize(160, 35)
        await console.frames(200)
        assert console.lines()[-1].endswith("Quit")


async def test_a_notice_about_a_host_is_never_only_its_name() -> None:
    source = starting_source()
    source.notice("h2: reachable: the connection broke while /usr/bin/python3 ran there")
    for width in (60, 80, 100, 120):
        async with desk(source, (width, 24)) as console:
            shown = re.split(r"  +", console.lines()[-1].rstrip())[-1]
            assert shown.startswith("h2: reachable: the") or shown == "q Quit", width
            assert shown.endswith(("…", "there", "Quit")), width
            source.notice("h2: reachable: the connection broke while /usr/bin/python3 ran there")


@pytest.mark.parametrize("size", [(80, 24), (120, 35), (200, 50)])
async def test_the_command_that_shows_another_job_is_whole(size: tuple[int, int]) -> None:
    cluster, diagnoser = Cluster(["localhost"]), Diagnoser()
    cluster.apply("localhost", node_report(1, [job_status(job_id=name) for name in ("third", "fourth")], []), 1000.0)
    view = View(cluster, diagnoser.observe(cluster, 1000.0), 1000.0, "third")
    async with desk(SimSource(lambda: view), size) as console:
        assert "rankdeck attach fourth" in console.text()
        assert ("job fourth, starting" in console.text()) == (size[0] > 80)


async def test_a_killed_rank_is_exited_and_its_victims_are_not_blamed() -> None:
    source = TalkingSource(SimCluster())
    source.sim.run_to_step(20)
    source.sim.kill(2)
    source.run(6)
    async with desk(source) as console:
        for name in VIEW_NAMES:
            await console.show(name)
            assert "rank 2 on demo-1 was killed by SIGKILL" in " ".join(console.text().split())
        await console.press("1")
        assert len(re.findall(r"\S exited", console.text())) >= 1


@pytest.mark.parametrize("node", ["localhost", "gpu-node-0012"])
async def test_at_80_columns_the_loss_keeps_its_column_beside_longer_names_of_nodes(node: str) -> None:
    columns = rank_columns(cast("View", SimpleNamespace(num_ranks=4, node_names=[node], verdicts=list)))
    assert Table(Look(), columns, 80).titles == ["RANK", "NODE", "STATE", "STEP", "LOSS", "WAITING", "WHERE"]


async def test_the_details_explain_a_step_that_is_the_least_one() -> None:
    source = training_source(12)
    source.sim.kill(2)
    source.run(12)
    async with desk(source, (80, 24)) as console:
        await console.show("ranks")
        assert re.search(r"2  demo-1  \S exited +\d+\+ ", console.text())
        assert re.search(r"step +at least \d+  .*  last known", console.text())
        assert re.search(rf"last at +{PLACE}", console.text())


async def test_thawing_clears_the_verdict_on_every_view() -> None:
    source = frozen_source()
    async with desk(source) as console:
        source.sim.thaw(2)
        source.run(3)
        await console.frames()
        for name in VIEW_NAMES:
            await console.show(name)

            assert "4 ranks training, step" in console.text()
            if name == "events":
                assert "over       rank 2: no longer frozen" in console.text()
            else:
                assert "frozen" not in console.text(), name


def without_loss(_rank: int) -> Iterator[Action]:
    """A program that reports no loss."""
    for step in count(1):
        yield Work(Phase.FORWARD, 138, "train_step", 0.1)
        yield Call("all_reduce", 142, "train_step", sizes=((1000,),))
        yield EndStep(step, None, 0)


@pytest.mark.parametrize("reads_loss", [False, True])
async def test_how_to_read_the_loss_is_said_where_nothing_reads_it(reads_loss: bool) -> None:
    source = TalkingSource(SimCluster(program=without_loss))
    source.run(6)
    source.reads_loss = reads_loss
    async with desk(source, (120, 35)) as console:
        for view in ("overview", "charts"):
            await console.show(view)
            assert ("no loss yet: no line has matched --metric" in console.text()) == reads_loss
            assert ("no loss yet: --metric 'loss ([0-9.]+)' reads it" in console.text()) != reads_loss
        await console.resize(80, 24)
        assert ("--metric 'loss ([0-9.]+)' reads it" in console.text()) != reads_loss
        source.sim.stop()
        await console.play(source, 3)
        assert no_loss_text(console.console.ui).startswith("no loss: ")


async def test_in_place_of_a_loss_stands_where_other_figures_are() -> None:
    sim = SimCluster(program=without_loss)
    source = TalkingSource(sim)
    source.run(6)
    async with desk(source, (120, 35)) as console:
        history = console.console.ui.history.shown
        assert history is not None
        history.figures = [*history.figures, Figure("metric mse", 1.0)]
        assert no_loss_text(console.console.ui) == "no loss; mse: in Charts"


async def test_the_loss_is_drawn_once_steps_come() -> None:
    source = TalkingSource(SimCluster())
    async with desk(source) as console:
        assert "LOSS" not in console.text()
        await console.play(source, 15)
        text = console.text()

        assert re.search(r"LOSS  [2-4]\.\d\d at step \d+; first [45]\.\d\d at step \d", text)
        assert re.search("[\u2801-\u28ff]{2}", text)


async def test_the_node_of_the_culprit_is_shown_even_where_most_nodes_are_not() -> None:
    source = TalkingSource(SimCluster(num_nodes=12))
    source.run(20)
    source.sim.freeze(19)
    source.run(8)
    async with desk(source, (80, 24)) as console:
        assert re.search(r"^ demo-9\s+\S up", console.text(), re.MULTILINE)
        assert "more nodes" in console.text()


async def test_of_ranks_that_are_gone_the_overview_tells_how_each_ended() -> None:
    source = training_source(20)
    source.sim.kill(2)
    source.run(8)
    async with desk(source, (120, 35)) as console:
        assert re.search(r" 2  demo-1  \S exited .*  killed by SIGKILL\b", console.text())
        exited = {
            strip.text.split()[0]: segment.style
            for strip in screen_strips(console.console)
            for segment in strip
            if segment.text.strip().endswith(" exited")
        }
        palette = console.console.look.palette
        assert exited.pop("2") == palette.critical
        assert set(exited.values()) == {palette.muted}


async def test_what_a_job_is_about_to_do_is_no_news_once_it_has_ended() -> None:
    source = training_source(12)
    async with desk(source, (120, 35)) as console:
        source.notice("job demo is stopping by SIGTERM")
        await console.frames()
        assert "is stopping by SIGTERM" in console.lines()[-1]
        source.sim.stop()
        source.run(6)
        await console.frames()
        assert "stopped" in console.lines()[1]
        assert "SIGTERM" not in console.lines()[-1]
        source.notice("evidence of this is kept")
        await console.frames()
        assert "evidence of this is kept" in console.lines()[-1]
        source.notice("restart 1 of job demo: begun on demo-0")
        await console.frames()
        source.sim.next_attempt()
        source.run(3)
        await console.frames()
        assert "begun on demo-0" in console.lines()[-1]
        source.sim.stop()
        source.run(6)
        await console.frames()
        assert "stopped" in console.lines()[1]
        assert "begun on demo-0" not in console.lines()[-1]


async def test_no_pattern_is_asked_for_while_the_job_may_report_its_loss_itself() -> None:
    async with desk(starting_source(), (120, 35)) as console:
        assert "no loss yet" in console.text()
        assert "--metric" not in console.text()
