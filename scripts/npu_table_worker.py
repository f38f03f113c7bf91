"""Compiles models with staticllm and with NPUW for NPUs elsewhere, and prints both predictions; `npu_table.py` starts it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from staticllm.compiler_passes.compiling.npu_platform import PLATFORMS, platform_of
from staticllm.compiler_passes.npu_compiler.find import find_compiler
from staticllm.compiler_passes.npu_compiler.schedule import Schedule, read_schedule
from staticllm.devices import get_core
from staticllm.pipelines.loading.npu_target import FEW_TILES
from staticllm.system.table import table

PROMPT, ANSWER = 1024, 128
NPUW = {
    "NPU_USE_NPUW": "YES", "NPUW_LLM": "YES", "NPUW_LLM_MAX_PROMPT_LEN": str(PROMPT),
    "NPUW_LLM_MIN_RESPONSE_LEN": str(ANSWER), "NPUW_FOLD": "YES", "NPUW_DEVICES": "NPU", "NPUW_WEIGHTS_BANK": "shared",
    "NPUW_DQ": "YES", "NPUW_DQ_FULL": "NO", "NPU_COMPILER_DYNAMIC_QUANTIZATION": "YES", "NPUW_DCOFF_TYPE": "",
    "NPUW_DCOFF_SCALE": "NO",
}  # fmt: skip
"""What NPUW takes with a device: without one it would expand 4-bit weights to f16 (`NPUW_DCOFF_TYPE`)."""
NPUW_SECONDS = 1800.0
TRACES = "staticllm-npu-*/work/compileTimeScheduleTrace.json"
POLL_SECONDS = 0.05
NPUW_PROGRAMS = 7
HEAD = ("model", "NPU", "what", "staticllm", "NPUW", "ratio", "4-bit reads by their bytes", "ratio")


@dataclass(frozen=True)
class Times:
    """Predicted microseconds of a decode step and of a prompt: as the compiler prices, or with reads by their bytes."""

    decode: float
    prompt: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--platforms", nargs="+", default=list(PLATFORMS), choices=list(PLATFORMS))
    options = parser.parse_args()
    rows = []
    for model in options.models:
        for platform in options.platforms:
            found = list(compared(model, platform))
            print(table(HEAD, found), flush=True)
            rows += found
    print(table(HEAD, rows))


def compared(model: Path, platform: str) -> Iterator[tuple[str, ...]]:
    """Yield the rows of one model on one platform."""
    plan = planned(model, platform)
    ours = plan["times"]
    repriced = plan["repriced"] or ours
    theirs = npuw_times(model, platform)
    start = (model.name, platform)
    for what, of in (("decode", decode_us), ("prompt of 1024", prompt_us), ("prompt of 128", short_prompt_us)):
        pairs = [(of(ours), of_npuw(what, theirs[0])), (of(repriced), of_npuw(what, theirs[1]))]
        (own, other), (own_repriced, other_repriced) = pairs
        brackets = f"{own_repriced:,.0f} / {other_repriced:,.0f}"
        cells = (f"{own:,.0f}", f"{other:,.0f}", f"{own / other:.3f}", brackets, f"{own_repriced / other_repriced:.3f}")
        yield (*start, what, *cells)
    packed = [each["packed"] for each in (ours, repriced)]
    yield (*start, f"{packed[0]['sequences']} sequences / 1", f"{packed[0]['over_one']:.2f}", "", "",
           f"{packed[1]['over_one']:.2f}", "")  # fmt: skip
    roofs = [each["tokens"][0]["over_roof"] for each in (ours, repriced)]
    yield (*start, "decode / its reads", f"{roofs[0]:.2f}", "", "", f"{roofs[1]:.2f}", "")
    yield (*start, "blobs, MB", f"{plan['blob_bytes'] / 1e6:.1f}", "", "", "", "")
    yield (*start, "compiler's seconds", f"{plan['compile_seconds']:.1f}", "", "", "", "")


def decode_us(times: dict[str, Any]) -> float:
    return float(times["tokens"][0]["ms"]) * 1e3


def prompt_us(times: dict[str, Any]) -> float:
    return float(times["prompts"][-1]["ms"]) * 1e3


def short_prompt_us(times: dict[str, Any]) -> float:
    return float(times["prompts"][0]["ms"]) * 1e3


def of_npuw(what: str, times: Times) -> float:
    """Return NPUW's time; prompts of all lengths run in its one program."""
    return times.decode if what == "decode" else times.prompt


def planned(model: Path, platform: str) -> dict[str, Any]:
    """Return what ``staticllm plan --json`` says."""
    options = ["--max-prompt-len", PROMPT, "--min-response-len", ANSWER, "--device", "NPU", "--platform", platform]
    command = [sys.executable, "-m", "staticllm", "plan", model, "--json", *options]
    ended = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, check=False)
    if ended.returncode:
        sys.exit(ended.returncode)
    return json.loads(ended.stdout)  # type: ignore[no-any-return]


def npuw_times(directory: Path, platform: str) -> tuple[Times, Times]:
    """Return NPUW's best times as the compiler prices, and repriced: each phase with the best of three numbers of tiles."""
    found: list[tuple[Times, Times]] = []
    own = platform_of(platform)
    for tiles in sorted({FEW_TILES, own.default_tiles, own.tiles}):
        schedules = npuw_schedules(directory, platform, {**NPUW, "NPU_TILES": str(tiles)})
        priced = [each.total for each in schedules]
        repriced = [each.repriced for each in schedules]
        found.append((of_phases(priced, directory), of_phases(repriced, directory)))
    best = [
        Times(min(each.decode for each in times), min(each.prompt for each in times))
        for times in zip(*found, strict=True)
    ]
    return best[0], best[1]


def npuw_schedules(directory: Path, platform: str, properties: dict[str, str]) -> list[Schedule]:
    """Return the schedules of the programs that NPUW makes of a model, in the order in which they are compiled."""
    model = get_core().read_model(directory / "openvino_model.xml")
    with tempfile.TemporaryDirectory() as folder, watched(Path(folder), platform) as schedules:
        tempfile.tempdir = folder
        try:
            with find_compiler() as compiler:
                compiler.compile(model, platform, properties, name=f"{directory.name} by NPUW", seconds=NPUW_SECONDS)
        finally:
            tempfile.tempdir = None
    if len(schedules) != NPUW_PROGRAMS:
        times = ", ".join(f"{each.total:.0f}" for each in schedules)
        sys.exit(f"NPUW made {len(schedules)} programs of {directory.name} ({times} us), not {NPUW_PROGRAMS}")
    return schedules


def of_phases(times: list[float], directory: Path) -> Times:
    """Return the times of whole calls, from those of NPUW's programs in their order.

    These are the programs that answer, those that read the prompt, and the logits of both. The first two are a head with the
    first layer, a block that all other layers but the last one run, and a tail with the last layer.
    """
    num_layers = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    *first, logits = times
    calls = [head + (num_layers - 2) * block + tail + logits for head, block, tail in (first[:3], first[3:])]
    return Times(*calls)


@contextmanager
def watched(folder: Path, platform: str) -> Iterator[list[Schedule]]:
    """Collect the schedules that a compiler in a temporary folder writes one after another into one file."""
    schedules: list[Schedule] = []
    seen: list[bytes] = []
    end = threading.Event()

    def look() -> None:
        for path in folder.glob(TRACES):
            try:
                data = path.read_bytes()
                json.loads(data)
            except (OSError, ValueError):  # it is gone, or being written
                continue
            if not seen or data != seen[-1]:
                seen.append(data)
                schedules.append(read_schedule(data, platform_of(platform)))

    def follow() -> None:
        while not end.wait(POLL_SECONDS):
            look()

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield schedules
    finally:
        end.set()
        thread.join()


if __name__ == "__main__":
    main()
