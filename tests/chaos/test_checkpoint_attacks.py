"""Checkpoints under attack: flipped bits anywhere, and names, markers and directories that are not what they were.

Whatever is done to three checkpoints, `load_latest`, `load_checkpoint` and the engine return the newest that is
untouched, bit for bit, and name each that they have passed over with its file; or they refuse, and name all of them.

RANKDECK_ATTACKS says how many of each kind (flips, attacks), RANKDECK_SEED which: printed, and part of every failure.
With `-m chaos` there are at least a thousand of each.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import socket
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpcore
from ddpcore.checkpoint import Checkpointer
from ddpcore.checkpoint.directory import step_of
from ddpcore.checkpoint.tensor_files import read_checkpoint
from ddpcore.errors import CheckpointInvalidError
from tests.support.checkpoint_copies import commit, write_checkpoint
from tests.support.training_states import is_same

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NUM_ATTACKS = int(os.environ.get("RANKDECK_ATTACKS", "150"))
NUM_MANY = max(1000, NUM_ATTACKS)
SEED = int(os.environ.get("RANKDECK_SEED") or secrets.randbelow(10**6))

STEPS = (10, 20, 30)
NUM_RANKS = 2
ENGINE_EVERY = 10
"""One attack in so many is loaded by a whole engine too, which takes longer."""

FILES = ("COMMITTED", "manifest.json", "rank-00000.safetensors", "rank-00001.safetensors")
OTHER_NAMES = (
    "step_00000010",
    "step_00000020",
    "step_00000030",
    "step_00000030.2",
    "step_00000030.1",
    "step_00000020.7",
    "step_00000040",
    "step_0000000030",
    "step_30",
    "step_00000030.bak",
    "step_00000030 (copy)",
    "step_9223372036854775807",
    "backup",
    ".tmp-step_00000030-mine",
    ".del-step_00000030",
)


class Family(NamedTuple):
    """Untouched checkpoints of one version, whose markers have a checksum or not.

    Attributes:
        root: Their directory.
        is_old: Written as earlier versions did.
        states: By step.
    """

    root: Path
    is_old: bool
    states: dict[int, Any]

    def contents(self, name: str) -> dict[str, bytes]:
        return {file: (self.root / name / file).read_bytes() for file in FILES}

    def is_sound(self, path: Path) -> bool:
        """Say whether this is an untouched checkpoint, under a name that may be its own."""
        for step in STEPS:
            own = f"step_{step:08d}"
            may_be = step_of(path.name) == step if self.is_old else path.name == own
            if may_be and all(read(path / file) == content for file, content in self.contents(own).items()):
                return True
        return False

    def newest(self, root: Path) -> int | None:
        """Return the step of what has to be loaded."""
        steps = [step_of(path.name) for path in root.iterdir() if path.name.startswith("step_") and self.is_sound(path)]
        return max((step for step in steps if step is not None), default=None)


def read(path: Path) -> bytes | None:
    """Return a regular file's content."""
    return path.read_bytes() if path.is_file() else None


def new_model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 1))


def train(root: Path) -> None:
    """Leave checkpoints 10, 20 and 30 of a training."""
    data = TensorDataset(torch.randn(40, 5), torch.randn(40, 1))
    with ddpcore.Engine(seed=1) as engine:
        model = engine.wrap(new_model())
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        batches = engine.loader(data, global_batch_size=4)
        engine.checkpoint(root, every="10 steps", model=model, optimizer=optimizer)
        for batch in engine.steps(batches, until="30 steps"):
            for inputs, targets in batch.micro_batches():
                engine.backward((model(inputs) - targets).square().mean())
            engine.update(optimizer)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> list[Family]:
    trained = tmp_path_factory.mktemp("trained")
    train(trained)
    states = {step: read_checkpoint(trained / f"step_{step:08d}").state for step in STEPS}
    made = []
    for is_old in (False, True):
        root = tmp_path_factory.mktemp("old" if is_old else "new")
        for sequence, step in enumerate(STEPS, 1):
            path = write_checkpoint(root, states[step], NUM_RANKS, step=step, sequence=sequence)
            if is_old:
                commit(path, is_old=True)
        made.append(Family(root, is_old, states))
    return made


def load(family: Family, root: Path) -> tuple[int | None, list[str]]:
    """Load as a program does; return the step and why others were passed over. Fail if the weights are others."""
    try:
        with Checkpointer(root) as checkpointer:
            found = checkpointer.load_latest()
    except CheckpointInvalidError as error:
        return None, error.reasons
    if found is None:
        return None, []
    assert is_same(found.state, family.states[found.step]), f"step {found.step} has other weights"
    return found.step, list(found.skipped)


def load_without_owning(family: Family, root: Path) -> tuple[int | None, set[str]]:
    """Load as a program does that only reads; return the step and the names of those passed over."""
    try:
        found = ddpcore.load_checkpoint(root)
    except CheckpointInvalidError as error:
        return None, {reason.split(": ")[0] for reason in error.reasons}
    assert is_same(found.state, family.states[found.step]), f"step {found.step} has other weights"
    names = ["model.0.weight", "optimizer.state.1.exp_avg"]
    for name, tensor in ddpcore.load_tensors(root, names, step=found.step).items():
        part, key = name.split(".", maxsplit=1)
        wanted = family.states[found.step][part]
        assert is_same(tensor, wanted[key] if part == "model" else wanted["state"][1]["exp_avg"]), f"{name} is another"
    return found.step, {reason.split(": ")[0] for reason in found.skipped}


def load_by_engine(family: Family, root: Path) -> int | None:
    """Resume; return the step. Fail if the weights are others."""
    with ddpcore.Engine(seed=9) as engine:
        model = engine.wrap(new_model())
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        with contextlib.suppress(CheckpointInvalidError):
            if engine.checkpoint(root, every="10 steps", model=model, optimizer=optimizer):
                wanted = family.states[engine.step]
                assert is_same(dict(model.state_dict()), dict(wanted["model"])), f"step {engine.step}: other weights"
                return engine.step
    return None


def check(family: Family, root: Path, *, by_engine: bool) -> list[str]:
    """Load what an attack has left; return why others were passed over."""
    wanted = family.newest(root)
    alone = load_without_owning(family, root)
    # Opening deletes leftovers, under whose names an attack may have put a checkpoint.
    step, reasons = load(family, root)
    assert step == wanted, f"step {step} was loaded instead of {wanted}: {reasons}"
    assert alone == (step, {reason.split(": ")[0] for reason in reasons}), f"a reader alone found {alone}"
    for path in root.iterdir():
        is_newer = (step_of(path.name) or 0) >= (wanted or 0)
        if path.name.startswith("step_") and path.is_dir() and is_newer and not family.is_sound(path):
            assert any(reason.startswith(f"{path.name}: ") for reason in reasons), f"{path.name} not in {reasons}"
    if by_engine:
        assert load_by_engine(family, root) == wanted
    return reasons


def run_attacks(families: list[Family], tmp_path: Path, num: int, attack: Callable[[random.Random, Path], str]) -> None:
    """Make so many attacks, each on a fresh copy. `attack` returns "NAME: FILE" if that file must be named."""
    dice = random.Random(SEED)
    for number in range(num):
        family = families[number % 2]
        root = tmp_path / "attacked"
        shutil.copytree(family.root, root)
        where = f"attack {number} of seed {SEED}, {'old' if family.is_old else 'new'} markers"
        try:
            damaged = attack(dice, root)
            where += f": {damaged or attack.__name__}"
            reasons = check(family, root, by_engine=number % ENGINE_EVERY < 2)
        except Exception as error:
            error.add_note(where)
            raise
        name, _, file = damaged.partition(": ")
        if file and (name == "step_00000030" or file == "COMMITTED"):
            assert any(name in reason and file in reason for reason in reasons), f"{where}: {reasons}"
        shutil.rmtree(root)
    sys.stdout.write(f"{num} attacks, seed {SEED}\n")


def flip_bits(dice: random.Random, root: Path) -> str:
    """Flip one to three bits of one file."""
    path = dice.choice(sorted(root.iterdir())) / dice.choice(FILES)
    content = bytearray(path.read_bytes())
    for bit in dice.sample(range(8 * len(content)), dice.choice([1, 1, 2, 3])):
        content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    return f"{path.parent.name}: {path.name}"


def some_checkpoints(dice: random.Random, root: Path, num: int) -> list[Path]:
    return dice.sample(sorted(path for path in root.iterdir() if path.name.startswith("step_")), num)


def rename_directory(dice: random.Random, root: Path) -> str:
    one = dice.choice(some_checkpoints(dice, root, 1))
    target = root / dice.choice(OTHER_NAMES)
    if not target.exists():
        one.rename(target)
    return ""


def swap_directories(dice: random.Random, root: Path) -> str:
    one, other = some_checkpoints(dice, root, 2)
    one.rename(root / "between")
    other.rename(one)
    (root / "between").rename(other)
    return ""


def copy_directory(dice: random.Random, root: Path) -> str:
    one = dice.choice(some_checkpoints(dice, root, 1))
    target = root / dice.choice(OTHER_NAMES)
    if target != one:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(one, target)
    return ""


def link_directory(dice: random.Random, root: Path) -> str:
    one = dice.choice(some_checkpoints(dice, root, 1))
    target = root / dice.choice(OTHER_NAMES)
    if target != one:
        shutil.rmtree(target, ignore_errors=True)
        target.symlink_to(one.name)
    return ""


def move_behind_a_link(dice: random.Random, root: Path) -> str:
    one = dice.choice(some_checkpoints(dice, root, 1))
    elsewhere = root / "elsewhere"
    elsewhere.mkdir()
    one.rename(elsewhere / one.name)
    one.symlink_to(elsewhere / one.name)
    return ""


def replace_directory(dice: random.Random, root: Path) -> str:
    one = dice.choice(some_checkpoints(dice, root, 1))
    if not one.is_dir():  # rmtree would wait for ever at a pipe
        raise NotADirectoryError(one)
    shutil.rmtree(one)
    match dice.randrange(5):
        case 0:
            one.mkdir()
        case 1:
            one.write_text("a file")
        case 2:
            os.mkfifo(one)
        case 3:
            one.symlink_to(one)
        case _:
            one.symlink_to(root / "nowhere")
    return ""


def swap_files(dice: random.Random, root: Path) -> str:
    one, other = (path / dice.choice(FILES) for path in some_checkpoints(dice, root, 2))
    if dice.random() < 0.7:
        other = other.with_name(one.name)
    if dice.random() < 0.2:
        other = one.with_name("rank-00000.safetensors" if "1" in one.name else "rank-00001.safetensors")
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    return ""


def swap_all_but_one_file(dice: random.Random, root: Path) -> str:
    one, other = some_checkpoints(dice, root, 2)
    for file in dice.sample(FILES, len(FILES) - 1):
        content = (one / file).read_bytes()
        (one / file).write_bytes((other / file).read_bytes())
        (other / file).write_bytes(content)
    return ""


def copy_file(dice: random.Random, root: Path) -> str:
    one, other = some_checkpoints(dice, root, 2)
    file = dice.choice(FILES)
    shutil.copy(one / file, other / (file if dice.random() < 0.8 else dice.choice(FILES)))
    return ""


def cut_file(dice: random.Random, root: Path) -> str:
    path = some_checkpoints(dice, root, 1)[0] / dice.choice(FILES)
    size = path.stat().st_size
    os.truncate(path, dice.choice([0, 1, size - 1, dice.randrange(size), size + 1, 2 * size]))
    return f"{path.parent.name}: {path.name}"


def double_file(dice: random.Random, root: Path) -> str:
    path = some_checkpoints(dice, root, 1)[0] / dice.choice(FILES)
    path.write_bytes(2 * path.read_bytes())
    return f"{path.parent.name}: {path.name}"


def replace_file(dice: random.Random, root: Path) -> str:
    path = some_checkpoints(dice, root, 1)[0] / dice.choice(FILES)
    path.unlink()
    match dice.randrange(7):
        case 0:
            os.mkfifo(path)
        case 1:
            path.mkdir()
        case 2:
            path.symlink_to(path)
        case 3:
            path.symlink_to("/dev/zero")
        case 4:
            path.symlink_to(root / "nowhere")
        case 5:
            with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(path.parent):
                server.bind(path.name)
        case _:
            pass
    return f"{path.parent.name}: {path.name}"


def link_file(dice: random.Random, root: Path) -> str:
    one, other = some_checkpoints(dice, root, 2)
    file = dice.choice(FILES)
    (one / file).unlink()
    if dice.random() < 0.5:
        (one / file).symlink_to(other / file)
    else:
        os.link(other / file, one / file)
    return ""


def rename_file(dice: random.Random, root: Path) -> str:
    path = some_checkpoints(dice, root, 1)[0] / dice.choice(FILES)
    path.rename(path.with_name(dice.choice([*FILES, "committed", "rank-00002.safetensors", f"{path.name}.part"])))
    return ""


def rewrite_marker(dice: random.Random, root: Path) -> str:
    """Change a marker's text without its checksum."""
    path = some_checkpoints(dice, root, 1)[0] / "COMMITTED"
    fields = path.read_text().split(" ")
    match dice.randrange(6):
        case 0:
            fields[-3 if len(fields) > 4 else -2] = str(dice.choice([0, 1, 2, 3, 4, 10**17, -1]))
        case 1:
            where = next(number for number, field in enumerate(fields) if field.startswith("test."))
            fields[where] = fields[where].replace("test.", dice.choice(["test.1", "x", ""]))
        case 2:
            fields.append(fields[-1])
        case 3:
            fields[0] = fields[0].upper() + " "
        case 4:
            dice.shuffle(fields)
        case _:
            del fields[dice.randrange(len(fields))]
    path.write_text(" ".join(fields))
    return ""


def two_attacks(dice: random.Random, root: Path) -> str:
    for _ in range(2):
        # One that reads would wait for ever at a pipe that the first has left, and read /dev/zero without end.
        is_plain = all(path.is_file() or path.is_dir() for path in root.rglob("*"))
        possible = [one for one in ATTACKS if one is not two_attacks] if is_plain else WITHOUT_READING
        # The first may have left fewer than the second wants.
        with contextlib.suppress(OSError, ValueError, StopIteration):
            dice.choice(possible)(dice, root)
    return ""


WITHOUT_READING: list[Callable[[random.Random, Path], str]] = [
    rename_directory,
    swap_directories,
    link_directory,
    move_behind_a_link,
    replace_directory,
    replace_file,
    rename_file,
]


ATTACKS: list[Callable[[random.Random, Path], str]] = [
    rename_directory,
    swap_directories,
    copy_directory,
    link_directory,
    move_behind_a_link,
    replace_directory,
    swap_files,
    swap_all_but_one_file,
    copy_file,
    cut_file,
    double_file,
    replace_file,
    link_file,
    rename_file,
    rewrite_marker,
    two_attacks,
]


def attack_somehow(dice: random.Random, root: Path) -> str:
    attack = dice.choice(ATTACKS)
    return attack(dice, root) or f"by {attack.__name__}"


def test_untouched_checkpoints_are_loaded(families: list[Family], tmp_path: Path) -> None:
    for family in families:
        shutil.copytree(family.root, tmp_path / family.root.name)
        assert check(family, tmp_path / family.root.name, by_engine=True) == []


@pytest.mark.timeout(600)
def test_flipped_bits_never_load_wrong_weights(families: list[Family], tmp_path: Path) -> None:
    run_attacks(families, tmp_path, NUM_ATTACKS, flip_bits)


@pytest.mark.timeout(600)
def test_attacks_on_names_markers_and_directories_never_load_wrong_weights(
    families: list[Family], tmp_path: Path
) -> None:
    run_attacks(families, tmp_path, NUM_ATTACKS, attack_somehow)


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("attack", [flip_bits, attack_somehow])
def test_a_thousand_attacks(
    families: list[Family], tmp_path: Path, attack: Callable[[random.Random, Path], str]
) -> None:
    run_attacks(families, tmp_path, NUM_MANY, attack)
