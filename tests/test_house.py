"""What holds the house together: set-up, dependencies, and the rules that no linter checks."""

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LINES_PER_MODULE = 400
TORCH_FREE = [f"shardshift.{layer}" for layer in ("values", "models", "plan", "schedule", "simulator")]

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = [
    Requirement(line)
    for lines in [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for line in lines
]


def pins() -> dict[str, str]:
    found: dict[str, str] = {}
    for line in (ROOT / "constraints" / "dev.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            found[canonicalize_name(name)] = version
    return found


def commands_in(markdown: str) -> Iterator[str]:
    """Lines of fenced blocks and inline code: what a reader would type."""
    fence = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    for block in fence.findall(markdown):
        yield from block.splitlines()[1:-1]
    yield from re.findall(r"`([^`\n]+)`", fence.sub("", markdown))


def make_targets_in(markdown: str) -> set[str]:
    targets: set[str] = set()
    for line in commands_in(markdown):
        for command in re.split(r"&&|\|\||;|\|", line):
            words = shlex.split(command.removeprefix("$ "), comments=True, posix=True) if "make" in command else []
            if words[:1] == ["make"]:
                targets |= {word for word in words[1:] if re.fullmatch(r"[a-z][a-z0-9-]*", word)}
    return targets


def test_readme_names_only_make_targets_that_exist() -> None:
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("there is no README.md yet")
    rules = set(re.findall(r"^([a-z][a-z0-9-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert make_targets_in(readme.read_text()) <= rules


@pytest.mark.parametrize(
    ("markdown", "targets"),
    [
        ("Run `make demo`, then make sure.", {"demo"}),
        ('```sh\n$ make demo ARGS="--quick all" && cd x && make test  # or make lint\n```', {"demo", "test"}),
        ("`make PYTHON=python3.12 -s check lint`", {"check", "lint"}),
        ("`remake it`, `cmake build`", set()),
    ],
)
def test_make_targets_are_read_from_code_only(markdown: str, targets: set[str]) -> None:
    assert make_targets_in(markdown) == targets


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_a_requirement_has_a_lower_bound_and_nothing_that_could_replace_an_installed_package(
    requirement: Requirement,
) -> None:
    assert [specifier.operator for specifier in requirement.specifier] == [">="], (
        f"{requirement}: only a lower bound is allowed, pins belong into constraints/dev.txt"
    )
    assert requirement.url is None


def test_python_has_no_upper_bound() -> None:
    assert [specifier.operator for specifier in SpecifierSet(PROJECT["requires-python"])] == [">="]


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_a_requirement_is_pinned_to_a_version_that_it_allows(requirement: Requirement) -> None:
    version = pins().get(canonicalize_name(requirement.name))
    assert version is not None, f"constraints/dev.txt has no pin for {requirement.name}"
    assert requirement.specifier.contains(version, prereleases=True)


def test_constraints_are_exact_pins() -> None:
    loose = [name for name, version in pins().items() if not re.fullmatch(r"\d[\w.]*", version)]
    assert not loose, f"constraints/dev.txt: not pinned as name==version, without a local label: {loose}"


def test_modules_are_short() -> None:
    lengths = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in (ROOT / "src").rglob("*.py")}
    long = [f"{path} ({lines})" for path, lines in sorted(lengths.items()) if lines > LINES_PER_MODULE]
    assert not long, f"longer than {LINES_PER_MODULE} lines, split by idea: {', '.join(long)}"


@pytest.mark.parametrize("module", TORCH_FREE)
def test_planning_and_simulation_start_without_torch(module: str) -> None:
    """In a fresh interpreter, through shardshift/__init__.py, which therefore must stay lazy (PEP 562)."""
    script = (
        f"import sys, {module}\n"
        "heavy = {name.partition('.')[0] for name in sys.modules} & {'torch', 'megatron'}\n"
        "sys.exit(f'imports {sorted(heavy)}' if heavy else 0)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, f"{module}: {run.stderr}"
