"""What a person gets wrong costs them one line, and nothing is started."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from tests.support.demo_runs import DemoHouse

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def house() -> Iterator[DemoHouse]:
    with DemoHouse() as house:
        yield house


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", "0"], "--ranks"),
        (["--ranks", "33"], "--ranks"),
        (["--steps", "0"], "--steps"),
        (["--fault", "frieze:2@10"], "did you mean freeze?"),
        (["--fault", "skip-bariere:2@10"], "did you mean skip-barrier?"),
        (["--fault", "freeze"], "KIND:RANK@STEP"),
        (["--fault", "freeze:4@10"], "ranks 0 to 3"),
        (["--fault", "freeze:2@500"], "steps 1 to 200"),
        (["--fault", "freeze:2@0"], "steps 1 to 200"),
        (["--port", "70000"], "--port"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_a_wrong_option_is_refused_with_exit_code_2(house: DemoHouse, options: list[str], words: str) -> None:
    done = house.run("--headless", *options, within_s=90)

    assert done.code == 2
    (line,) = done.said()
    assert words in line
    assert done.stdout == ""
    house.assert_nothing_is_left()


def test_a_taken_port_is_named_with_the_process_that_holds_it(house: DemoHouse) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]

        done = house.run("--headless", "--port", str(port), within_s=90)

    assert done.code == 4
    assert f"{port}" in done.said()[-1]
    assert "pid" in done.said()[-1]
    assert "Traceback" not in done.stderr
    house.assert_nothing_is_left()


def test_without_torch_the_extra_to_install_is_said(house: DemoHouse) -> None:
    hidden = house.directory / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': raise ModuleNotFoundError(name)\n"
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'torch' else find(name, package)\n"
    )
    process = house.start("--headless", environment={**house.environment, "PYTHONPATH": str(hidden)})

    _, stderr = process.communicate(timeout=90)

    assert process.returncode == 2
    assert "pip install '.[train]'" in stderr
    assert len(stderr.strip().splitlines()) == 1
    house.assert_nothing_is_left()


def test_a_runtime_directory_with_too_long_a_name_is_said(house: DemoHouse) -> None:
    long = house.runtime / ("x" * 100)
    long.mkdir()
    process = house.start(
        "--headless", environment={**house.environment, "XDG_RUNTIME_DIR": str(long), "TMPDIR": str(long)}
    )

    _, stderr = process.communicate(timeout=90)

    assert process.returncode == 2
    assert "too long a name" in stderr
    assert len(stderr.strip().splitlines()) == 1
    assert list(long.iterdir()) == []
