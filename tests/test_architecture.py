"""The rules of the house that a tool can check."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("app", "agent", "ddpcore")
FORBIDDEN_NAMES = {"utils", "helpers", "common", "misc", "base", "manager", "handler", "processor", "data"}
TORCH_FREE = (
    "agent.cli",
    "agent.daemon",
    "agent.doctor.examine",
    "agent.machine.gpu_sampler",
    "agent.processes.shim",
    "app.cli.main",
    "app.cli.control",
    "app.cli.run",
    "app.cli.run",
    "app.session.demo",
    "app.cli.headless",
    "app.install.installer",
    "app.fleet.host_link",
    "app.session.remote_session",
    "app.tui.console",
    "ddpcore",
    "ddpcore.barriers",
    "ddpcore.checkpoint.cli",
    "ddpcore.env",
    "ddpcore.probe.rank_state",
    "ddpcore.wire",
    "ddpcore.wire_stacks",
)


def source_files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("module", TORCH_FREE)
def test_importing_it_never_imports_torch(module: str) -> None:
    proof = f"import sys, {module}; sys.exit(' '.join(m for m in sys.modules if m.split('.')[0] == 'torch') or 0)"

    done = subprocess.run([sys.executable, "-P", "-c", proof], capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr


def test_a_rank_needs_torch_and_what_rankdeck_requires_without_an_extra() -> None:
    proof = "import sys; sys.modules |= dict.fromkeys(['packaging', 'safetensors']); from ddpcore.engine import engine"

    done = subprocess.run([sys.executable, "-P", "-c", proof], capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["app.cli.headless", "app.session.session", "app.view.view"])
def test_what_runs_without_a_screen_never_imports_textual(module: str) -> None:
    screens = "('textual', 'rich')"
    proof = f"import sys, {module}; sys.exit(' '.join(m for m in sys.modules if m.split('.')[0] in {screens}) or 0)"

    done = subprocess.run([sys.executable, "-P", "-c", proof], capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr


def test_the_gpu_sampler_is_light() -> None:
    heavy = "('asyncio', 'psutil', 'numpy', 'zmq', 'click')"
    proof = f"import sys, agent.machine.gpu_sampler; sys.exit(' '.join(m for m in sys.modules if m in {heavy}) or 0)"

    done = subprocess.run([sys.executable, "-P", "-c", proof], capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr


def test_the_demo_does_not_pay_for_ssh() -> None:
    proof = "import sys, app.cli.main, app.cli.run, app.tui.console; sys.exit('paramiko' in sys.modules)"

    done = subprocess.run([sys.executable, "-P", "-c", proof], capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0


@pytest.mark.parametrize("module", ["agent.daemon", "app.session.remote_session"])
def test_who_serves_no_relay_and_dials_none_pays_for_no_gate(module: str) -> None:
    proof = f"import sys, {module}; sys.exit('zmq.auth' in sys.modules)"

    done = subprocess.run([sys.executable, "-P", "-c", proof], capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr


def test_no_file_is_longer_than_500_lines() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in source_files()
        if (count := len(path.read_text().splitlines())) > 500
    }

    assert long == {}


def test_the_console_app_stays_under_200_lines() -> None:
    assert len((ROOT / "app/tui/console.py").read_text().splitlines()) < 200


def test_no_file_has_a_name_that_says_nothing() -> None:
    assert [path for path in source_files() if path.stem in FORBIDDEN_NAMES] == []


def package_files() -> list[Path]:
    return [path for path in source_files() if path.name == "__init__.py"]


def is_lazy(package_file: Path) -> bool:
    return "__getattr__ = lazy_names(" in package_file.read_text()


def test_every_package_file_without_lazy_names_holds_only_a_docstring() -> None:
    plain = [path for path in package_files() if not is_lazy(path)]

    assert plain
    for path in plain:
        text = path.read_text().strip()
        assert text.startswith('"""'), path
        assert text.endswith('"""'), path
        assert text.count('"""') == 2, path


def test_every_lazy_name_is_there() -> None:
    packages = [".".join(path.parent.relative_to(ROOT).parts) for path in package_files() if is_lazy(path)]

    assert "ddpcore.samplers" in packages
    for package in packages:
        module = importlib.import_module(package)
        assert [name for name in module.__all__ if getattr(module, name).__name__ != name] == []
        with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'never'"):
            _ = module.never


def ruff_wants_docstrings(file: str) -> bool:
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "D103", "--stdin-filename", file, "-"]
    text = "def public() -> None:\n    pass\n"
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, timeout=60, check=False)
    return "D103" in done.stdout


def test_what_others_write_against_has_docstrings_on_everything() -> None:
    packages = [".".join(path.parent.relative_to(ROOT).parts) for path in package_files() if is_lazy(path)]
    shown = {
        getattr(module, name).__module__ for module in map(importlib.import_module, packages) for name in module.__all__
    }

    assert [module for module in sorted(shown) if not ruff_wants_docstrings(f"{module.replace('.', '/')}.py")] == []
    for file in ("agent/wire/reports.py", "agent/cli.py", "app/cli/main.py", "app/cli/run.py", "ddpcore/wire.py"):
        assert ruff_wants_docstrings(file), file
    assert not ruff_wants_docstrings("app/diagnosis/verdicts.py")


def test_the_launch_plug_in_is_never_declared_by_the_distribution() -> None:
    assert "entry-points" not in (ROOT / "pyproject.toml").read_text()


def test_broad_excepts_stand_in_four_places_only() -> None:
    allowed = {
        "ddpcore/probe/probe.py",  # the probe's loop must never hurt training
        "ddpcore/launch_plugin/rankdeck_plugin.py",  # anything that escapes breaks the user's `import torch`
        "agent/daemon.py",  # one bad message must not end the daemon
        "app/cli/main.py",
    }

    found = {
        str(path.relative_to(ROOT))
        for path in source_files()
        if "except Exception" in path.read_text() or "except BaseException" in path.read_text()
    }

    assert found <= allowed


def test_nothing_unpickles_but_dumps_of_torch_s_recorder_and_those_without_globals() -> None:
    found = [path for path in source_files() if "import pickle" in path.read_text()]

    assert [path.name for path in found] == ["dumps.py"]
    assert "pickle.load" not in found[0].read_text()
