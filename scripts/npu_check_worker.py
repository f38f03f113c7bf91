"""Compiles programs with Intel's NPU compiler, and compares its predictions with those on record; `npu_check.py` starts it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from npu_programs import programs_to_check
from npu_setup import set_up

from staticllm.compiler_passes.compiling.npu_platform import PLATFORMS
from staticllm.compiler_passes.npu_compiler.child_compiler import ChildCompiler
from staticllm.compiler_passes.npu_compiler.find import find_compiler
from staticllm.errors import DeviceError, StaticLLMError
from staticllm.system.table import table

RECORD = Path(__file__).with_name("npu_check.json")
TOLERANCE = 0.05
PROPERTIES = {"NPU_COMPILER_DYNAMIC_QUANTIZATION": "YES"}
NOT_HAD = ("checking", "downloading")
"""Steps of set-up that depend on the machine and its network; if another fails, the check fails."""
PROGRAM_SECONDS = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("zoo", type=Path)
    parser.add_argument("--write", action="store_true", help="put this compiler's predictions on record")
    options = parser.parse_args()
    with compiler_or_skip() as compiler:
        print(compiler.version, flush=True)
        found = predictions(compiler, options.zoo)
        version = compiler.version
    if options.write:
        RECORD.write_text(json.dumps({"compiler": version, "us": found}, indent=1) + "\n")
        return
    recorded = json.loads(RECORD.read_text())
    problems = compare(found, recorded["us"])
    if version != recorded["compiler"]:
        print(f"on record is {recorded['compiler']}")
    if problems:
        sys.exit("\n".join([*problems, "if that is meant: python scripts/npu_check.py --write"]))
    print(f"all predictions are within {TOLERANCE:.0%} of those on record")


def compiler_or_skip() -> ChildCompiler:
    """Return the compiler, which is set up under Wine if there is none; exit with code 0 if it cannot be had."""
    steps: list[str] = []

    def on_step(text: str, number: int, total: int) -> None:
        print(f"{number} of {total}: {text}", flush=True)
        steps.append(text)

    try:
        return find_compiler()
    except DeviceError as error:
        problem = str(error)
    try:
        set_up(installs_packages=hasattr(os, "geteuid") and os.geteuid() == 0, is_forced=True, on_step=on_step)
    except StaticLLMError as error:
        if not steps or steps[-1].startswith(NOT_HAD):
            print(f"skipped: {problem}; {error}")
            sys.exit(0)
        raise
    return find_compiler("wine")


def predictions(compiler: ChildCompiler, zoo: Path) -> dict[str, dict[str, list[float]]]:
    """Return, by program and platform, the microseconds of the compiler's schedule: as they are, and repriced."""
    found: dict[str, dict[str, list[float]]] = {}
    rows = []
    for name, model in programs_to_check(zoo):
        found[name] = {}
        for platform in PLATFORMS:
            begin = time.monotonic()
            program = compiler.compile(model, platform, PROPERTIES, name=name, seconds=PROGRAM_SECONDS)
            schedule = program.schedule
            assert schedule is not None, "it was asked for"
            found[name][platform] = [round(schedule.total, 1), round(schedule.repriced, 1)]
            engines = [f"{schedule.engines[engine]:.0f}" for engine in ("DMA", "DPU", "SHAVE")]
            took = f"{time.monotonic() - begin:.1f}"
            cells = [
                f"{schedule.total:.0f}",
                f"{schedule.repriced:.0f}",
                *engines,
                f"{len(program.blob) / 1e6:.2f}",
                took,
            ]
            rows.append([name, platform, *cells])
    print(table(("program", "platform", "us", "repriced", "DMA", "DPU", "SHAVE", "blob MB", "s"), rows))
    return found


def compare(found: dict[str, dict[str, list[float]]], recorded: dict[str, dict[str, list[float]]]) -> list[str]:
    """Return a line for each prediction that is further than `TOLERANCE` from the one on record, or is on one side only."""
    problems = []
    pairs = sorted({(name, platform) for each in (found, recorded) for name in each for platform in each[name]})
    for name, platform in pairs:
        new, old = (each.get(name, {}).get(platform) for each in (found, recorded))
        if new is None or old is None:
            problems.append(
                f"{name} for {platform}: {'not on record' if old is None else 'on record, but not compiled'}"
            )
            continue
        for text, now, before in zip(("", " repriced"), new, old, strict=True):
            if abs(now - before) > TOLERANCE * before:
                problems.append(f"{name} for {platform}: {now} us{text}, on record {before} us")
    return problems


if __name__ == "__main__":
    main()
