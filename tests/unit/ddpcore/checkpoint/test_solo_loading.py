"""A checkpoint is loaded by a process that owns nothing: no lock, no write, no group; a run may be at work there."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddpcore import load_checkpoint, load_tensors
from ddpcore.checkpoint import Checkpointer, Fit
from ddpcore.checkpoint.directory import MANIFEST
from ddpcore.checkpoint.formats import COMMITTED
from ddpcore.checkpoint.solo_loading import NUM_LOOKS
from ddpcore.errors import (
    CheckpointCallError,
    CheckpointContentError,
    CheckpointDirectoryError,
    CheckpointInvalidError,
    CheckpointMismatchError,
)
from tests.support.checkpoint_copies import write_checkpoint
from tests.support.training_states import is_same

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ON_OPEN: dict[str, Callable[[], None]] = {}
"""What happens at the moment that a file with this path is opened, as by a run that saves and deletes."""

READ_ONLY_LOAD = """
import sys, torch
from torch import nn
import ddpcore
root = sys.argv[1]

def refuse(event, arguments):
    writes = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.utime", "os.truncate",
              "os.chmod", "fcntl.flock", "fcntl.lockf", "fcntl.fcntl", "subprocess.Popen", "socket.bind"}
    if event in writes or (event == "open" and str(arguments[0]).startswith(root) and arguments[2] & 3):
        raise SystemExit(f"{event} {arguments}")

model = nn.Linear(2, 2)
ddpcore.load_checkpoint(root)
sys.addaudithook(refuse)
loaded = ddpcore.load_checkpoint(root, model=model)
ddpcore.load_tensors(root, ["model.bias"])
print(loaded.step, model.weight.tolist(), torch.distributed.is_initialized())
"""


SAVE_OFTEN = """
import sys, torch
from ddpcore.checkpoint import Checkpointer
with Checkpointer(sys.argv[1], keep_last=1) as checkpointer:
    for step in range(1, 13):
        checkpointer.save(step, {"weight": torch.full((5000,), float(step)), "step": step})
        if step == 1:
            checkpointer.wait()
            print("begun", flush=True)
"""


def net(seed: int = 0, width: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))


def state_of(step: int, **more: Any) -> dict[str, Any]:
    model = net(step)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, **more}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number, step in enumerate((10, 20, 30), 1):
        write_checkpoint(tmp_path, state_of(step), 2, step=step, sequence=number)
    return tmp_path


def happen_on_open(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and (happen := ON_OPEN.pop(str(arguments[0]), None)):
        happen()


sys.addaudithook(happen_on_open)


def test_nothing_is_written_or_locked_in_a_directory_that_is_read_only(tmp_path: Path) -> None:
    weight = torch.eye(2)
    write_checkpoint(tmp_path, {"model": {"weight": weight, "bias": torch.zeros(2)}}, 1, step=7)
    for path in (tmp_path / "step_00000007", tmp_path):
        path.chmod(0o555)
    before = {path: path.stat() for path in (tmp_path, *tmp_path.rglob("*"))}

    done = subprocess.run(
        [sys.executable, "-c", READ_ONLY_LOAD, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )

    assert done.stdout == f"7 {weight.tolist()} False\n", done.stderr
    after = {path: path.stat() for path in (tmp_path, *tmp_path.rglob("*"))}
    assert {path: (one.st_mtime_ns, one.st_ctime_ns) for path, one in after.items()} == {
        path: (one.st_mtime_ns, one.st_ctime_ns) for path, one in before.items()
    }


def test_the_newest_sound_one_is_loaded_into_the_objects(root: Path) -> None:
    (root / "step_00000030" / "rank-00000.safetensors").write_bytes(b"")
    model = net(99)
    optimizer = torch.optim.AdamW(model.parameters(), 0.5)

    loaded = load_checkpoint(root, model=model, optimizer=optimizer)

    wanted = state_of(20)
    assert not dist.is_initialized()
    assert (loaded.step, loaded.path.name, loaded.fit) == (20, "step_00000020", Fit())
    assert [reason.split(":")[0] for reason in loaded.skipped] == ["step_00000030"]
    assert is_same(dict(model.state_dict()), dict(wanted["model"]))
    assert is_same(optimizer.state_dict(), wanted["optimizer"])
    assert set(loaded.state) == {"model", "optimizer"}, "memory is taken for what was asked for"


def test_without_objects_the_whole_state_is_returned(root: Path) -> None:
    assert is_same(load_checkpoint(str(root), step=10).state, state_of(10))


def test_the_directory_of_one_checkpoint_is_that_one_or_none(root: Path) -> None:
    (root / "latest").symlink_to("step_00000020")

    assert load_checkpoint(root / "step_00000010").step == 10
    assert load_checkpoint(root / "latest").step == 20
    assert load_checkpoint(root / "latest", step=20).step == 20
    with pytest.raises(CheckpointCallError, match="is the checkpoint of step 20"):
        load_checkpoint(root / "latest", step=10)
    (root / "step_00000010").rename(root / "mine")
    with pytest.raises(CheckpointInvalidError, match="renamed, or copied"):
        load_checkpoint(root / "mine")
    (root / "step_00000020" / "COMMITTED").unlink()
    with pytest.raises(CheckpointInvalidError, match="it has no COMMITTED"):
        load_checkpoint(root / "step_00000020")
    with pytest.raises(CheckpointInvalidError, match="is not there, or was deleted"):
        load_checkpoint(root / "step_00000040")


def test_a_run_keeps_its_directory_while_others_load_from_it(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(step))
            checkpointer.wait()
            assert load_checkpoint(tmp_path).step == step
        with pytest.raises(CheckpointDirectoryError, match="in use"):
            Checkpointer(tmp_path)


@pytest.mark.parametrize("file", ["COMMITTED", "manifest.json", "rank-00000.safetensors"])
def test_one_that_is_deleted_under_the_reader_is_passed_over_for_the_next(root: Path, file: str) -> None:
    ON_OPEN[str(root / "step_00000030" / file)] = lambda: shutil.rmtree(root / "step_00000030")

    loaded = load_checkpoint(root)

    assert not ON_OPEN
    assert loaded.step == 20
    assert is_same(loaded.state, state_of(20))


@pytest.mark.parametrize("is_endless", [False, True])
def test_a_run_that_keeps_one_and_replaces_it_under_the_reader_is_followed(tmp_path: Path, *, is_endless: bool) -> None:
    run, later = tmp_path / "run", tmp_path / "later"
    run.mkdir()
    later.mkdir()
    names = [write_checkpoint(later, state_of(step), 1, step=step, sequence=step).name for step in (1, 2)]
    (later / names[0]).rename(run / names[0])
    num_replaced = 0

    def replace() -> None:
        nonlocal num_replaced
        old, new = names if (run / names[0]).exists() else reversed(names)
        (later / new).rename(run / new)
        (run / old).rename(later / old)
        num_replaced += 1
        if is_endless or num_replaced < NUM_LOOKS - 1:
            ON_OPEN[str(run / new / "manifest.json")] = replace

    ON_OPEN[str(run / names[0] / "manifest.json")] = replace
    if is_endless:
        with pytest.raises(CheckpointInvalidError, match=r"can be read before it is deleted, \d\d+ were tried"):
            load_checkpoint(run)
        ON_OPEN.clear()
    else:
        assert is_same(load_checkpoint(run).state, state_of(2))
    assert num_replaced >= NUM_LOOKS - 1


@pytest.mark.slow
def test_what_is_loaded_while_a_run_saves_and_deletes_is_whole(tmp_path: Path) -> None:
    steps = []
    with subprocess.Popen([sys.executable, "-c", SAVE_OFTEN, str(tmp_path)], stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"begun\n"
        while run.poll() is None:
            loaded = load_checkpoint(tmp_path)
            assert loaded.state["step"] == loaded.step
            assert torch.equal(loaded.state["weight"], torch.full((5000,), float(loaded.step)))
            steps.append(loaded.step)

    assert len(set(steps)) > 1
    assert steps == sorted(steps)
    assert load_checkpoint(tmp_path).step == 12


def test_no_checkpoint_and_no_directory_are_errors_that_name_it(tmp_path: Path, root: Path) -> None:
    with pytest.raises(CheckpointInvalidError, match="there is no checkpoint of step 15 in"):
        load_checkpoint(root, step=15)
    with pytest.raises(CheckpointDirectoryError, match="nowhere cannot be read: No such file"):
        load_checkpoint(tmp_path / "nowhere")
    for name in ("step_00000010", "step_00000020", "step_00000030"):
        (root / name / "manifest.json").unlink()
    with pytest.raises(CheckpointInvalidError, match="can be used: step_00000030: it has no manifest") as refused:
        load_checkpoint(root)
    assert len(refused.value.reasons) == 3


def test_a_part_that_is_not_there_is_refused_with_the_names_of_all_that_are(root: Path) -> None:
    with pytest.raises(CheckpointMismatchError, match=r"net is not in it \(it holds model, optimizer, step\)"):
        load_checkpoint(root, net=net())


def test_a_marker_or_a_manifest_of_terabytes_is_refused_unread(root: Path) -> None:
    newest = root / "step_00000030"
    for name in (COMMITTED, MANIFEST):
        num_bytes = (newest / name).stat().st_size
        os.truncate(newest / name, 4 << 40)
        with pytest.raises(CheckpointInvalidError, match=f"its {name} is too large to be one"):
            load_checkpoint(newest)
        os.truncate(newest / name, num_bytes)


def test_a_file_that_may_not_be_read_is_not_said_to_be_missing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refuse(path: Any, *rest: Any) -> int:
        if str(path).endswith(MANIFEST):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *rest)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointInvalidError, match=f"its {MANIFEST} cannot be read: Permission denied"):
        load_checkpoint(root / "step_00000030")


def test_a_directory_that_may_not_be_searched_is_said(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Any, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "open", refused)
    monkeypatch.setattr("pathlib.Path.lstat", refused)
    with pytest.raises(CheckpointInvalidError, match="its COMMITTED cannot be read: Permission denied; step"):
        load_checkpoint(root)


def test_another_model_changes_nothing_unless_a_part_is_enough(root: Path) -> None:
    model = net(99, width=5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    with pytest.raises(CheckpointMismatchError):
        load_checkpoint(root, model=model)
    assert is_same(dict(model.state_dict()), before)
    loaded = load_checkpoint(root, model=model, strict=False)

    assert loaded.fit.missing == loaded.fit.unexpected == ()
    assert loaded.fit.mismatched == (
        "model.0.weight is float32 [3, 4] there and float32 [5, 4] here",
        "model.0.bias is float32 [3] there and float32 [5] here",
        "model.1.weight is float32 [2, 3] there and float32 [2, 5] here",
    )
    assert not loaded.fit.is_whole
    wanted = {**before, "1.bias": state_of(30)["model"]["1.bias"]}
    assert is_same(dict(model.state_dict()), wanted)


def test_a_model_without_memory_is_refused_since_nothing_would_be_loaded(root: Path) -> None:
    for strict in (True, False):
        with pytest.raises(CheckpointMismatchError):
            load_checkpoint(root, model=net(99).to("meta"), strict=strict)
    with pytest.raises(CheckpointMismatchError, match=r"model\.0\.weight is a meta tensor here, which takes no values"):
        load_checkpoint(root, model=net(99).to("meta"))


def test_a_path_that_no_system_has_is_refused(root: Path) -> None:
    with pytest.raises(CheckpointCallError, match="makes no sense: give a path"):
        load_checkpoint(f"{root}\0")


def test_objects_and_layers_that_were_added_since_stay_as_they_are(root: Path) -> None:
    model = net(99).append(nn.Linear(2, 2))
    head = {name: tensor.clone() for name, tensor in model[2].state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), 0.5)
    average = net(98)
    kept = {name: tensor.clone() for name, tensor in average.state_dict().items()}

    loaded = load_checkpoint(root, model=model, optimizer=optimizer, average=average, strict=False)

    assert loaded.fit == Fit(
        missing=("model.2.weight", "model.2.bias", "average"),
        mismatched=("optimizer has 4 parameters in group 0 there and 6 here",),
    )
    assert is_same(dict(model[:2].state_dict()), dict(state_of(30)["model"]))
    assert is_same(dict(model[2].state_dict()), head)
    assert is_same(dict(average.state_dict()), kept)
    assert optimizer.state_dict()["state"] == {}
    with pytest.raises(CheckpointMismatchError, match="average is not in it"):
        load_checkpoint(root, average=average)


def test_a_part_that_the_model_lacks_is_unexpected(root: Path) -> None:
    model = net(99)[:1]

    assert load_checkpoint(root, model=model, strict=False).fit == Fit(unexpected=("model.1.weight", "model.1.bias"))


def test_a_module_that_finds_nothing_of_its_own_is_an_error_even_where_a_part_is_enough(root: Path) -> None:
    with pytest.raises(CheckpointMismatchError, match="has nothing that model here could take"):
        load_checkpoint(root, model=nn.Sequential(nn.Sequential(nn.Linear(4, 3))), strict=False)


def test_single_tensors_are_read_by_their_places(root: Path) -> None:
    wanted = state_of(20)

    found = load_tensors(root, ["model.0.weight", "optimizer.state.3.exp_avg"], step=20)

    assert is_same(
        found,
        {
            "model.0.weight": wanted["model"]["0.weight"],
            "optimizer.state.3.exp_avg": wanted["optimizer"]["state"][3]["exp_avg"],
        },
    )
    with pytest.raises(CheckpointContentError, match=r"no tensor 'model\.0\.wight'; near it are model\.0\.weight"):
        load_tensors(root, ["model.0.wight"])


def test_a_tied_tensor_is_read_by_each_of_its_places(tmp_path: Path) -> None:
    weight = torch.randn(3, 3)
    write_checkpoint(tmp_path, {"model": {"embedding": weight, "head": weight}, "list": [weight, (1, weight)]}, 1)

    found = load_tensors(tmp_path, ["model.head", "list.1.1", "model.embedding"])

    assert all(is_same(tensor, weight) for tensor in found.values())


def test_a_part_is_loaded_with_the_tensors_of_places_that_are_written_alike_and_of_metadata(tmp_path: Path) -> None:
    layers = OrderedDict({"a.b": torch.ones(2)}, a={"b": torch.zeros(3)})
    layers._metadata = {"scale": torch.full((4,), 2.0)}  # type: ignore[attr-defined]
    write_checkpoint(tmp_path, {"part": layers, "other": torch.ones(9)}, 1)
    part = Part()

    load_checkpoint(tmp_path, part=part)

    assert is_same(part.state, layers)
    assert is_same(part.state._metadata, layers._metadata)  # type: ignore[attr-defined]


class Part:
    """Takes any state."""

    state: Any = None

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_a_flipped_bit_in_a_single_tensors_file_passes_the_checkpoint_over(root: Path) -> None:
    for path in (root / "step_00000030").glob("*.safetensors"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    assert is_same(load_tensors(root, ["model.0.weight"])["model.0.weight"], state_of(20)["model"]["0.weight"])


def test_the_returned_tensors_are_on_the_device_that_was_asked_for(root: Path) -> None:
    assert load_checkpoint(root, device=torch.device("cpu")).state["model"]["0.weight"].device.type == "cpu"
    with pytest.raises(CheckpointCallError, match="that holds data"):
        load_checkpoint(root, device="meta")
    if not torch.cuda.is_available():
        with pytest.raises(CheckpointCallError, match="that this process can use"):
            load_checkpoint(root, device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_a_state_on_a_gpu_goes_into_a_model_there_and_shares_no_memory_with_it(root: Path) -> None:
    model = net(99).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 0.5)

    loaded = load_checkpoint(root, device="cuda", model=model, optimizer=optimizer)
    model(torch.ones(1, 4, device="cuda")).sum().backward()
    optimizer.step()

    assert loaded.state["optimizer"]["state"][0]["exp_avg"].is_cuda
    on_cpu = load_checkpoint(root).state
    assert is_same(loaded.state["optimizer"]["state"][0]["exp_avg"].cpu(), on_cpu["optimizer"]["state"][0]["exp_avg"])


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """Checkpoints 10 to 40: 20 and 30 have the least loss, 40 was not measured."""
    for step, loss in ((10, 0.9), (20, 0.3), (30, 0.3)):
        write_checkpoint(tmp_path, state_of(step), 1, step=step, metrics={"val_loss": loss, "accuracy": 1 - loss})
    write_checkpoint(tmp_path, state_of(40), 1, step=40)
    return tmp_path


def test_the_best_of_a_metric_is_loaded_instead_of_the_newest(measured: Path) -> None:
    model = net()

    assert load_checkpoint(measured).step == 40
    assert load_checkpoint(measured, metric="val_loss", model=model).step == 20
    assert is_same(model.state_dict(), net_of(20))
    assert load_checkpoint(measured, metric="val_loss", mode="max").step == 10
    assert load_checkpoint(measured, metric="accuracy", mode="max").step == 20
    bias = load_tensors(measured, ["model.0.bias"], metric="val_loss")["model.0.bias"]
    assert torch.equal(bias, net_of(20)["0.bias"])


def net_of(step: int) -> dict[str, Any]:
    state: dict[str, Any] = state_of(step)["model"]
    return state


def test_a_damaged_best_one_is_passed_over_and_named(measured: Path) -> None:
    flip(next((measured / "step_00000020").glob("*.safetensors")))
    assert load_checkpoint(measured, metric="val_loss").step == 30

    flip(measured / "step_00000030" / MANIFEST)
    loaded = load_checkpoint(measured, metric="val_loss")

    assert loaded.step == 10
    assert sorted(why.partition(":")[0] for why in loaded.skipped) == ["step_00000020", "step_00000030"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def test_a_metric_that_no_checkpoint_has_is_said(measured: Path) -> None:
    with pytest.raises(CheckpointInvalidError, match="there is no checkpoint with f1 in "):
        load_checkpoint(measured, metric="f1")
    with pytest.raises(CheckpointCallError, match="step=10 and metric='val_loss' name two checkpoints"):
        load_checkpoint(measured, step=10, metric="val_loss")
    with pytest.raises(CheckpointCallError, match="is one checkpoint, not those of a run"):
        load_checkpoint(measured / "step_00000010", metric="val_loss")
