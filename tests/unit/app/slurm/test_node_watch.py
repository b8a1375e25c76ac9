"""What a console shows of a job's nodes that Slurm drains or has lost; `tests.e2e.test_slurm` drains a real one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from app.slurm import node_watch
from app.slurm.client import SlurmNode, slurm_job_nodes
from app.slurm.node_watch import NodeWatch, node_news
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ME = f"root|{os.getuid()}"
WELL = SlurmNode("mixed", "")
DRAINED = "Slurm drains h2 (bad disk): no new job starts there, this one keeps running"


@pytest.mark.parametrize("state", ["allocated", "mixed", "idle", "completing", "powering_down", "mixed@", "planned-"])
def test_a_node_in_service_is_no_news(state: str) -> None:
    assert node_news({}, {"h1": SlurmNode(state, "")}) == []


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("draining", "Slurm drains h1 (why): no new job starts there, this one keeps running"),
        ("drained*", "Slurm drains h1 (why): no new job starts there, this one keeps running"),
        ("down", "Slurm reports h1 as down (why)"),
        ("down*", "Slurm reports h1 as down (why)"),
        ("failing", "Slurm expects h1 to fail (why): no new job starts there"),
        ("mixed*", "h1 does not answer Slurm (why)"),
    ],
)
def test_trouble_of_a_node_is_one_sentence_at_its_beginning_and_one_at_its_end(state: str, text: str) -> None:
    well, troubled = {"h1": WELL}, {"h1": SlurmNode(state, "why")}

    assert node_news({}, troubled) == [text], "a console that comes later learns of it too"
    assert node_news(well, troubled) == [text]
    assert node_news(troubled, troubled) == []
    assert node_news(troubled, well) == ["Slurm reports h1 in service again"]
    assert node_news(troubled, {}) == [], "the job is on no node any more"


def test_nodes_with_the_same_trouble_share_a_sentence_and_a_new_reason_is_news() -> None:
    now = {"h1": SlurmNode("drained", "bad disk"), "h2": SlurmNode("draining", "bad disk"), "h3": WELL}

    assert node_news({}, now) == ["Slurm drains h1 and h2 (bad disk): no new job starts there, this one keeps running"]
    later = now | {"h2": SlurmNode("draining", "worse")}
    assert node_news(now, later) == ["Slurm drains h2 (worse): no new job starts there, this one keeps running"]


def test_no_text_of_slurm_is_an_escape() -> None:
    (sentence,) = node_news({}, {"h\x1b[2J1": SlurmNode("down", "see \x1b]0;x\x07\nhere")})

    assert sentence.isprintable()


def test_nodes_of_a_job_are_those_that_sinfo_shows(answer: Callable[..., None]) -> None:
    answer(f"RUNNING|None|{ME}|h[1-2]|7|7\n")
    answer("h1|mixed|none\nh2|draining|bad | disk\nh2|draining|bad | disk\nnonsense\n", "sinfo")
    assert slurm_job_nodes("7") == {"h1": SlurmNode("mixed", ""), "h2": SlurmNode("draining", "bad | disk")}

    answer(f"PENDING|BeginTime|{ME}||7|7\n")
    assert slurm_job_nodes("7") == {}


def test_a_watch_reports_each_change_once_and_a_controller_that_is_away_changes_nothing(
    answer: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(node_watch, "LOOK_S", 0.1)
    answer(f"RUNNING|None|{ME}|h[1-2]|7|7\n")
    answer("h1|mixed|none\nh2|draining|bad disk\n", "sinfo")
    watch, heard = NodeWatch("7"), list[str]()

    def has_heard(*sentences: str) -> bool:
        heard.extend(watch.news())
        return heard == [*sentences]

    until(lambda: has_heard(DRAINED), 10.0, "it is reported")
    answer("Unable to contact slurm controller\n", "sinfo", 1)
    until(lambda: has_heard(DRAINED) and (tmp_path / "sinfo.calls").stat().st_size >= 2, 10.0, "two looks fail")
    answer("h1|mixed|none\nh2|mixed|none\n", "sinfo")
    until(lambda: has_heard(DRAINED, "Slurm reports h2 in service again"), 10.0, "its end is reported")
