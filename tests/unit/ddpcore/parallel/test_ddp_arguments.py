"""DDP's arguments are all known, with their defaults, and what this torch lacks is refused by name."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from ddpcore.errors import WrapError
from ddpcore.parallel.comm_hooks import PowerSGD, parse_comm_hook
from ddpcore.parallel.ddp_arguments import DdpArguments, shared_settings, supported


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the list is that of torch 2.13")
def test_every_argument_of_ddp_is_typed_and_explained() -> None:
    names = set(inspect.signature(DistributedDataParallel).parameters) - {"module"}

    assert set(DdpArguments.__annotations__) == names
    for name in names:
        assert f"        {name}: " in (DdpArguments.__doc__ or "")


def test_gradients_are_views_of_the_buckets_unless_asked_otherwise() -> None:
    assert supported({}) == {"gradient_as_bucket_view": True}
    assert supported({"gradient_as_bucket_view": False, "dim": 0}) == {"gradient_as_bucket_view": False, "dim": 0}


def test_an_argument_of_a_later_torch_is_refused_by_name() -> None:
    with pytest.raises(WrapError, match=r"of torch 2\..* has no argument 'batched_grad_copy': leave it out"):
        supported({"batched_grad_copy": True}, ["static_graph"])


def test_an_argument_that_only_a_future_torch_has_passes() -> None:
    assert supported({"lazy_bucket_allocation": True}, ["lazy_bucket_allocation"])["lazy_bucket_allocation"] is True


def test_a_misspelt_argument_is_answered_with_the_right_one() -> None:
    with pytest.raises(WrapError, match="no argument 'find_unused_params'; 'find_unused_parameters' is one"):
        supported({"find_unused_params": True})
    with pytest.raises(WrapError, match=r"no argument 'module'$"):
        supported({"module": 1})


def test_old_and_new_name_of_one_thing_exclude_each_other() -> None:
    with pytest.raises(WrapError, match="old name of forward_sync_buffers"):
        supported({"broadcast_buffers": True, "forward_sync_buffers": False})
    assert supported({"broadcast_buffers": None, "forward_sync_buffers": False})["forward_sync_buffers"] is False


def test_ranks_compare_settings_with_torch_s_defaults_filled_in() -> None:
    assert shared_settings({"static_graph": False}) == shared_settings({})
    assert shared_settings({"bucket_cap_mb": 5})["bucket_cap_mb"] == "5"
    assert "device_ids" not in shared_settings({"device_ids": [1]})


def test_powersgd_settings_that_torch_would_refuse_later_are_refused() -> None:
    with pytest.raises(WrapError, match="start_iter >= 2"):
        parse_comm_hook(PowerSGD(start_iter=1))
    with pytest.raises(WrapError, match="matrix_approximation_rank=0"):
        parse_comm_hook(PowerSGD(matrix_approximation_rank=0))
    plain = PowerSGD(start_iter=0, use_error_feedback=False, warm_start=False)
    assert parse_comm_hook(plain) is plain
    assert parse_comm_hook("powersgd") == PowerSGD()
