"""`python -m ddpcore.checkpoint ls|verify|consolidate`: checkpoints by hand, in one process, without an accelerator.

Exit codes: 0 well, 1 a checkpoint is damaged or there is none, 2 wrong use.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddpcore.checkpoint.catalog import list_checkpoints
from ddpcore.checkpoint.directory import TEMPORARY, step_of
from ddpcore.checkpoint.reading import read_manifest, verify
from ddpcore.errors import CheckpointDirectoryError, CheckpointInvalidError

if TYPE_CHECKING:
    from ddpcore.checkpoint.tensor_files import Contents

SUFFIXES = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}

_directory = click.argument("directory", type=click.Path(path_type=Path))


class _DamagedError(click.ClickException):
    exit_code = 1


class _UseError(click.ClickException):
    exit_code = 2


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Look at checkpoints, check them, and make single files of them."""


@cli.command("ls")
@_directory
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def list_(directory: Path, as_json: bool) -> None:  # noqa: FBT001 - click passes flags so
    """List the checkpoints of DIRECTORY, latest first. Looks at sizes, not at every byte: that is `verify`."""
    rows = [_row(directory / name) for name in _names(directory)]
    in_work = sorted(path.name for path in directory.glob(f"{TEMPORARY}step_*"))
    if as_json:
        click.echo(json.dumps({"schema": 1, "checkpoints": rows, "unfinished": in_work}))
        return
    for row in rows:
        if row["problem"]:
            click.echo(f"{row['name']:<22} DAMAGED: {row['problem']}")
        else:
            size, ranks = _size(row["num_bytes"]), f"{row['world_size']} rank{'s' * (row['world_size'] != 1)}"
            metrics = "".join(f"  {name} {value:.6g}" for name, value in row["metrics"].items())
            click.echo(f"{row['name']:<22} step {row['step']:<10} {size:>9}  {ranks:<9} {row['saved_at']}{metrics}")
    for name in in_work:
        click.echo(f"{name}  being written, or left by a dead run")
    if not rows:
        click.echo(f"no checkpoint in {directory}", err=True)


@cli.command("verify")
@_directory
def verify_(directory: Path) -> None:
    """Check every byte of all checkpoints in DIRECTORY, or of DIRECTORY if it is one."""
    is_one = step_of(directory.absolute().name) is not None and directory.is_dir()
    names = [directory.absolute().name] if is_one else _names(directory)
    root = directory.absolute().parent if is_one else directory
    if not names:
        raise _DamagedError(f"no checkpoint in {directory}")
    num_damaged = 0
    for name in names:
        try:
            manifest = verify(root / name)
        except CheckpointInvalidError as error:
            num_damaged += 1
            click.echo(f"{name}: DAMAGED: {error}")
        else:
            size = sum(record.bytes for record in manifest.files.values())
            click.echo(f"{name}: sound, {len(manifest.files)} file{'s' * (len(manifest.files) != 1)}, {_size(size)}")
    if num_damaged:
        raise _DamagedError(f"{num_damaged} of {len(names)} damaged: delete them, or restore them from a copy")


@cli.command()
@_directory
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(0), help="Instead of the latest sound one.")
@click.option("--force", is_flag=True, help="Replace OUTPUT if it exists.")
def consolidate(directory: Path, output: Path, step: int | None, force: bool) -> None:  # noqa: FBT001 - see above
    """Write a checkpoint of DIRECTORY as one file: OUTPUT.safetensors, or OUTPUT.pt as `torch.load` reads it.

    A safetensors file holds the tensors by their names, and in its metadata, under `state`, all the rest. What ranks
    have saved for themselves stays out.
    """
    kind = SUFFIXES.get(output.suffix)
    if kind is None:
        raise _UseError(f"{output.name}: choose what to write by the suffix, one of {', '.join(SUFFIXES)}")
    if output.exists() and not force:
        raise _UseError(f"{output} exists: give another name, or --force")
    if not output.absolute().parent.is_dir():
        raise _UseError(f"{output.absolute().parent} is no directory")
    contents = _find(directory, step)
    part = output.with_name(f"{output.name}.part")
    try:
        _write_safetensors(contents, part) if kind == "safetensors" else _write_torch(contents, part)
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(output)
    except OSError as error:
        raise _UseError(f"{output} cannot be written: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
    click.echo(f"{output}: step {contents.manifest.step}, {_size(output.stat().st_size)}")


def _names(directory: Path) -> list[str]:
    if not directory.is_dir():
        raise _UseError(f"{directory} is no directory")
    try:
        published, refused = list_checkpoints(directory)
    except CheckpointDirectoryError as error:
        raise _UseError(str(error)) from error
    return [*(one.name for one in published), *refused]


def _row(path: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"name": path.name, "step": step_of(path.name), "problem": ""}
    try:
        manifest = read_manifest(path)
    except CheckpointInvalidError as error:
        return {**row, "problem": str(error)}
    return {
        **row,
        "sequence": manifest.sequence,
        "num_bytes": sum(record.bytes for record in manifest.files.values()),
        "world_size": manifest.world_size,
        "saved_at": manifest.saved_at,
        "torch": manifest.torch,
        "metrics": manifest.metrics,
    }


def _find(directory: Path, step: int | None) -> Contents:
    from ddpcore.checkpoint.tensor_files import read_checkpoint  # noqa: PLC0415 - torch, which `ls` and `verify` lack

    skipped = []
    for name in _names(directory):
        if step is None or step_of(name) == step:
            try:
                contents = read_checkpoint(directory / name)
            except CheckpointInvalidError as error:
                skipped.append(f"{name}: {error}")
                continue
            for reason in skipped:
                click.echo(f"passed over {reason}", err=True)
            return contents
    what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    raise _DamagedError(f"{what} in {directory} can be used{': ' if skipped else ''}{'; '.join(skipped)}")


def _write_safetensors(contents: Contents, path: Path) -> None:
    try:
        from safetensors.torch import save_file  # noqa: PLC0415 - see above
    except ModuleNotFoundError as error:
        raise _UseError("safetensors is not installed: pip install safetensors, or write OUTPUT.pt") from error

    from ddpcore.checkpoint.state_tree import flatten  # noqa: PLC0415 - see above

    flat = flatten(contents.state)
    save_file(flat.tensors, path, {"format": "pt", "state": json.dumps(flat.skeleton)})


def _write_torch(contents: Contents, path: Path) -> None:
    import torch  # noqa: PLC0415 - see above

    torch.save(contents.state, path)


def _size(num_bytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
