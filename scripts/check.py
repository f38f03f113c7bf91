"""Runs all checks except the tests: ruff, mypy and pyright on the installed package, sizes, the wheel and a smoke run.

python scripts/check.py           # all checks
python scripts/check.py --no-wheel
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import draw_imports
from _setup import ROOT, ensure_environment, make_environment, run

FOLDERS = {"staticllm": "", "compiler_passes": "compiler_passes", "kvcache": "kvcache", "pipelines": "pipelines"}
MAX_FUNCTION_LINES, MAX_LONG_SHARE = 50, 0.03
GENERATED = (
    "docs/errors.md",
    "docs/structure.md",
    "docs/scheduling.md",
    "docs/lab/papers.md",
    "docs/lab/scheduling.md",
    "docs/reference/api.md",
    "docs/reference/cli.md",
    "docs/reference/options.md",
    "docs/reference/properties.md",
)
MAX_WHEEL_BYTES = 12 * 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-wheel", action="store_true", help="skip the install into a clean environment")
    options = parser.parse_args()
    python = ensure_environment("test", "check")
    check_sizes()
    run(python, "-m", "ruff", "check", ".")
    run(python, "-m", "ruff", "format", "--check", ".")
    run(
        python, "-m", "cogapp", "--check", "--check-fail-msg=run: python -m cogapp -r docs/*.md docs/*/*.md", *GENERATED
    )
    check_types(python)
    if not options.no_wheel:
        check_wheel(python)
    print("all checks passed")


def check_sizes() -> None:
    """Check that under 3 % of functions have more than 50 lines. Whether a file is too long, a reader decides."""
    lengths: list[tuple[int, str]] = []
    for path in sorted(
        path for folder in (*FOLDERS, "tests", "scripts", "examples") for path in (ROOT / folder).rglob("*.py")
    ):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                lengths.append(
                    (node.end_lineno - node.lineno + 1, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
                )
    long = [entry for entry in lengths if entry[0] > MAX_FUNCTION_LINES]
    share = len(long) / len(lengths)
    print(f"{len(lengths)} functions, {len(long)} over {MAX_FUNCTION_LINES} lines ({share:.1%})")
    parts = draw_imports.sizes()
    print(f"{sum(parts.values())} lines: {', '.join(f'{name} {count}' for name, count in parts.items())}")
    if share >= MAX_LONG_SHARE:
        sys.exit(f"too many long functions: {long}")


def check_types(python: Path) -> None:
    """Type-check an installed copy, because in a checkout each mapped file would have two names."""
    with tempfile.TemporaryDirectory() as scratch:
        package = Path(scratch) / "staticllm"
        for folder, place in FOLDERS.items():
            shutil.copytree(
                ROOT / folder,
                package / place,
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns("__pycache__", "*.bin"),
            )
        shutil.copy(ROOT / "pyproject.toml", scratch)
        where = Path(scratch)
        run(python, "-m", "mypy", "--config-file", "pyproject.toml", "-p", "staticllm", cwd=where)
        (where / "pyrightconfig.json").write_text(
            '{"include": ["staticllm"], "reportMissingModuleSource": false, "reportUnsupportedDunderAll": false}'
        )
        run(python, "-m", "pyright", "--pythonpath", python, cwd=where)


def check_wheel(python: Path) -> None:
    """Build the wheel, install it into a clean environment, and run it outside the checkout."""
    with tempfile.TemporaryDirectory() as scratch:
        where = Path(scratch)
        run(python, "-m", "build", "--wheel", "--outdir", where)
        (wheel,) = where.glob("*.whl")
        print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB")
        if wheel.stat().st_size > MAX_WHEEL_BYTES:
            sys.exit(f"{wheel.name} is larger than {MAX_WHEEL_BYTES / 2**20:.0f} MiB")
        make_environment(where / "clean")
        clean = where / "clean" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        run(clean, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel, cwd=where)
        smoke = subprocess.run(
            [str(clean), "-m", "staticllm", "run", "What is an NPU?", "-n", "24", "--stats"],
            cwd=where,
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
        )
        print(smoke.stdout, smoke.stderr)
        if smoke.returncode or len(smoke.stdout.split()) < 5:
            sys.exit("the smoke run of the installed wheel failed")


if __name__ == "__main__":
    main()
