"""Tests that a checkout can be imported, whether or not the package is installed."""

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


def run(code, folder, *paths):
    """Run ``code`` in ``folder`` without any installed staticllm, not even an editable installation."""
    before = "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '')]"
    lines = [before, "sys.path[:0] = " + repr([str(path) for path in paths]), code]
    found = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=folder, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.split()


def test_the_pipeline_and_its_rooms_come_from_the_checkout(checkout):
    rooms = ", ".join(f"staticllm.{room}" for room in ROOMS)
    code = f"import {rooms}; print({', '.join(f'staticllm.{room}.__file__' for room in ROOMS)})"
    assert run(code, checkout) == [str(checkout / room / "__init__.py") for room in ROOMS]
    assert run("from staticllm import StaticLLMPipeline as P; print(P.__module__)", checkout) == [
        "staticllm.pipelines.llm_pipeline"
    ]


def test_a_checkout_is_found_from_anywhere_by_its_path(checkout, tmp_path):
    code = "import staticllm.kvcache.cache as cache; print(cache.__file__)"
    assert run(code, tmp_path, checkout) == [str(checkout / "kvcache" / "cache.py")]


def test_an_applications_own_pipelines_is_not_shadowed(checkout, tmp_path):
    (tmp_path / "pipelines.py").write_text("mine = True")
    assert run("import staticllm.pipelines, pipelines; print(pipelines.mine)", tmp_path, tmp_path, checkout) == ["True"]
    installed = tmp_path / "site"  # an installed package does not search the folder beside it
    for folder, place in zip(FOLDERS, (".", *ROOMS), strict=True):
        shutil.copytree(checkout / folder, installed / "staticllm" / place, dirs_exist_ok=True)
    shutil.copytree(checkout / "pipelines", installed / "pipelines")
    code = "import staticllm.pipelines; print(len(staticllm.__path__), staticllm.pipelines.__file__)"
    assert run(code, tmp_path, installed) == ["1", str(installed / "staticllm" / "pipelines" / "__init__.py")]


def test_walking_the_package_finds_every_module_once(checkout):
    code = (
        "import pkgutil, staticllm; print(*(m.name for m in pkgutil.walk_packages(staticllm.__path__, 'staticllm.')))"
    )
    names = run(code, checkout)
    assert len(names) == len(set(names))
    assert {f"staticllm.{room}" for room in ROOMS} <= set(names)
    assert "staticllm.pipelines.llm_pipeline" in names
    assert "staticllm.staticllm.core" not in names


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
