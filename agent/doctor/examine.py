"""Puts it together: what takes its time is asked at once, each within bounds."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import TYPE_CHECKING

import msgspec

from agent.doctor.gpus import gpu_rows, models, sample_gpus
from agent.doctor.interpreter import ask_interpreter, interpreter_rows, own_python_row, utf8_text
from agent.doctor.machine import machine_rows
from agent.doctor.network import network_rows, outward_interfaces, own_address
from agent.doctor.source_code import code_rows, look_at_code
from agent.wire.examination import MAX_ROWS, Examination, Facts, Row

if TYPE_CHECKING:
    from pathlib import Path

MAX_DETAIL = 2000


def examine(directory: Path, python: str, workdir: str = "") -> Examination:
    """Examine this node; takes as long as the slowest part, at most `ANSWER_S` for the interpreter.

    An empty `workdir` is unknown.
    """
    with ThreadPoolExecutor(max_workers=3, thread_name_prefix="doctor") as pool:
        asked_interpreter = pool.submit(ask_interpreter, os.path.expanduser(python))  # noqa: PTH111 - may be a name
        asked_gpus = pool.submit(sample_gpus)
        asked_code = pool.submit(look_at_code, workdir) if workdir else None
        machine = [*machine_rows(directory)]
        interpreter, gpus = asked_interpreter.result(), asked_gpus.result()
        code = asked_code.result() if asked_code else None
    interfaces = outward_interfaces()
    address = own_address(interfaces, os.environ)
    rows = [own_python_row(), *interpreter_rows(python, interpreter), *gpu_rows(gpus, interpreter)]
    rows += [*code_rows(workdir, code), *network_rows(interfaces, address), *machine]
    facts = Facts(
        hostname=socket.gethostname()[:256],
        rankdeck=version("rankdeck")[:64],
        python=interpreter.python[:64],
        torch=interpreter.torch[:64],
        cuda=interpreter.cuda[:64],
        nccl=interpreter.nccl[:64],
        driver=gpus.driver_version if gpus else "",
        gpus=models(gpus),
        address=address,
        interfaces=interfaces,
        code=code,
    )
    return Examination(1, [_bounded(row) for row in rows[:MAX_ROWS]], facts)


def _bounded(row: Row) -> Row:
    detail, todo = (utf8_text(text, MAX_DETAIL) for text in (row.detail, row.todo))
    return msgspec.structs.replace(row, detail=detail, todo=todo)
