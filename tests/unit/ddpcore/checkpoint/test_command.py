"""`python -m ddpcore.checkpoint`: what it prints, what it writes, how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open

from ddpcore.checkpoint.cli import cli
from ddpcore.checkpoint.state_tree import unflatten
from tests.support.checkpoint_copies import write_checkpoint
from tests.support.training_states import is_same

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result

STATE: dict[str, Any] = {"model": {"weight": torch.arange(20_000.0).reshape(100, 200)}, "step": 5, "best": float("inf")}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "checkpoints"
    root.mkdir()
    for step in (5, 10):
        write_checkpoint(root, {**STATE, "step": step}, 2, step=step, per_rank={"rng": torch.zeros(3)})
    return root


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, [str(arg) for arg in args])


def damage(root: Path, name: str) -> None:
    path = root / name / "rank-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def test_ls_lists_the_newest_first_and_what_is_unfinished(root: Path) -> None:
    (root / ".tmp-step_00000011-run.3").mkdir()
    (root / "step_00000010" / "rank-00001.safetensors").unlink()

    result = run("ls", root)

    assert result.exit_code == 0
    first, second, third = result.stdout.splitlines()
    assert first == "step_00000010          DAMAGED: it has no rank-00001.safetensors: No such file or directory"
    assert second.startswith("step_00000005          step 5            80.5 KB  2 ranks   20")
    assert third == ".tmp-step_00000011-run.3  being written, or left by a dead run"


def test_ls_prints_json(root: Path) -> None:
    printed = json.loads(run("ls", "--json", root).stdout)

    assert printed["schema"] == 1
    assert [(row["name"], row["step"], row["problem"], row["world_size"]) for row in printed["checkpoints"]] == [
        ("step_00000010", 10, "", 2),
        ("step_00000005", 5, "", 2),
    ]


def test_verify_looks_at_every_byte(root: Path) -> None:
    well = run("verify", root)
    assert (well.exit_code, well.stdout) == (
        0,
        "step_00000010: sound, 2 files, 80.5 KB\nstep_00000005: sound, 2 files, 80.5 KB\n",
    )

    damage(root, "step_00000005")
    ill = run("verify", root)
    assert ill.exit_code == 1
    assert "step_00000005: DAMAGED: rank-00001.safetensors: its checksum differs: bytes have changed" in ill.stdout
    assert ill.stderr == "Error: 1 of 2 damaged: delete them, or restore them from a copy\n"
    assert run("verify", root / "step_00000010").exit_code == 0
    assert run("verify", root / "step_00000005").exit_code == 1


def test_consolidate_writes_one_safetensors_file_with_everything_in_it(root: Path, tmp_path: Path) -> None:
    result = run("consolidate", root, tmp_path / "all.safetensors")

    assert (result.exit_code, result.stdout.split(":")[1]) == (0, " step 10, 80.3 KB\n")
    with safe_open(tmp_path / "all.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        skeleton = json.loads(file.metadata()["state"])
    assert list(tensors) == ["model.weight"]
    assert is_same(unflatten(skeleton, tensors), {**STATE, "step": 10})


def test_consolidate_writes_a_file_that_torch_loads_without_trust(root: Path, tmp_path: Path) -> None:
    result = run("consolidate", root, tmp_path / "all.pt", "--step", 5)

    assert result.exit_code == 0
    assert is_same(torch.load(tmp_path / "all.pt", weights_only=True), STATE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.pt", "checkpoints"]


def test_without_safetensors_the_other_format_is_named(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)

    result = run("consolidate", root, tmp_path / "all.safetensors")

    assert result.stderr == "Error: safetensors is not installed: pip install safetensors, or write OUTPUT.pt\n"
    assert result.exit_code == 2


def test_consolidate_passes_over_what_is_damaged_and_says_so(root: Path, tmp_path: Path) -> None:
    damage(root, "step_00000010")

    result = run("consolidate", root, tmp_path / "all.pt")

    assert result.exit_code == 0
    assert result.stderr.startswith("passed over step_00000010: rank-00001.safetensors: its checksum differs")
    assert "step 5, " in result.stdout
    failed = run("consolidate", root, tmp_path / "other.pt", "--step", 10)
    assert failed.exit_code == 1
    assert failed.stderr.startswith(f"Error: no checkpoint of step 10 in {root} can be used: step_00000010: ")
    assert not (tmp_path / "other.pt").exists()


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["ls", "{tmp}/nowhere"], 2, "Error: {tmp}/nowhere is no directory\n"),
        (["verify", "{tmp}/nowhere"], 2, "Error: {tmp}/nowhere is no directory\n"),
        (["verify", "{tmp}"], 1, "Error: no checkpoint in {tmp}\n"),
        (["consolidate", "{tmp}", "{tmp}/x.pt"], 1, "Error: no checkpoint in {tmp} can be used\n"),
        (
            ["consolidate", "{root}", "{tmp}/x.npz"],
            2,
            "Error: x.npz: choose what to write by the suffix, one of .safetensors, .pt, .pth, .bin\n",
        ),
        (
            ["consolidate", "{root}", "{tmp}/there.pt"],
            2,
            "Error: {tmp}/there.pt exists: give another name, or --force\n",
        ),
        (["consolidate", "{root}", "{tmp}/no/x.pt"], 2, "Error: {tmp}/no is no directory\n"),
    ],
)
def test_bad_input_is_one_clear_line(root: Path, tmp_path: Path, args: list[str], code: int, message: str) -> None:
    (tmp_path / "there.pt").touch()

    result = run(*(arg.format(tmp=tmp_path, root=root) for arg in args))

    assert (result.exit_code, result.stderr) == (code, message.format(tmp=tmp_path))


def test_an_empty_directory_has_nothing_to_list(tmp_path: Path) -> None:
    result = run("ls", tmp_path)

    assert (result.exit_code, result.stdout, result.stderr) == (0, "", f"no checkpoint in {tmp_path}\n")


def test_ls_and_verify_start_without_torch(root: Path) -> None:
    program = (
        "import sys; from ddpcore.checkpoint.cli import cli; cli(sys.argv[1:], standalone_mode=False); "
        "sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    )
    for verb in ("ls", "verify"):
        subprocess.run(
            [sys.executable, "-P", "-c", program, verb, str(root)], check=True, timeout=60, capture_output=True
        )


def test_it_is_a_command(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "ddpcore.checkpoint", "verify", str(root)],
        check=False,
        timeout=60,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0
    assert done.stdout.startswith("step_00000010: sound")
