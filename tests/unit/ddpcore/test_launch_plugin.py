"""The directory that goes onto a job's PYTHONPATH."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING

import pytest
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

from ddpcore import wire, wire_launch

if TYPE_CHECKING:
    from types import ModuleType


@pytest.fixture
def logs_specs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(wire_launch.LAUNCH_PLUGIN_DIR))
    return importlib.import_module("rankdeck_logs_specs")


@pytest.fixture
def log_dir(tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(wire.ENV_LOG_DIR, str(tmp_path))
    monkeypatch.setenv(wire.ENV_ATTEMPT, "2")
    monkeypatch.delenv(wire.ENV_STORE_FD, raising=False)
    return str(tmp_path)


def test_its_entry_points_are_found_through_pythonpath_and_load_without_torch() -> None:
    program = (
        "import sys\n"
        "from importlib.metadata import entry_points\n"
        "entry_points(group='torch.backends')['rankdeck'].load()()\n"
        "assert 'torch' not in sys.modules and 'ddpcore' not in sys.modules\n"
        f"print(entry_points(group='torchrun.logs_specs')['{wire.LOGS_SPECS_NAME}'].load().__name__)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(wire_launch.LAUNCH_PLUGIN_DIR)}

    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False
    )

    assert done.stdout == "RankLogsSpecs\n", done.stderr


def test_it_spells_the_variables_as_the_wire_does(logs_specs: ModuleType) -> None:
    names = ("ENV_LOG_DIR", "ENV_LAUNCHER_PID", "ENV_LAUNCHER_NAMESPACE", "ENV_STORE_FD")

    assert [getattr(logs_specs, name) for name in names] == [getattr(wire, name) for name in names]


def test_the_plug_in_has_no_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(wire_launch.LAUNCH_PLUGIN_DIR))
    plugin = importlib.import_module("rankdeck_plugin")

    assert plugin.RankLogsSpecs.__name__ == "RankLogsSpecs"
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = plugin.other


def test_log_files_are_named_by_global_rank_and_workers_know_their_launcher(
    logs_specs: ModuleType, log_dir: str
) -> None:
    envs = {rank: {"RANK": str(4 + rank), "TORCHELASTIC_RESTART_COUNT": "0"} for rank in range(2)}
    specs = logs_specs.RankLogsSpecs()

    files = specs.reify(envs)

    assert specs.root_log_dir == log_dir
    assert files.stdouts == {0: f"{log_dir}/rank-4.stdout.log", 1: f"{log_dir}/rank-5.stdout.log"}
    assert files.stderrs == {0: f"{log_dir}/rank-4.stderr.log", 1: f"{log_dir}/rank-5.stderr.log"}
    assert envs[1]["TORCHELASTIC_ERROR_FILE"] == files.error_files[1] == f"{log_dir}/rank-5.error.json"
    assert envs[0][wire.ENV_LAUNCHER_PID] == str(os.getpid())
    assert envs[0][wire.ENV_LAUNCHER_NAMESPACE].startswith("pid:[")
    assert envs[1]["TORCHELASTIC_RESTART_COUNT"] == "2", "each attempt is a new torchrun, which counts from 0"


def test_without_a_log_directory_it_ends_the_launcher_with_one_line(
    logs_specs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(wire.ENV_LOG_DIR, raising=False)

    with pytest.raises(SystemExit, match=r"^rankdeck: RANKDECK_LOG_DIR is not set"):
        logs_specs.RankLogsSpecs()


@pytest.mark.usefixtures("log_dir")
def test_the_store_takes_over_the_agent_s_socket(logs_specs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    store = object()
    monkeypatch.setattr(static_tcp_rendezvous, "TCPStore", lambda **options: (store, options))
    monkeypatch.setenv(wire.ENV_STORE_FD, "9")

    logs_specs.RankLogsSpecs()

    made = vars(static_tcp_rendezvous)["TCPStore"]
    assert isinstance(made, partial)
    assert made() == (store, {"master_listen_fd": 9})


@pytest.mark.usefixtures("log_dir")
def test_a_torch_that_keeps_its_store_elsewhere_is_refused_with_one_line(
    logs_specs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(static_tcp_rendezvous, "TCPStore")
    monkeypatch.setenv(wire.ENV_STORE_FD, "9")

    with pytest.raises(SystemExit, match=r"^rankdeck: this torch keeps the store .* elsewhere"):
        logs_specs.RankLogsSpecs()
