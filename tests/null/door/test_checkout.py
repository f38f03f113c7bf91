"""Tests where the package is found: installed, installed as editable, and in a checkout that is not installed."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
import types

import pytest

FOLDERS = ("staticllm", "compiler_passes", "kvcache", "pipelines")
ROOMS = FOLDERS[1:]


@pytest.fixture(scope="module")
def checkout(root, tmp_path_factory):
    """A copy of the source folders, without the weights of the embedded model."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in FOLDERS:
        shutil.copytree(root / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "*.bin"))
    return copy


@pytest.fixture(scope="module")
def installed(checkout, tmp_path_factory):
    """The folders as they install."""
    site = tmp_path_factory.mktemp("site")
    for folder, place in zip(FOLDERS, (".", *ROOMS), strict=True):
        shutil.copytree(checkout / folder, site / "staticllm" / place, dirs_exist_ok=True)
    return site


def run(code, folder, *paths):
    """Run ``code`` in ``folder`` without any installed staticllm, not even an editable installation."""
    before = "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '')]"
    lines = [before, "sys.path[:0] = " + repr([str(path) for path in paths]), code]
    return subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=folder, capture_output=True, text=True, check=False
    )


def words(code, folder, *paths):
    found = run(code, folder, *paths)
    assert found.returncode == 0, found.stderr
    return found.stdout.split()


@pytest.mark.parametrize(
    "code", ["import staticllm", "from staticllm import StaticLLMPipeline", "import staticllm.cli"]
)
def test_a_checkout_that_is_not_installed_says_what_to_do(checkout, code):
    found = run(code, checkout)
    assert found.returncode == 1
    line = found.stderr.splitlines()[-1]
    assert f"{checkout} is not installed in this environment: run `python -m pip install -e {checkout}`" in line


def test_an_editable_installation_finds_the_rooms_and_nothing_else(root, tmp_path):
    places = {"staticllm": root / "staticllm", **{f"staticllm.{room}": root / room for room in ROOMS}}
    names = list(places)
    code = f"import {', '.join(names)}; print(*({'.__file__, '.join(names)}.__file__,))"
    for folder in (root, tmp_path):  # in the checkout, and elsewhere
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [str(place / "__init__.py") for place in places.values()]
    for name in ("tests", "scripts", "staticllm"):
        found = subprocess.run(
            [sys.executable, "-c", f"import staticllm.{name}"], cwd=root, capture_output=True, check=False
        )
        assert f"No module named 'staticllm.{name}'" in found.stderr.decode()


def test_an_applications_own_pipelines_is_not_shadowed(installed, tmp_path):
    (tmp_path / "pipelines.py").write_text("mine = True")
    code = "import staticllm.pipelines as p, pipelines; print(pipelines.mine, len(p.__path__), p.__file__)"
    expected = ["True", "1", str(installed / "staticllm" / "pipelines" / "__init__.py")]
    assert words(code, tmp_path, tmp_path, installed) == expected


def test_walking_the_package_finds_every_module_once(installed, tmp_path):
    code = (
        "import pkgutil, staticllm; print(*(m.name for m in pkgutil.walk_packages(staticllm.__path__, 'staticllm.')))"
    )
    names = words(code, tmp_path, installed)
    assert len(names) == len(set(names))
    assert {f"staticllm.{room}" for room in ROOMS} <= set(names)
    assert "staticllm.pipelines.llm_pipeline" in names


def test_pyinstaller_looks_where_python_does(root, checkout, tmp_path):
    """PyInstaller follows import statements without running any code, so a hook must name the folders."""
    hook = runpy.run_path(
        str(root / "staticllm" / "pyinstaller" / "pre_safe_import_module" / "hook-staticllm.py")
    )["pre_safe_import_module"]  # fmt: skip
    installed = tmp_path / "site"
    (installed / "staticllm" / "pipelines").mkdir(parents=True)
    (installed / "staticllm" / "__init__.py").touch()
    for path, expected in ((checkout, [str(checkout)]), (installed, []), (tmp_path, [])):
        added: list[str] = []
        graph = types.SimpleNamespace(path=[str(path)])
        hook(types.SimpleNamespace(module_graph=graph, append_package_path=added.append))
        assert added == expected
