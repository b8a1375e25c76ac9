"""Trains a small byte-level GPT on the source of Python's standard library, with plain DistributedDataParallel.

    torchrun --nproc-per-node 4 bytegpt.py --steps 1000

An ordinary torchrun program: everything that rankdeck adds is `ddpcore.report_step`, `ddpcore.phase` and
`ddpcore.barrier`, and without rankdeck these cost nothing. It shows the whole of a DDP program: one process a rank, a
sampler that deals out different windows, gradients averaged in backward, an exact evaluation, a checkpoint by rank 0.

Shape suffixes: B windows of a rank, T bytes of a window, D model width, H heads, K width of a head, V byte values.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import sysconfig
import time
import zlib
from itertools import islice
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import ddpcore
from ddpcore.env import TorchrunEnv, parse_torchrun
from ddpcore.errors import NotLaunchedError

T, D, H, V = 64, 64, 4, 256
NUM_LAYERS = 2
GLOBAL_BATCH = 32
STEPS_PER_EPOCH = 100
PEAK_LR = 5e-3
WARMUP_STEPS = 20
VALIDATION_WINDOWS = 512


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind a norm and around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.feed_norm = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.mix = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.feed = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))
        # A block that adds nothing at first learns faster: 2.2 nats after 200 steps instead of 2.5.
        nn.init.zeros_(self.mix.weight)
        nn.init.zeros_(cast("nn.Linear", self.feed[-1]).weight)

    def forward(self, x_BTD: Tensor) -> Tensor:  # noqa: N803 - shape suffixes
        """Return the residual stream after this block, BTD."""
        qkv_BTD = self.qkv(self.attention_norm(x_BTD)).chunk(3, dim=-1)  # noqa: N806
        q_BHTK, k_BHTK, v_BHTK = (t.unflatten(-1, (H, D // H)).transpose(1, 2) for t in qkv_BTD)  # noqa: N806
        mixed_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)  # noqa: N806
        x_BTD = x_BTD + self.mix(mixed_BHTK.transpose(1, 2).flatten(-2))  # noqa: N806
        return cast("Tensor", x_BTD + self.feed(self.feed_norm(x_BTD)))


class ByteGPT(nn.Module):
    """Predicts each byte of a window from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(V, D), nn.Embedding(T, D)
        self.blocks = nn.Sequential(*(Block() for _ in range(NUM_LAYERS)))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)
        for embedding in (self.embed, self.position):
            nn.init.normal_(embedding.weight, std=0.04)
        self.head.weight = self.embed.weight

    def forward(self, window_BS: Tensor) -> Tensor:  # noqa: N803
        """Return each predicted byte's loss in nats, BT. S = T + 1: the last byte is only predicted."""
        input_BT, target_BT = window_BS[:, :-1], window_BS[:, 1:]  # noqa: N806
        x_BTD = self.embed(input_BT) + self.position.weight  # noqa: N806
        logits_BTV = self.head(self.norm(self.blocks(x_BTD)))  # noqa: N806
        return F.cross_entropy(logits_BTV.flatten(0, 1), target_BT.flatten(), reduction="none").view_as(target_BT)


class Windows(Dataset[Tensor]):
    """Every T-th position of a text begins a window of T + 1 bytes."""

    def __init__(self, text: bytes) -> None:
        self._windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, T + 1, T)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Tensor:
        return self._windows[index].long()


def read_corpus() -> tuple[bytes, bytes]:
    """Return the standard library's source for training, and every fortieth file of it for validation."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = sorted(path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts[:-1]))
    if not files:
        raise SystemExit(f"bytegpt: no Python source below {root}: this Python comes without its library's source")
    texts = [path.read_bytes() for path in files]
    validation = b"".join(texts[::40])[: VALIDATION_WINDOWS * T + 1]
    del texts[::40]
    return b"".join(texts), validation


def learning_rate(step: int, num_steps: int) -> float:
    """Return the share of the peak rate: a linear warm-up, then half a cosine down to a tenth."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, num_steps - WARMUP_STEPS)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))


@torch.no_grad()
def evaluate(model: ByteGPT, windows: Windows, env: TorchrunEnv, device: torch.device) -> float:
    """Return the validation loss in nats per byte, the same on every rank.

    Each window counts once, whatever the number of ranks: ranks take neighbouring shares and add up sums. The model
    comes without its DDP wrapper, whose forward may communicate, and ranks need not have equally many batches.
    """
    begin, end = (len(windows) * rank // env.world_size for rank in (env.rank, env.rank + 1))
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for first in range(begin, end, GLOBAL_BATCH):
        batch_BS = torch.stack([windows[index] for index in range(first, min(first + GLOBAL_BATCH, end))])  # noqa: N806
        loss_BT = model(batch_BS.to(device))  # noqa: N806
        total += torch.stack([loss_BT.sum(), torch.full_like(loss_BT, 1.0).sum()]).double()
    dist.all_reduce(total)
    return float(total[0] / total[1])


def save(path: Path, state: dict[str, object]) -> None:
    """Write a checkpoint that is there as a whole or not at all, whenever the machine stops."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def load_windows(*, is_first: bool) -> tuple[Windows, Windows]:
    """Return windows for training and for validation. Every rank reads; the files come out of the page cache."""
    if is_first:
        print("reading the standard library's source", flush=True)
    text, validation_text = read_corpus()
    if is_first:
        print(f"{len(text) / 1e6:.1f} MB to learn, crc32 {zlib.crc32(text):08x}", flush=True)
    return Windows(text), Windows(validation_text)


def train(args: argparse.Namespace, env: TorchrunEnv, device: torch.device) -> None:
    """Train for `args.steps` steps; every rank runs this."""
    is_first = env.rank == 0
    windows, validation = load_windows(is_first=is_first)
    torch.manual_seed(args.seed)
    model = ByteGPT().to(device)
    ddp = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(ddp.parameters(), PEAK_LR, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, args.steps))
    sampler: DistributedSampler[Tensor] = DistributedSampler(windows, seed=args.seed, drop_last=True)
    loader = DataLoader(windows, batch_size=max(1, GLOBAL_BATCH // env.world_size), sampler=sampler)

    step, loss = 0, torch.tensor(math.nan)
    for epoch in range(math.ceil(args.steps / STEPS_PER_EPOCH)):
        sampler.set_epoch(epoch)
        began_s, began_step = time.monotonic(), step
        for batch_BS in islice(loader, min(STEPS_PER_EPOCH, args.steps - step)):  # noqa: N806
            loss = ddp(batch_BS.to(device)).mean()
            loss.backward()  # averages the gradients over all ranks
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            ddpcore.report_step(step, loss, epoch)
            if is_first and (step % args.log_every == 0 or step == 1):
                ms = 1000 * (time.monotonic() - began_s) / (step - began_step)
                print(f"step {step} loss {loss.item():.3f} {ms:.0f} ms/step", flush=True)
                began_s, began_step = time.monotonic(), step
        ddpcore.barrier("epoch end")
        with ddpcore.phase("eval"):
            validation_loss = evaluate(model, validation, env, device)
        print(f"rank {env.rank} epoch {epoch} done at step {step}, its last loss {loss.item():.3f}", flush=True)
        if is_first:
            print(f"epoch {epoch} validation loss {validation_loss:.3f} nats per byte", flush=True)
        if args.checkpoint_dir:
            with ddpcore.phase("checkpoint"):
                if is_first:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    save(args.checkpoint_dir / "bytegpt.pt", state)
            ddpcore.barrier("checkpoint")


def parse_args() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on the standard library's source with DDP.")
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps (default 1000)")
    parser.add_argument("--checkpoint-dir", type=Path, help="write bytegpt.pt here after each epoch (default: nowhere)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of windows (default 0)")
    parser.add_argument("--log-every", type=int, default=20, help="steps between printed losses (default 20)")
    args = parser.parse_args()
    if args.steps < 1 or args.log_every < 1:
        parser.error("--steps and --log-every count from 1")
    return args


def main() -> None:
    """Run one rank."""
    args = parse_args()
    try:
        env = parse_torchrun(os.environ)
    except NotLaunchedError as error:
        raise SystemExit(f"bytegpt: {error}") from None
    use_cuda = torch.cuda.device_count() >= env.local_world_size
    device = torch.device("cuda", env.local_rank) if use_cuda else torch.device("cpu")
    backend = "nccl" if use_cuda else "gloo"
    print(f"rank {env.rank} of {env.world_size} on {socket.gethostname()}: {device}, {backend}", flush=True)
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    train(args, env, device)
    # Gloo's threads let go of a collective a moment after it is over, and need the interpreter for that: ranks that
    # meet here once more, without a collective, do not end in that moment (torch 2.13 would abort).
    ddpcore.barrier("end")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
