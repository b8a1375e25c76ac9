"""A small language model on sentences of different lengths, in float64: what weighted losses are tried on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import ddpcore
from ddpcore.samplers import ElasticBatchSampler, ShuffledOrder

GLOBAL_BATCH = 12
NUM_EPOCHS = 3
CLIP_NORM = 0.3
SEED = 3
VOCABULARY = 11
PADDING = -100
LENGTH = 9


class Sentences(Dataset[Tensor]):
    """Sentences of 0 to `LENGTH` - 1 predicted tokens, padded: some predict nothing."""

    def __init__(self, num_sentences: int = 53) -> None:
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(VOCABULARY, (num_sentences, LENGTH), generator=generator)
        lengths = torch.randint(1, LENGTH + 1, (num_sentences, 1), generator=generator)
        lengths[::7] = 1
        self.tokens[torch.arange(LENGTH) >= lengths] = PADDING

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


class NextToken(nn.Module):
    """Predicts a token from the two before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY + 1, 8, padding_idx=VOCABULARY)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return each predicted token's logits."""
        seen = self.embed(torch.where(tokens == PADDING, VOCABULARY, tokens)[:, :-1])
        before = torch.cat([torch.zeros_like(seen[:, :1]), seen[:, :-1]], dim=1)
        logits: Tensor = self.head(torch.tanh(self.mix(torch.cat([seen, before], dim=-1))))
        return logits


def summed_loss(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of all predicted tokens, and their number."""
    logits, targets = model(tokens), tokens[:, 1:]
    total = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum")
    return total, (targets != PADDING).sum()


def mean_loss(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean over predicted tokens, NaN without any, and their number."""
    logits, targets = model(tokens), tokens[:, 1:]
    mean = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING)
    return mean, (targets != PADDING).sum()


def flat(model: nn.Module) -> Tensor:
    """Return all parameters in one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train_plainly() -> dict[str, Any]:
    """Train in one process and without the engine's steps, each batch in one backward of the mean over its tokens."""
    with ddpcore.Engine(seed=SEED):
        model = NextToken().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Sentences()
    sampler = ElasticBatchSampler(ShuffledOrder(len(data), SEED), GLOBAL_BATCH, rank=0, num_replicas=1)
    norms = []
    for _ in range(NUM_EPOCHS):
        for indices in sampler:
            total, num_tokens = summed_loss(model, data.tokens[indices])
            (total / num_tokens).backward()  # type: ignore[no-untyped-call]
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM).item())
            optimizer.step()
            optimizer.zero_grad()
            sampler.finish_step()
    return {"weights": flat(model), "norms": norms}


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Train with the engine; return the last weights and the norms of all gradients.

    Args:
        options: `num_parts` of a step, `kind` of the weights (None for losses without), a `factor` on them, `dtype` and
            `precision`, `rank_weights`, and what `wrap` is given.
    """
    kind, factor = options.get("kind", int), options.get("factor", 1)
    with ddpcore.Engine(seed=SEED, precision=options.get("precision", "fp32")) as engine:
        model = engine.wrap(NextToken().to(options.get("dtype", torch.float64)), **options.get("wrap", {}))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        rank_weights = options.get("rank_weights")
        batches = engine.loader(Sentences(), global_batch_size=GLOBAL_BATCH, rank_weights=rank_weights)
        norms = []
        for batch in engine.steps(batches, until=f"{NUM_EPOCHS} epochs"):
            for tokens in batch.micro_batches(options.get("num_parts", 1)):
                loss, num_tokens = mean_loss(model, tokens)
                if kind is None:
                    engine.backward(torch.nan_to_num(loss))
                else:
                    engine.backward(loss, weight=num_tokens * factor if kind is Tensor else kind(num_tokens))
            norm = engine.update(optimizer, clip_norm=CLIP_NORM)
            assert norm is not None
            norms.append(norm.item())
        return {"weights": flat(ddpcore.unwrap(model)), "norms": norms}
