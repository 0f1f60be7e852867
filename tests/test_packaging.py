"""What people install carries everything that they can use."""

import configparser
import tarfile
import tomllib
import zipfile
from shutil import copytree, ignore_patterns

import pytest

from tests.module_map import PACKAGE, ROOT
from tests.support import run_python

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Where each top-level folder goes inside the package.
MAPPED = {"callbacks", "configs", "examples"}

pytestmark = pytest.mark.skipif(not PACKAGE.is_dir(), reason="needs the source tree")


def sources(folder):
    """Yield the files of a top-level folder by the names that they have inside the package."""
    for file in (ROOT / folder).rglob("*"):
        if file.suffix in (".py", ".yaml"):
            yield f"offload_strategy/{file.relative_to(ROOT)}"


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """Build the source distribution, and the wheel from it, in a copy of the tree."""
    pytest.importorskip("build")
    tree = tmp_path_factory.mktemp("tree") / "offload-strategy"
    leave_out = ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "tests")
    copytree(ROOT, tree, symlinks=True, ignore=leave_out)
    output = tmp_path_factory.mktemp("dist")
    run_python("-m", "build", "--no-isolation", "--outdir", output, tree)
    return output


@pytest.fixture(scope="module")
def wheel(dist):
    (file,) = dist.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        yield archive


@pytest.mark.slow
def test_the_wheel_carries_all_that_people_can_use_once(wheel):
    names = wheel.namelist()
    assert len(names) == len(set(names))
    expected = {"offload_strategy/py.typed", "offload_strategy/engine/run_report.html"}
    expected |= {name for folder in MAPPED for name in sources(folder)}
    expected |= {str(file.relative_to(ROOT)) for file in PACKAGE.rglob("*.py")}
    assert expected <= set(names)
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"offload_strategy"}
    assert any(name.endswith("/LICENSE") for name in names)
    (entry_points,) = [name for name in names if name.endswith("entry_points.txt")]
    parser = configparser.ConfigParser()
    parser.read_string(wheel.read(entry_points).decode())
    assert parser["torch.backends"]["ssd_offload"] == "offload_strategy.autoload:register"
    assert parser["console_scripts"]["ssd-offload"] == "offload_strategy.cli:program"


@pytest.mark.slow
def test_the_presets_of_the_wheel_are_read_without_the_source_tree(wheel, tmp_path):
    wheel.extractall(tmp_path)
    # -P keeps the working directory out; the extracted wheel goes before what is installed.
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
        "import offload_strategy.config as c; print(c.__file__); "
        "print(*c.presets()); print(c.OffloadConfig.load('full').optimizer.enabled)"
    )
    file, names, enabled = run_python("-P", "-c", code, cwd=tmp_path).splitlines()
    assert file.startswith(str(tmp_path))
    assert (names, enabled) == ("activations full optimizer", "True")


@pytest.mark.slow
def test_the_source_distribution_carries_what_the_wheel_is_built_from(dist):
    (file,) = dist.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    inside = {name for folder in MAPPED for name in sources(folder)}
    assert {name.removeprefix("offload_strategy/") for name in inside} <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "offload_strategy/py.typed"} <= names


def test_every_module_has_a_layer():
    layers = {
        part.strip()
        for contract in PROJECT["tool"]["importlinter"]["contracts"]
        for layer in contract.get("layers", [])
        for part in layer.replace("|", ":").split(":")
    }
    modules = {
        f"offload_strategy.{entry.stem}"
        for entry in PACKAGE.iterdir()
        if (entry.is_dir() and entry.name != "__pycache__") or entry.suffix == ".py"
    }
    # The root imports the public names; autoload has a contract of its own.
    assert modules - {"offload_strategy.__init__", "offload_strategy.autoload"} - layers == set()


def test_the_links_for_tools_lead_to_the_mapped_folders():
    for folder in MAPPED:
        assert (PACKAGE / folder).resolve() == ROOT / folder
        assert PROJECT["tool"]["setuptools"]["package-dir"][f"offload_strategy.{folder}"] == folder
