"""Data parallel in one process with several devices, evenly or with a smaller part for device 0.

One process a device (`ddpcore.parallel.wrap`) is faster and the rule. `BalancedDataParallel` is for notebooks and for
programs that are one process for other reasons.

`balanced_sizes` splits a batch over the devices, without side effects. Outputs, losses and the optimizer's state gather
on device 0, whose memory therefore fills first; with fewer samples there, all devices can be filled.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.parallel import parallel_apply

from ddpcore.arguments import check_is, check_whole, refuse
from ddpcore.errors import WrapError
from ddpcore.nested import map_tensors, num_samples_of, split_sizes, zip_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Scalars = Literal["mean", "sum"]


class BalancedDataParallel(nn.DataParallel[nn.Module]):
    """`nn.DataParallel` whose devices take unequal shares, with results and gradients as on one device.

    Tensors among the arguments, in keywords and nested too, are cut in dimension 0 and must agree on its size; 0-dim
    tensors and everything else go to every device as they are. Outputs are put together on the output device: tensors
    in dimension 0, other things than tensors as the first device has them.

    A 0-dim output is one figure for several samples, and devices have different numbers of them: `nn.DataParallel`
    returns a vector of such figures, whose mean is not that of the samples. Here it becomes one figure again, as
    `scalars` asks for; 0-dim integers are counts and always added up.

    Which GPUs there are is decided by CUDA_VISIBLE_DEVICES before anything touches CUDA. On a machine without an
    accelerator, or with one device, the module simply runs. As in `nn.DataParallel`, what `forward` stores on the
    module is lost on all devices but the first, and BatchNorm sees each device's share alone.

    Args:
        module: With all parameters and buffers on the first device.
        device_ids: All devices if None.
        output_device: The first if None.
        first_device_batch: Samples of a whole step that device 0 takes: see `balanced_sizes`. None: an even split.
        accumulation_steps: Forwards of a step.
        scalars: What a 0-dim float output is: a mean over the samples, or their sum. A mean over something else, such
            as tokens, is neither: return the sum and the count, with "sum", and divide behind; `Engine.backward` takes
            the quotient as the loss and the count as its weight.

    Attributes:
        devices: Empty without an accelerator.

    Raises:
        WrapError: An argument makes no sense.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        *,
        first_device_batch: int | None = None,
        accumulation_steps: int = 1,
        scalars: Scalars = "mean",
    ) -> None:
        check_is(WrapError, "module", module, nn.Module, "a torch.nn.Module")
        _check_devices(device_ids, output_device)
        if first_device_batch is not None:
            check_whole(WrapError, "first_device_batch", first_device_batch, least=0)
        check_whole(WrapError, "accumulation_steps", accumulation_steps)
        if scalars not in get_args(Scalars):
            raise refuse(WrapError, "scalars", scalars, '"mean" or "sum"')
        super().__init__(module, device_ids, output_device)
        self.first_device_batch = first_device_batch
        self.accumulation_steps = accumulation_steps
        self.scalars: Scalars = scalars
        kind = self.src_device_obj.type if self.device_ids else "cpu"
        self.devices = [torch.device(kind, index) for index in self.device_ids]
        self.gather_device = torch.device(kind, self.output_device) if self.device_ids else torch.device("cpu")

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on the devices' shares.

        Raises:
            UnsplittableBatchError: The arguments disagree on the number of samples, or have none.
            WrapError: The module is not on the first device.
        """
        if not self.devices:
            return self.module(*inputs, **kwargs)
        self._check_module()
        num_samples = num_samples_of((inputs, kwargs), "arguments", are_lists_cut=False)
        sizes = balanced_sizes(num_samples, len(self.devices), self.first_device_batch, self.accumulation_steps)
        # An empty batch has no device to go to: it runs on the first, so that the output has its shape.
        used = [index for index, size in enumerate(sizes) if size] or [0]
        parts = split_sizes((inputs, kwargs), sizes, are_lists_cut=False, name="arguments")
        shares = [map_tensors(partial(Tensor.to, device=self.devices[i], non_blocking=True), parts[i]) for i in used]
        outputs = self._outputs(used, [args for args, _ in shares], [keywords for _, keywords in shares])
        return gathered(outputs, [sizes[index] for index in used], self.gather_device, self.scalars)

    def _outputs(self, used: list[int], inputs: list[Any], kwargs: list[dict[str, Any]]) -> list[Any]:
        if used == [0]:
            return [self.module(*inputs[0], **kwargs[0])]
        # Parameters are copied from the first device, even where it takes no samples.
        replicas = self.replicate(self.module, self.devices[: used[-1] + 1])
        return self.apply_replicas([replicas[i] for i in used], inputs, kwargs, [self.devices[i] for i in used])

    def apply_replicas(
        self,
        replicas: Sequence[nn.Module],
        inputs: Sequence[Any],
        kwargs: Sequence[dict[str, Any]],
        devices: Sequence[torch.device],
    ) -> list[Any]:
        """Run each replica on its device, each in a thread."""
        return parallel_apply(
            [in_same_autocast(replica, devices[0].type) for replica in replicas], inputs, kwargs, devices
        )

    def _check_module(self) -> None:
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if tensor.device != self.devices[0]:
                raise WrapError(
                    f"{name!r} is on {tensor.device}: data parallel copies a module from its first device, "
                    f"module.to({str(self.devices[0])!r}) before the forward"
                )


def _check_devices(device_ids: Sequence[int | torch.device] | None, output_device: int | torch.device | None) -> None:
    """Refuse what names no devices: without an accelerator torch would not look at them."""
    if device_ids is not None:
        if not isinstance(device_ids, list | tuple) or not device_ids:
            raise refuse(WrapError, "device_ids", device_ids, "a list of devices, or None for all")
        for index in device_ids:
            _check_device("device_ids", index)
    if output_device is not None:
        _check_device("output_device", output_device)


def _check_device(name: str, device: int | torch.device) -> None:
    if not isinstance(device, torch.device):
        check_whole(WrapError, name, device, least=0, most=1 << 15, wanted="devices by number, or as torch.device")


def gathered(outputs: Sequence[Any], sizes: Sequence[int], device: torch.device, scalars: Scalars) -> Any:
    """Put the devices' outputs together, as described at `BalancedDataParallel`; `scalars` is what 0-dim floats are."""

    def join(leaves: list[Any]) -> Any:
        if not isinstance(leaves[0], Tensor):
            return leaves[0]
        tensors = [leaf.to(device, non_blocking=device.type != "cpu") for leaf in leaves]
        if tensors[0].ndim:
            return torch.cat(tensors)
        if len(tensors) == 1:
            return tensors[0]
        stacked = torch.stack(tensors)
        if scalars == "mean" and stacked.is_floating_point():
            # Fractions in 16 bits do not add up to one, and numbers of samples are beyond float16.
            dtype = torch.promote_types(stacked.dtype, torch.float32)
            fractions = torch.tensor([size / sum(sizes) for size in sizes], dtype=dtype, device=device)
            return (stacked * fractions).sum().to(stacked.dtype)
        return stacked.sum()

    return zip_leaves(join, outputs)


def in_same_autocast(replica: nn.Module, kind: str) -> Any:
    """Have a replica's thread compute in the caller's autocast dtype.

    Torch hands its threads whether autocast is on, but not the dtype: bfloat16 becomes float16 there.
    Source: torch/nn/parallel/parallel_apply.py, torch 2.13.
    """
    if not torch.is_autocast_enabled(kind):
        return replica
    return partial(_call_in_autocast, replica, kind, torch.get_autocast_dtype(kind))


def _call_in_autocast(replica: Callable[..., Any], kind: str, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(kind, dtype):
        return replica(*args, **kwargs)


def balanced_sizes(
    num_samples: int, num_devices: int, first_device_batch: int | None = None, accumulation_steps: int = 1
) -> list[int]:
    """Return how many samples of one forward each device takes; raise ValueError for an argument out of its range.

    Device 0 takes `first_device_batch // accumulation_steps`, the others the rest, evenly, a remainder one by one from
    device 1 on. Device 0 never takes more than in an even split: where its share would not be smaller, the split is
    even, so that a last, smaller batch of an epoch does not land on device 0 alone. Example, at most 3 samples on each
    of three devices but only 2 on the first: 16 samples in two forwards of 8 are 2, 3, 3. A `first_device_batch` of 0
    leaves device 0 out; None splits evenly.

    Source: Balanced-DataParallel, from Transformer-XL's `utils/data_parallel.py`.
    """
    least = {"num_samples": 0, "num_devices": 1, "first_device_batch": 0, "accumulation_steps": 1}
    given = {
        "num_samples": num_samples,
        "num_devices": num_devices,
        "first_device_batch": first_device_batch or 0,
        "accumulation_steps": accumulation_steps,
    }
    for name, value in given.items():
        if value < least[name]:
            raise ValueError(f"{name} is {value}: it is at least {least[name]}")
    if num_devices == 1:
        return [num_samples]
    first = num_samples // num_devices
    if first_device_batch is not None:
        first = min(first, first_device_batch // accumulation_steps)
    num_each, remainder = divmod(num_samples - first, num_devices - 1)
    return [first, *(num_each + (device < remainder) for device in range(num_devices - 1))]
