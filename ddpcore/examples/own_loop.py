"""The engine's parts in a loop of one's own, without the engine.

    torchrun --nproc-per-node 4 own_loop.py

It fits a line, saves after each epoch, and goes on from there when started again, with any number of ranks.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ddpcore
from ddpcore.checkpoint import Checkpointer, restore
from ddpcore.samplers import ShuffledOrder, loss_factor

GLOBAL_BATCH = 32
NUM_EPOCHS = 6


def points() -> TensorDataset:
    """Return x and y = 3 x + 2 with some noise, each (N, 1)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1000, 1, generator=generator)
    return TensorDataset(x, 3 * x + 2 + 0.1 * torch.randn(1000, 1, generator=generator))


def main() -> None:
    """Train; every rank runs this."""
    with ddpcore.open_process_group() as group:
        with ddpcore.local_master_first("points"):  # one rank of each node would download or unpack here
            dataset = points()
        model = ddpcore.wrap(nn.Linear(1, 1).to(group.device), device=group.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        sampler = ddpcore.ElasticBatchSampler(ShuffledOrder(len(dataset), seed=0), GLOBAL_BATCH)
        loader = ddpcore.Prefetcher(DataLoader(dataset, batch_sampler=sampler), group.device)

        checkpointer = Checkpointer("runs/own_loop", keep_last=2)
        step = 0
        if checkpoint := checkpointer.load_latest():
            restore(checkpoint.state, {"model": model, "optimizer": optimizer, "sampler": sampler})
            step = checkpoint.step

        while sampler.cursor.epoch < NUM_EPOCHS:
            for x, y in loader:
                share = sampler.share
                loss = (model(x) - y).square().mean()
                (loss * loss_factor(share.num_local, share.num_global, group.placement.world_size)).backward()
                optimizer.step()
                optimizer.zero_grad()
                sampler.finish_step()
                step += 1
                ddpcore.report_step(step, loss, sampler.cursor.epoch)
            ddpcore.barrier("epoch end")
            with ddpcore.phase("checkpoint"):
                state = {"model": ddpcore.unwrap(model).state_dict(), "optimizer": optimizer.state_dict()}
                checkpointer.save(step, {**state, "sampler": sampler.state_dict()})
        checkpointer.close()
        if group.placement.rank == 0:
            slope, offset = (parameter.item() for parameter in model.parameters())
            print(f"step {step}: y = {slope:.1f} x + {offset:.1f}")


if __name__ == "__main__":
    main()
