"""PyInstaller runs this before it follows the imports of staticllm: in a checkout three of its packages lie beside the fourth.

PyInstaller reads source files and runs none, so it does not see the finder of an editable installation.
"""

from __future__ import annotations

from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any


def pre_safe_import_module(api: Any) -> None:
    """Let PyInstaller look for packages of staticllm where the running package looks."""
    spec = PathFinder.find_spec("staticllm", api.module_graph.path)
    if spec is None or spec.origin is None:
        return
    package = Path(spec.origin).parent
    if (package.parent / "pipelines" / "llm_pipeline.py").is_file() and not (package / "pipelines").is_dir():
        api.append_package_path(str(package.parent))
