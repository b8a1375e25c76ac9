"""A user's own loop of the engine's parts, as `mypy --strict` sees it."""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ddpcore
from ddpcore.checkpoint import Checkpoint, restore
from ddpcore.parallel import PowerSGD, accumulate
from ddpcore.samplers import ShuffledOrder, loss_factor


@ddpcore.rank_zero_only
def greet(name: str) -> int:
    print(f"training of {name}")
    return len(name)


def main(root: Path) -> None:
    with ddpcore.open_process_group(device="cpu", timeout_s=60.0) as group:
        length: int | None = greet("parts")
        with ddpcore.local_master_first("points"):
            data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
        model: nn.Module = ddpcore.wrap(
            torch.compile(nn.Linear(4, 1), disable=True),
            device=group.device,
            comm_hook=PowerSGD(start_iter=10),
            find_unused_parameters=False,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sampler = ddpcore.ElasticBatchSampler(ShuffledOrder(len(data), seed=3), 8, drop_last=True)
        loader = ddpcore.Prefetcher(DataLoader(data, batch_sampler=sampler), group.device)
        with ddpcore.Checkpointer(root / "checkpoints", keep_last=2, keep_every=None) as checkpointer:
            found: Checkpoint | None = checkpointer.load_latest()
            if found is not None:
                fit = restore(found.state, {"model": model, "optimizer": optimizer, "sampler": sampler}, strict=True)
                assert fit.is_whole
            step: int = found.step if found is not None else 0
            for inputs, targets in loader:
                with accumulate(model, is_last=True):
                    loss: Tensor = (model(inputs) - targets).square().mean()
                    share = sampler.share
                    (loss * loss_factor(share.num_local, share.num_global, group.placement.world_size)).backward()  # type: ignore[no-untyped-call] # torch has it so
                optimizer.step()
                optimizer.zero_grad()
                sampler.finish_step()
                step += 1
                ddpcore.report_step(step, loss)
            ddpcore.barrier("epoch end", timeout_s=30.0)
            with ddpcore.phase("checkpoint"):
                state = {"model": ddpcore.unwrap(model).state_dict(), "optimizer": optimizer.state_dict()}
                checkpointer.save(step, {**state, "sampler": sampler.state_dict()})
        seen: list[str] = ddpcore.exchange("steps", str(step))
        print(step, length, seen)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
