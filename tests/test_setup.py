"""One list of pins: environment.yml, what make installs, what pyproject accepts and what is installed here agree."""

import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
CHOSEN = {"jupyterlab", "torch", "triton", "matplotlib", "pandas", "ipywidgets", "papermill"}


def conda_pins() -> dict[str, str]:
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    lines = next(item["pip"] for item in listed if isinstance(item, dict))
    found = dict(line.split("==") for line in lines if not line.startswith("-e"))
    assert len(found) == len(lines) - 1, "environment.yml holds a line that is no exact pin"
    return {canonicalize_name(name): version for name, version in found.items()}


def make_pins() -> dict[str, str]:
    printed = subprocess.run(["make", "-s", "pins"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in printed.split())}


def test_make_installs_what_conda_lists():
    assert make_pins() == conda_pins()
    assert CHOSEN <= set(make_pins())
    assert make_pins()["torch"] == "2.13.0"


def test_pins_are_within_pyprojects_ranges_and_all_are_listed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = [line for group in project["optional-dependencies"].values() for line in group]
    pins = conda_pins()
    for requirement in map(Requirement, project["dependencies"] + optional):
        version = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} does not admit the pin {version}"


@pytest.mark.parametrize("name,version", sorted(conda_pins().items()))
def test_the_pin_is_what_is_installed(name, version):
    assert metadata.version(name).split("+")[0] == version


def test_rooms_import_downwards_only():
    rooms = ["common", "numerics", "schedules", "kernels", "engine", "hooks", "serving", "studies", "reporting"]
    library = ROOT / "lib" / "batch_variance"
    for place, room in enumerate(rooms):
        for file in (library / room).rglob("*.py"):
            depth = len(file.relative_to(library).parts)
            for dots, target in re.findall(r"^\s*from (\.+)([a-z0-9_]*)", file.read_text(), flags=re.M):
                if len(dots) == depth and target:
                    assert target in rooms[: place + 1], f"{file} in {room} imports {target}"


def test_nothing_edits_sys_path_or_imports_lib():
    for file in (ROOT / "lib").rglob("*.py"):
        assert not re.search(r"sys\.path|^\s*(from|import) lib\b", file.read_text(), flags=re.M), file
