"""The program of ddpcore/README.md before and after: the page shows both as they are, and both train the same."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import torch

import ddpcore
from ddpcore.wire import Fault, FaultKind
from tests.support.ranks import EXAMPLES, RealRanks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

RUN_S = 240.0

NAMES = ["model.0.weight", "model.0.bias", "model.2.weight", "model.2.bias"]

Weights = dict[str, torch.Tensor]


def lines_of(code: str) -> list[str]:
    return [line for line in code.splitlines() if line]


@pytest.mark.parametrize("name", ["classic", "moved"])
def test_the_page_shows_the_program_whole(name: str) -> None:
    page = (EXAMPLES.parent / "README.md").read_text()
    blocks = re.findall(rf"<!-- {name} -->\n```python\n(.*?)```", page, re.DOTALL)
    code = (EXAMPLES / f"{name}.py").read_text().partition('"""\n\n')[2]

    assert lines_of("".join(blocks)) == lines_of(code)


def test_every_python_block_of_the_page_is_one_of_a_program() -> None:
    page = (EXAMPLES.parent / "README.md").read_text()

    assert page.count("```python") == len(re.findall(r"<!-- (?:classic|moved) -->\n```python", page))


def classic_weights(options: Sequence[str], program: Path = EXAMPLES / "classic.py") -> Weights:
    with RealRanks([program, *options], 2) as job:
        assert job.wait_for_end(RUN_S) == 0, job.logs()
        model = torch.load(job.directory / "classic.pt")["model"]
    return {f"model.{name}": tensor for name, tensor in model.items()}


SWAPS = [
    ("import torch\n", "import torch\nimport ddpcore\nfrom ddpcore.samplers import ElasticDistributedSampler\n"),
    ("with torch_distributed_zero_first(local_rank):", 'with ddpcore.local_master_first("data"):'),
    ('dist.init_process_group("nccl" if device.type == "cuda" else "gloo")', "group = ddpcore.open_process_group()"),
    ("dist.destroy_process_group()", "group.close()"),
    (".to(device))\n    optimizer", ".to(device), device=device)\n    optimizer"),
    ("= DistributedDataParallel(", "= ddpcore.wrap("),
    ("model.module", "ddpcore.unwrap(model)"),
    ("= DistributedSampler(", "= ElasticDistributedSampler("),
]
"""Of the page's table, those that are one line."""


def swapped_program(directory: Path) -> Path:
    code = (EXAMPLES / "classic.py").read_text()
    for old, new in SWAPS:
        assert old in code
        code = code.replace(old, new)
    path = directory / "swapped.py"
    path.write_text(code)
    return path


def moved_weights(options: Sequence[str], num_ranks: int = 2) -> Weights:
    with RealRanks([EXAMPLES / "moved.py", *options], num_ranks) as job:
        assert job.wait_for_end(RUN_S) == 0, job.logs()
        return ddpcore.load_tensors(job.directory / "runs" / "moved", NAMES)


def killed_and_resumed_weights(directory: Path) -> Weights:
    """Train until rank 1 of 2 is killed in the middle of the fifth epoch, then go on with three."""
    runs = directory / "runs"
    runs.mkdir()
    with RealRanks([EXAMPLES / "moved.py"], 2, faults=[Fault(FaultKind.KILL, rank=1, at_step=45)]) as job:
        (job.directory / "runs").symlink_to(runs)
        assert job.wait_for_end(RUN_S) != 0
    with RealRanks([EXAMPLES / "moved.py"], 3) as job:
        (job.directory / "runs").symlink_to(runs)
        assert job.wait_for_end(RUN_S) == 0, job.logs()
        # In the middle of the third epoch of ten steps each.
        assert "goes on from step 25\n" in job.log(0), job.logs()
    return ddpcore.load_tensors(runs / "moved", NAMES)


def assert_close(some: Weights, other: Weights) -> None:
    assert some.keys() == other.keys() == set(NAMES)
    for name in NAMES:
        torch.testing.assert_close(some[name], other[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(2 * RUN_S)
def test_both_programs_end_with_the_same_weights_after_the_same_samples() -> None:
    classic = classic_weights(["--in-order"])

    assert_close(moved_weights(["--in-order"]), classic)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(2 * RUN_S)
def test_lines_that_are_changed_one_by_one_leave_the_program_as_it_was(tmp_path: Path) -> None:
    swapped = classic_weights(["--in-order"], swapped_program(tmp_path))

    assert_close(swapped, classic_weights(["--in-order"]))


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(4 * RUN_S)
def test_the_moved_program_ends_with_the_same_weights_when_it_is_killed_and_goes_on_with_more_ranks(
    tmp_path: Path,
) -> None:
    straight = moved_weights([])

    assert_close(killed_and_resumed_weights(tmp_path), straight)
    # Shuffled, the two programs take the samples in different orders.
    classic = classic_weights([])
    assert any((classic[name] - straight[name]).abs().max() > 1e-3 for name in NAMES)
