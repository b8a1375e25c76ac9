"""Which wheels go along: those that fit the Python of the host and that it lacks, with what they need themselves."""

from __future__ import annotations

import pytest

from app.install.wheels import FarPython, Package, Wheel, fits, needed, wheel_of

THERE = FarPython((3, 12, 1), "/usr/bin/python3", machine="x86_64")


def wheel(name: str, *requires: str) -> Wheel:
    found = wheel_of(f"/wheels/{name}.whl", requires=requires)
    assert found is not None
    return found


def test_the_name_of_a_wheel_says_what_it_is() -> None:
    found = wheel("Google_RE2-1.1-2-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64")

    assert (found.name, found.version, found.pythons, found.abis) == (
        "google-re2",
        "1.1",
        frozenset({"cp311"}),
        frozenset({"cp311"}),
    )
    assert found.platforms == {"manylinux2014_x86_64", "manylinux_2_17_x86_64"}
    assert found.file_name.startswith("Google_RE2-1.1-2-")
    assert wheel_of("/wheels/click-8.1.tar.gz") is None
    assert wheel_of("/wheels/click.whl") is None


@pytest.mark.parametrize(
    ("name", "does"),
    [
        ("a-1-py3-none-any", True),
        ("a-1-py2.py3-none-any", True),
        ("a-1-py2-none-any", False),
        ("a-1-py313-none-any", False),
        ("a-1-cp312-cp312-manylinux_2_17_x86_64", True),
        ("a-1-cp312-cp312-linux_x86_64", True),
        ("a-1-cp311-cp311-manylinux_2_17_x86_64", False),
        ("a-1-cp312-cp312-manylinux_2_17_aarch64", False),
        ("a-1-cp312-cp312-musllinux_1_2_x86_64", False),
        ("a-1-cp312-cp312-macosx_11_0_x86_64", False),
        ("a-1-cp312-cp312-win_amd64", False),
        ("a-1-cp39-abi3-manylinux_2_34_x86_64", True),
        ("a-1-cp313-abi3-manylinux_2_34_x86_64", False),
        ("a-1-py3-none-manylinux_2_17_x86_64", True),
    ],
)
def test_a_wheel_fits_a_python_or_it_does_not(name: str, does: bool) -> None:
    assert fits(wheel(name), THERE) is does


def test_a_host_with_musl_takes_the_wheels_of_musl() -> None:
    there = FarPython((3, 12, 1), "python", machine="aarch64", is_musl=True)

    assert fits(wheel("a-1-cp312-cp312-musllinux_1_2_aarch64"), there)
    assert not fits(wheel("a-1-cp312-cp312-manylinux_2_17_aarch64"), there)


def python_with(**versions: str) -> FarPython:
    installed = {name: Package(version) for name, version in versions.items()}
    return FarPython((3, 12, 1), "python", machine="x86_64", installed=installed)


def names(*wheels: Wheel) -> list[str]:
    return sorted(wheel.file_name.removesuffix("-py3-none-any.whl") for wheel in wheels)


def test_what_is_required_comes_with_what_that_requires_and_nothing_else() -> None:
    house = [
        wheel("textual-8.2-py3-none-any", "rich>=14", "markdown-it-py[linkify]>=2.1", 'tree-sitter; extra == "syntax"'),
        wheel("rich-15.0-py3-none-any", 'markdown_it_py>=2.2; python_version >= "3.8"'),
        wheel(
            "markdown_it_py-4.0-py3-none-any", "mdurl~=0.1", 'linkify-it-py<3,>=1; extra == "linkify"', "x; extra=='t'"
        ),
        wheel("mdurl-0.1-py3-none-any", "textual"),
        wheel("linkify_it_py-2.0-py3-none-any"),
        wheel("tree_sitter-1.0-py3-none-any"),
        wheel("torch-2.13-py3-none-any"),
        wheel("x-1-py3-none-any"),
    ]

    choice = needed(["textual>=8.2,<9", 'torch>=2.8; extra == "train"'], house, THERE)

    assert names(*choice.wheels) == ["linkify_it_py-2.0", "markdown_it_py-4.0", "mdurl-0.1", "rich-15.0", "textual-8.2"]
    assert choice.unavailable == ()


def test_what_the_host_has_stays_there() -> None:
    there = python_with(numpy="2.0", click="8.1.8", psutil="7.0", msgspec="0.19rc1")
    house = [wheel(f"{name}-9-py3-none-any") for name in ("numpy", "click", "psutil", "msgspec")]

    choice = needed(["numpy>=1.26", "click>=8.2", "psutil (>=6,<7.0)", "msgspec>=0.19"], house, there)

    assert names(*choice.wheels) == ["click-9", "msgspec-9", "psutil-9"], "too old, too new, and not certain"


def test_what_is_there_may_lack_something_itself() -> None:
    there = FarPython((3, 12, 1), "python", installed={"textual": Package("8.2.8", ("rich>=14", "pygments"))})

    choice = needed(["textual>=8.2,<9"], [wheel("rich-15.0-py3-none-any")], there)

    assert (names(*choice.wheels), choice.unavailable) == (["rich-15.0"], ("pygments",))


def test_what_is_neither_there_nor_brought_along_is_named() -> None:
    there = python_with(click="7.0")
    house = [wheel("pyzmq-27-cp311-cp311-manylinux_2_26_x86_64"), wheel("rich-15.0-py3-none-any", "pygments")]

    choice = needed(["click>=8.2", "pyzmq>=26", "rich", 'colorama; sys_platform == "win32"'], house, there)

    assert choice.unavailable == ("pygments", "pyzmq"), (
        "of click pip judges the version, colorama may not be wanted at all"
    )
    assert names(*choice.wheels) == ["rich-15.0"]


def test_wheels_that_require_each_other_come_once() -> None:
    house = [wheel("a-1-py3-none-any", "b"), wheel("b-1-py3-none-any", "a")]

    assert names(*needed(["a"], house, THERE).wheels) == ["a-1", "b-1"]
