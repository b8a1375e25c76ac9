"""Every threshold that can be set changes what is said."""

from __future__ import annotations

import io
import json
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from app.cli.evidence import replay
from app.cli.options import session_options
from app.diagnosis.rank_facts import Thresholds
from app.recording.bundle import Evidence, encode_bundle
from app.recording.records import encode_recording
from app.session.demo import Demo, DemoOptions
from app.settings.loading import load
from app.settings.schema import TABLE
from app.tui.actions import ACTIONS
from tests.support.recordings import recording_of
from tests.support.sim import SimCluster
from tests.support.sim_program import Training

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def stalled() -> SimCluster:
    """Return a training in which the others have waited for rank 1 for five seconds."""
    sim = SimCluster(noise=0.0, program=Training(slow_input=((1, 1000.0),)))
    sim.run(10)
    sim.run_until(lambda: any(row.waited_s >= 5.0 for row in sim.view().barriers()), 60, "a wait of five seconds")
    return sim


def silent() -> SimCluster:
    sim = SimCluster()
    sim.run_to_step(20)
    sim.hold_gil(2)
    sim.run(5)
    return sim


def without_a_node() -> SimCluster:
    sim = SimCluster()
    sim.run_to_step(20)
    sim.lose_node(1)
    sim.run(8)
    return sim


def joining() -> SimCluster:
    sim = SimCluster()
    sim.come_late(2, 60.0)
    sim.run(25)
    return sim


def saving() -> SimCluster:
    """Return a training that has been waiting for its first checkpoint for forty seconds."""
    sim = SimCluster(program=Training(epoch_steps=20, checkpoint_s=1000.0))
    sim.run_to_step(20)
    sim.run(40)
    return sim


CASES = {
    "thresholds.stall_s": (stalled, "3", "straggler"),
    "thresholds.silent_s": (silent, "5.5", "silent"),
    "thresholds.lost_s": (without_a_node, "20", "node_lost"),
    "thresholds.join_s": (joining, "10", "not_joined"),
    "thresholds.patience_s": (saving, "20", "checkpointing"),
}


def told(path: Path, *arguments: str) -> list[tuple[str, str]]:
    """Return (cause, severity) of the verdicts that stand at the end of a recording."""
    printed = CliRunner().invoke(replay, [str(path), "--json", *arguments], catch_exceptions=False)
    summary: dict[str, Any] = json.loads(printed.stdout)
    return [(verdict["cause"], verdict["severity"]) for verdict in summary["verdicts"]]


def test_every_threshold_has_its_case() -> None:
    assert list(CASES) == [setting.name for setting in TABLE if setting.name.startswith("thresholds.")]


@pytest.mark.parametrize(("name", "case"), CASES.items())
def test_a_threshold_changes_what_is_said(
    name: str, case: tuple[Callable[[], SimCluster], str, str], tmp_path: Path
) -> None:
    make, value, cause = case
    recording = recording_of(make())
    path = tmp_path / "it"
    path.write_bytes(encode_recording(recording.opening, recording.records))

    usual = told(path)
    others = told(path, "--set", f"{name}={value}")

    assert usual != others
    assert {cause} == {one for one, _ in (*usual, *others)}


async def test_a_live_session_judges_by_the_thresholds_that_were_chosen() -> None:
    chosen = load(ACTIONS, ["thresholds.stall_s=33"], has_files=False, environ={}).settings()
    how = {"recording": None, "is_read_only": False, "settings": chosen}
    options = session_options(evidence_dir=None, keeps_none=True, **how)

    demo = Demo(DemoOptions(num_ranks=1, session=options))
    try:
        assert demo.stall_s == 33.0
    finally:
        await demo.close()


def test_evidence_tells_what_was_said_by_the_thresholds_of_its_session() -> None:
    def about(thresholds: Thresholds) -> str:
        recording = recording_of(stalled())
        kept = Evidence(recording.opening, recording.records, {}, [], {}, thresholds)
        with zipfile.ZipFile(io.BytesIO(encode_bundle(kept))) as bundle:
            return next(bundle.read(name).decode() for name in bundle.namelist() if name.endswith("about.txt"))

    assert "Messages, as it began" not in about(Thresholds())
    assert "rank 1" in about(Thresholds(stall_s=3.0)).partition("Messages, as it began")[2]
