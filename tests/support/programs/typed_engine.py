"""A user's program with the engine, as `mypy --strict` sees it."""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ddpcore


def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    inputs, targets = batch
    return {"error": (model(inputs) - targets).square().mean(dim=1)}


def main(root: Path) -> None:
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    with ddpcore.Engine(
        seed=1, precision="fp32", log_dir=root / "logs", device="cpu", backend="gloo", timeout_s=60.0
    ) as engine:
        compiled: nn.Module = engine.wrap(torch.compile(nn.Linear(4, 1), backend="eager"))
        assert isinstance(ddpcore.unwrap(compiled), nn.Linear)
        model: nn.Module = engine.wrap(nn.Linear(4, 1), static_graph=False, bucket_cap_mb=10, comm_hook="none")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        average = engine.ema(model, decay=0.9)
        batches = engine.loader(data, global_batch_size=8, num_workers=0, prefetch=1, pin_memory=False, collate_fn=None)
        is_resumed: bool = engine.checkpoint(
            root / "checkpoints",
            every="5 steps",
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            average=average,
        )
        for batch in engine.steps(batches, until="2 epochs"):
            for inputs, targets in batch.micro_batches(2):
                with engine.autocast():
                    loss: Tensor = (model(inputs) - targets).square().mean()
                engine.backward(loss)
                engine.log(loss=loss, rate=0.01)
            norm: Tensor | None = engine.update(optimizer, clip_norm=1.0)
            assert norm is not None
        figures: dict[str, float] = engine.evaluate(average, data, squared_error, batch_size=16, num_workers=0)
        print(engine.step, is_resumed, sorted(figures), engine.placement.rank, engine.stop_reason)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
