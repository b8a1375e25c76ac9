"""A user's program that only reads checkpoints, as `mypy --strict` sees it."""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import ddpcore
from ddpcore.checkpoint import Checkpointer, Fit, LoadedCheckpoint
from ddpcore.errors import CheckpointError


def main(root: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    with Checkpointer(root / "run") as checkpointer:
        checkpointer.save(5, {"model": model.state_dict(), "note": "first"}, metrics={"val_loss": 0.5})
    grown = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(grown.parameters(), lr=0.1)
    loaded: LoadedCheckpoint = ddpcore.load_checkpoint(
        root / "run", step=5, device="cpu", strict=False, model=grown, optimizer=optimizer
    )
    fit: Fit = loaded.fit
    tensors: dict[str, Tensor] = ddpcore.load_tensors(root / "run", ["model.0.weight"], metric="val_loss", mode="min")
    assert torch.equal(tensors["model.0.weight"], grown.state_dict()["0.weight"])
    try:
        ddpcore.load_checkpoint(loaded.path, model=grown)
    except CheckpointError as error:
        print(type(error).__name__)
    skipped: tuple[str, ...] = loaded.skipped
    print(loaded.step, loaded.path.name, list(fit.missing), len(fit.mismatched), skipped)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
