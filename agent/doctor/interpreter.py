"""Checks the interpreter of the jobs and its torch, in a process of its own, which may take its time.

`ask_program` runs a program for a limited time: what it starts itself ends with it. `utf8_text` makes text of a file
system or of the kernel, which need not be UTF-8, fit for JSON.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from agent.wire.examination import Health, Row

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

MIN_TORCH = (2, 8)
MIN_PYTHON = (3, 11)
ANSWER_S = 30.0
"""Seconds to wait: a first import of torch from a network's disk takes that long; a console waits 45 s for all."""
MAX_ERROR_CHARS = 300
_NUM_PARTS = 2
_ASK = """
import json, sys, time, importlib.metadata as metadata, importlib.util
def report(**facts):
    print("\\n" + json.dumps(facts), flush=True)
try:
    version = metadata.version("torch")
except metadata.PackageNotFoundError:
    version = ""
is_missing = importlib.util.find_spec("torch") is None
report(python=".".join(map(str, sys.version_info[:3])), torch=version, is_missing=is_missing)
if not is_missing:
    began_s = time.monotonic()
    import torch
    import_s = time.monotonic() - began_s
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    report(
        torch=str(torch.__version__),
        cuda=torch.version.cuda or ("hip " + torch.version.hip if torch.version.hip else ""),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "",
        is_distributed=torch.distributed.is_available(),
        is_imported=True,
        import_s=import_s,
    )
    report(num_gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0)
"""


class Interpreter(msgspec.Struct, frozen=True):
    """Answer of the interpreter; what it has not answered is empty."""

    python: str = ""
    torch: str = ""
    cuda: str = ""
    nccl: str = ""
    is_distributed: bool = True
    num_gpus: int | None = None
    """GPUs that torch can use; None is unknown."""
    is_imported: bool = False
    import_s: float = 0.0
    """Seconds that `import torch` took."""
    is_missing: bool = False
    """True if torch is not installed."""
    error: str = ""
    """Exception of `import torch` or of its look at the GPUs, or why there is no answer."""


def ask_interpreter(python: str, timeout_s: float = ANSWER_S) -> Interpreter:
    """Return an interpreter's answer about itself and its torch."""
    try:
        # In the root directory: what lies where the console's login begins is not what a job imports.
        output = ask_program([python, "-c", _ASK], timeout_s, cwd="/", environ=os.environ)
    except (OSError, ValueError) as error:
        return Interpreter(error=f"{python} does not run: {error}")
    fields: dict[str, object] = {}
    for line in output.stdout.splitlines():
        try:
            fields |= msgspec.json.decode(line, type=dict)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue  # a site's own start-up may print
    try:
        found = msgspec.convert(fields, Interpreter)
    except msgspec.ValidationError as error:
        return Interpreter(error=f"{python} is no Python: {error}")
    if output.exit_code is None:
        return msgspec.structs.replace(found, error=f"no answer within {timeout_s:.0f} s")
    ending = f"it ended by signal {-output.exit_code}" if output.exit_code < 0 else f"exit code {output.exit_code}"
    why = output.last_error or ending
    if not found.python:
        return Interpreter(error=f"{python} is no Python: {why}")
    return found if found.num_gpus is not None or found.is_missing else msgspec.structs.replace(found, error=why)


def interpreter_rows(python: str, found: Interpreter) -> Iterator[Row]:
    """Yield the rows about the jobs' interpreter and its torch."""
    if not found.python:
        yield Row("job_python", Health.BAD, found.error[:MAX_ERROR_CHARS], "name the Python of the jobs: --job-python")
        return
    if numbers(found.python) < MIN_PYTHON:
        yield Row("job_python", Health.WARN, f"Python {found.python}", "use 3.11 or newer")
    else:
        yield Row("job_python", Health.OK, f"Python {found.python}")
    yield from _torch_rows(python, found)


def _torch_rows(python: str, found: Interpreter) -> Iterator[Row]:
    if found.is_missing:
        yield Row("torch", Health.BAD, f"{python} has no torch", f"{python} -m pip install torch")
    elif not found.is_imported:
        version = found.torch or "of an unknown version"
        problem = f"torch {version} cannot be imported: {found.error[:MAX_ERROR_CHARS]}"
        is_late = found.error.startswith("no answer")
        todo = "is its disk slow? try" if is_late else "try"
        status = Health.WARN if is_late else Health.BAD
        yield Row("torch", status, problem, f"{todo}: {python} -c 'import torch'")
    elif not found.is_distributed:
        yield Row("torch", Health.BAD, f"{found.torch} is built without torch.distributed", "install another build")
    elif numbers(found.torch) < MIN_TORCH:
        yield Row("torch", Health.WARN, found.torch, "2.8 or newer lets the console see collectives")
    else:
        yield Row("torch", Health.OK, found.torch)
    if found.is_imported:
        yield Row("nccl", Health.OK, found.nccl or "this torch has none: gloo connects the ranks")
    if found.is_imported and found.num_gpus is None and found.error:
        problem = f"torch cannot look at the GPUs: {found.error[:MAX_ERROR_CHARS]}"
        # A slow import may have left the look too little time.
        status = Health.WARN if found.import_s > ANSWER_S / 2 else Health.BAD
        todo = "does nvidia-smi answer? persistence mode makes it fast (nvidia-smi -pm 1); or look at dmesg for Xid"
        yield Row("torch_gpus", status, problem, todo)


def numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: `2.13.0+cpu` is (2, 13)."""
    parts = version.split(".")[:_NUM_PARTS]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in parts)


def own_python_row() -> Row:
    """Return the row about the Python that runs rankdeck."""
    return Row("agent_python", Health.OK, f"Python {'.'.join(map(str, sys.version_info[:3]))}")


END_S = 1.0
"""Seconds that a killed program has to be gone; one that hangs in the kernel is left behind."""


class Output(NamedTuple):
    """Output of a program."""

    exit_code: int | None
    """Exit code; None when it ran out of time."""
    stdout: bytes
    last_error: str
    """The last line of its standard error."""


def ask_program(argv: Sequence[str], timeout_s: float, *, cwd: str, environ: Mapping[str, str]) -> Output:
    """Run a program without input to its end, or kill it with all of its session; raise OSError if it cannot start."""
    process = subprocess.Popen(
        argv,
        cwd=cwd,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    with contextlib.ExitStack() as streams:
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                streams.callback(stream.close)
        exit_code: int | None = None
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
            exit_code = process.returncode
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            try:
                stdout, stderr = process.communicate(timeout=END_S)
            except subprocess.TimeoutExpired as error:
                stdout, stderr = error.stdout or b"", error.stderr or b""
                process.returncode = process.returncode or 0  # an abandoned child is no resource that we forgot
    lines = stderr.decode(errors="replace").strip().splitlines() or [""]
    return Output(exit_code, stdout, lines[-1])


def utf8_text(text: str, max_chars: int) -> str:
    """Return text in which each byte that was no UTF-8, a lone surrogate, has a mark in its place. Source: PEP 383."""
    return text.encode(errors="surrogateescape").decode(errors="replace")[:max_chars]
