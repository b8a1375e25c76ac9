"""What gradients travel as between ranks, by name.

    none       as they are: bit for bit what torch's DDP does
    fp16       half the bytes: each rank's gradient, divided by the number of ranks, is rounded to 11 bits and added up
               in fp16. What is below 6e-8 is lost, what is above 65,504 becomes infinite: scale the loss (GradScaler)
    bf16       half the bytes, fp32's range, 8 bits: each gradient, and each addition, is off by up to 0.4 %
    powersgd   a rank-r approximation of each gradient matrix: tens to hundreds of times fewer bytes. A different
               optimizer, not a cheaper copy of the same one: it needs a trial on the model at hand

In all of them every rank ends up with the same gradient: ranks stay in step, only the result is another.

Source: torch/distributed/algorithms/ddp_comm_hooks; PowerSGD: Vogels et al., https://arxiv.org/abs/1905.13727
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from ddpcore.arguments import BELOW_ZERO, check_flag, check_number, check_whole
from ddpcore.errors import WrapError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
    from torch.nn.parallel import DistributedDataParallel

CommHook = Literal["none", "fp16", "bf16", "powersgd"]


@dataclass(frozen=True)
class PowerSGD:
    """Settings of the hook "powersgd"; the defaults are torch's.

    The hook keeps what compression has left out (the error) and last step's factors in each rank's memory, about one
    gradient's size more; neither is in the model's state_dict, so that a resumed run begins with an empty error.

    Attributes:
        matrix_approximation_rank: r, the columns of each factor: more of them are more bytes and a smaller error.
        start_iter: Steps with plain averaging before compression begins; at least 2 with either of the next two.
        use_error_feedback: Add to each gradient what the step before has left out.
        warm_start: Begin with the last step's factors.
        min_compression_rate: A matrix that would not shrink by this factor travels as it is.
        orthogonalization_epsilon: Added to a factor's norms where gradients vanish and fp16 would divide by 0.
        random_seed: Seed of the first factors; the same on every rank.
        batch_tensors_with_same_shape: One matrix product for all tensors of one shape: faster, more memory.
    """

    matrix_approximation_rank: int = 1
    start_iter: int = 1000
    use_error_feedback: bool = True
    warm_start: bool = True
    min_compression_rate: float = 2
    orthogonalization_epsilon: float = 0
    random_seed: int = 0
    batch_tensors_with_same_shape: bool = False

    def __post_init__(self) -> None:
        check_whole(WrapError, "matrix_approximation_rank", self.matrix_approximation_rank)
        check_whole(WrapError, "start_iter", self.start_iter, least=0)
        check_whole(WrapError, "random_seed", self.random_seed, least=0, most=(1 << 32) - 1)
        check_number(WrapError, "min_compression_rate", self.min_compression_rate, range_=(0.0, 1e9))
        check_number(
            WrapError,
            "orthogonalization_epsilon",
            self.orthogonalization_epsilon,
            range_=(BELOW_ZERO, 1e9),
            wanted="a number, 0 or more",
        )
        for name in ("use_error_feedback", "warm_start", "batch_tensors_with_same_shape"):
            check_flag(WrapError, name, getattr(self, name))


def parse_comm_hook(comm_hook: CommHook | PowerSGD) -> Literal["none", "fp16", "bf16"] | PowerSGD:
    """Return the asked hook; raise WrapError if there is no such hook, or torch does not take its settings."""
    if isinstance(comm_hook, PowerSGD):
        needs_first_steps = comm_hook.use_error_feedback or comm_hook.warm_start
        if comm_hook.start_iter < 2 and needs_first_steps:
            raise WrapError(
                f"PowerSGD(start_iter={comm_hook.start_iter}): error feedback and warm start need start_iter >= 2, "
                "since DDP rebuilds its buckets after the first step"
            )
        if comm_hook.matrix_approximation_rank < 1:
            raise WrapError(f"PowerSGD: matrix_approximation_rank={comm_hook.matrix_approximation_rank} is below 1")
        return comm_hook
    if comm_hook not in get_args(CommHook):
        raise WrapError(f"there is no comm_hook {comm_hook!r}: {', '.join(map(repr, get_args(CommHook)))} are known")
    return PowerSGD() if comm_hook == "powersgd" else comm_hook


def weights_refused_by(comm_hook: object) -> str:
    """Return why losses cannot have weights beside a hook, or "".

    With weights gradients travel in another unit in each step, and are divided afterwards. That is right for factors
    and rounding, but not for the error that PowerSGD adds to the next step's gradients.
    """
    if comm_hook == "powersgd" or (isinstance(comm_hook, PowerSGD) and comm_hook.use_error_feedback):
        return (
            "backward with a weight does not go with PowerSGD's error feedback, which carries sums over from steps of "
            "other weights: take comm_hook=PowerSGD(use_error_feedback=False), or another hook"
        )
    return ""


def register(ddp: DistributedDataParallel, comm_hook: Literal["none", "fp16", "bf16"] | PowerSGD) -> None:
    """Make DDP send its gradients through a hook. Collective for bf16: every rank must call.

    Raises WrapError if the backend does not add up bfloat16.
    """
    group = ddp.process_group
    if isinstance(comm_hook, PowerSGD):
        state = powerSGD_hook.PowerSGDState(
            process_group=group,
            matrix_approximation_rank=comm_hook.matrix_approximation_rank,
            start_powerSGD_iter=comm_hook.start_iter,
            min_compression_rate=comm_hook.min_compression_rate,
            use_error_feedback=comm_hook.use_error_feedback,
            warm_start=comm_hook.warm_start,
            orthogonalization_epsilon=comm_hook.orthogonalization_epsilon,
            random_seed=comm_hook.random_seed,
            batch_tensors_with_same_shape=comm_hook.batch_tensors_with_same_shape,
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif comm_hook == "fp16":
        ddp.register_comm_hook(group, default_hooks.fp16_compress_hook)
    elif comm_hook == "bf16":
        _try_bf16(ddp)
        ddp.register_comm_hook(group, _compress_to_bf16)


def _try_bf16(ddp: DistributedDataParallel) -> None:
    """Add up one number: a backend that cannot do it raises here, not in the middle of a backward."""
    try:
        dist.all_reduce(torch.ones(1, dtype=torch.bfloat16, device=ddp.device), group=ddp.process_group)
    except RuntimeError as error:
        raise WrapError(f"this process group does not add up bfloat16, take comm_hook='fp16': {error}") from error


def _compress_to_bf16(process_group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Torch's own hook under another name: DDP refuses it by name without NCCL, though gloo adds up bfloat16 too."""
    return default_hooks.bf16_compress_hook(process_group, bucket)


# DDP compares a hook's annotations, if it has any, with classes: strings would not do.
_compress_to_bf16.__annotations__.clear()
