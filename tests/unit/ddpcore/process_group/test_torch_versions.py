"""The table of torch versions with a known fault."""

from __future__ import annotations

import pytest
import torch

from ddpcore.process_group.torch_versions import FAULTS, known_faults

BOTH = ("gloo", "nccl")


@pytest.mark.parametrize("version", ["1.12.0", "1.12", "1.12.0+cu116", "1.12.0+cpu", "1.12.0.post2"])
def test_every_build_of_a_broken_release_is_refused(version: str) -> None:
    (finding,) = known_faults(version)

    assert finding.is_refused
    assert f"torch {version} has a known fault: " in finding.text
    assert "install torch>=1.12.1 (see https://github.com/" in finding.text


@pytest.mark.parametrize("version", ["1.12.0a0+git67ece03", "1.12.0rc3", "1.12.0.dev20220501"])
def test_a_pre_release_of_a_broken_one_is_only_warned_of(version: str) -> None:
    (finding,) = known_faults(version)

    assert not finding.is_refused
    assert f"torch {version} is a pre-release of a faulty version: " in finding.text


@pytest.mark.parametrize("version", ["1.11.0", "1.12.1", "2.13.0+cpu", "2.8.0", "unknown", "", "2.x"])
def test_nothing_is_known_of_other_versions(version: str) -> None:
    assert known_faults(version, BOTH, has_cuda=True) == []


def test_a_fault_concerns_only_those_who_use_what_is_broken() -> None:
    assert known_faults("2.7.0+cu128", ("gloo",), has_cuda=True) == []
    (hang,) = known_faults("2.7.0+cu128", BOTH, has_cuda=True)
    assert dict(hang.fault.workaround) == {"TORCH_NCCL_USE_COMM_NONBLOCKING": "0"}

    assert known_faults("2.1.0", ("gloo",)) == []
    assert known_faults("2.1.0", ("nccl",), has_cuda=True) == []
    assert not known_faults("2.1.0", ("gloo",), has_cuda=True)[0].is_refused


def test_every_entry_has_a_source_and_a_newer_version_to_install() -> None:
    for fault in FAULTS:
        assert all(source.startswith("https://github.com/") for source in fault.sources)
        assert fault.sources
        assert tuple(map(int, fault.instead.removeprefix("torch>=").split("."))) > fault.release[:2]


def test_this_torch_has_none() -> None:
    assert known_faults(str(torch.__version__), BOTH, has_cuda=True) == []
