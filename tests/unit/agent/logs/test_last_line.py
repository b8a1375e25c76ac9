"""The last line of a rank that left no exception."""

from __future__ import annotations

import pytest

from agent.logs.traceback_text import MAX_EXCEPTION_CHARS, last_line

ARGPARSE = "usage: train.py [-h] --data DATA\ntrain.py: error: the following arguments are required: --data\n"
TORCH = (
    "[rank0]:[W1121 23:11:11.000 ProcessGroupNCCL.cpp:1250] Warning: WARNING: process group has NOT been destroyed\n"
)
WARNING = "/home/me/train.py:7: UserWarning: no GPU here\n  warnings.warn('no GPU here')\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ""),
        ("\n \n", ""),
        (ARGPARSE, "train.py: error: the following arguments are required: --data"),
        ("no data in /data\n", "no data in /data"),
        ("[rank2]: no data in /data\n", "no data in /data"),
        ("no data\n" + TORCH, "no data"),
        ("no data\nW1121 23:11:11.000000 12 site-packages/torch/x.py:7] [0] slow\n", "no data"),
        ("no data\n[E1121 23:11:11.000 socket.cpp:1] refused\n", "[E1121 23:11:11.000 socket.cpp:1] refused"),
        ("no data\n" + WARNING, "no data"),
        (WARNING, ""),
        ("epoch 1:  40%|####      | 4/10 [00:01<00:02]\repoch 1:  50%|#####     | 5/10 [00:01<00:01]", ""),
        ("epoch 1:  50%|#####     | 5/10 [00:01<00:01]\nno data\n", "no data"),
        ("two\nlines\n", "lines"),
        ("\x1b[31mno\x1b[0m data\x07\n", "no data\ufffd"),
        ("x" * 5000, "x" * MAX_EXCEPTION_CHARS),
    ],
)
def test_the_last_line_that_may_say_why(text: str, said: str) -> None:
    assert last_line(text) == said
