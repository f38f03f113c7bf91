"""Runs all checks except the tests: ruff, mypy, pyright, sizes, generated pages, the docs' site, the wheel and a smoke run.

python scripts/check.py              # all checks
python scripts/check.py --no-wheel
python scripts/check.py --changed    # in seconds, after the first time: ruff, mypy, and the links of pages that were changed
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
TYPES = ROOT / "build" / "types"
"""Where types are checked: a copy in which the three folders lie where their names say. In a checkout each of their files
would have two names. The copy stays, with mypy's caches, so that mypy reads again only what has changed."""
SCRIPTS = ("scripts", "scripts/papers", "examples")
OF_SCRIPTS = ("--config-file=", "--check-untyped-defs", "--ignore-missing-imports", "--follow-imports=silent")
"""Scripts and examples may leave out types, and many of their packages are not installed: not strict, no configuration file."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-wheel", action="store_true", help="skip the install into a clean environment")
    parser.add_argument(
        "--changed", action="store_true", help="only what takes seconds: ruff, mypy, the links of changed pages"
    )
    options = parser.parse_args()
    python = ensure_environment("test", "check")
    run(python, "-m", "ruff", "check", ".")
    run(python, "-m", "ruff", "format", "--check", ".")
    if options.changed:
        check_types(python)
        if any(name.endswith(".md") for name in changed_files(ROOT)):
            run(python, "-m", "pytest", "tests/null/door/test_docs_links.py")
        print("ruff, mypy and links passed; sizes, generated pages, the site, pyright and the wheel were not checked")
        return
    check_sizes()
    run(
        python, "-m", "cogapp", "--check", "--check-fail-msg=run: python -m cogapp -r docs/*.md docs/*/*.md", *GENERATED
    )
    check_types(python)
    check_types_again(python)
    run(python, ROOT / "scripts" / "docs_site.py")
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


def changed_files(root: Path) -> list[str]:
    """Return the files that are new or changed since the branch left ``main``; without git, none."""
    base = _lines_of_git(root, "merge-base", "HEAD", "main")
    changed = _lines_of_git(root, "diff", "--name-only", "--diff-filter=d", *(base or ["HEAD"]))
    return sorted({*changed, *_lines_of_git(root, "ls-files", "--others", "--exclude-standard")})


def _lines_of_git(root: Path, *arguments: str) -> list[str]:
    if shutil.which("git") is None:
        return []
    found = subprocess.run(
        ["git", "-c", "core.quotePath=false", *arguments], cwd=root, capture_output=True, text=True, check=False
    )
    return found.stdout.splitlines() if found.returncode == 0 else []


def check_types(python: Path) -> None:
    """Let mypy check the package strictly, and the scripts and examples as far as they have types."""
    mirror(ROOT, TYPES)
    mypy = (python, "-m", "mypy", "--cache-dir")
    run(*mypy, ".mypy_package", "--config-file", ROOT / "pyproject.toml", "-p", "staticllm", cwd=TYPES)
    scripts = [path for folder in SCRIPTS for path in sorted((TYPES / folder).glob("*.py"))]
    run(*mypy, ".mypy_scripts", *OF_SCRIPTS, *scripts, cwd=TYPES)


def check_types_again(python: Path) -> None:
    """Let pyright check the package too. It keeps no cache, so that it takes as long for one change as for all."""
    (TYPES / "pyrightconfig.json").write_text(
        '{"include": ["staticllm"], "reportMissingModuleSource": false, "reportUnsupportedDunderAll": false}'
    )
    run(python, "-m", "pyright", "--pythonpath", python, cwd=TYPES)


def mirror(root: Path, target: Path) -> None:
    """Copy what is checked as it is installed: files that changed, with their times, and remove those that are gone."""
    places = {root / folder: target / "staticllm" / place for folder, place in FOLDERS.items()}
    places |= {root / folder: target / folder for folder in ("scripts", "examples")}
    wanted = {
        place / path.relative_to(folder): path for folder, place in places.items() for path in folder.rglob("*.py")
    }
    for copy in set(target.rglob("*.py")) - wanted.keys():
        copy.unlink()
    for copy, path in wanted.items():
        if not copy.is_file() or _stamp(copy) != _stamp(path):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)


def _stamp(path: Path) -> tuple[int, int]:
    return path.stat().st_mtime_ns, path.stat().st_size


def check_wheel(python: Path) -> None:
    """Build the wheel of the working tree, and try it."""
    with tempfile.TemporaryDirectory() as scratch:
        run(python, "-m", "build", "--wheel", "--outdir", scratch)
        (wheel,) = Path(scratch).glob("*.whl")
        check_size(wheel)
        try_wheel(wheel)


def check_size(wheel: Path) -> None:
    print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB")
    if wheel.stat().st_size > MAX_WHEEL_BYTES:
        sys.exit(f"{wheel.name} is larger than {MAX_WHEEL_BYTES / 2**20:.0f} MiB")


def try_wheel(wheel: Path) -> None:
    """Install a wheel into a clean environment, and run it outside the checkout."""
    with tempfile.TemporaryDirectory() as scratch:
        where = Path(scratch)
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
