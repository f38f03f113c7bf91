"""Runs everything that must hold, lane by lane, and prints the minutes of each. A failed lane does not stop the others.

python scripts/test_all.py             # what every submission runs: of the slow tests those of every third file, in turns
python scripts/test_all.py --nightly   # all tests, and those that compare programs once more in bf16
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from _setup import ROOT

NUM_SHARES = 3
AGAIN = ("--reruns", "1", "--reruns-delay", "2", "-rR")
"""A test that fails is run once more, because tests of processes share two cores with others. The report has both runs."""
OF_THE_REAL_LANE = ("real_models", "real_encoders", "real_folder", "export", "whisper_pipeline")
"""Files of ``tests/peer`` that need published weights or an environment of their own."""
OLDER = {"STATICLLM_TEST_PRECISION": "bf16", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}
"""An older processor: its own precision is bf16, without instructions for it."""
COMPUTED = {
    "tests/cpu/pipeline": (
        *(
            "adapters",
            "beams",
            "combinations",
            "context_shift",
            "long_conversations",
            "npuw_walkthrough",
            "parallel_windows",
        ),
        *(
            "pipeline",
            "sampler_reference",
            "serving",
            "several_answers",
            "shared_speech",
            "cross_windows",
            "speculation",
        ),
    ),
    "tests/cpu/embedding": (
        *("continued_texts", "disentangled", "encoder_blobs", "extreme_texts", "files_of_sentence_transformers"),
        *("long_texts", "poolings", "shared_engine", "text_embedding_pipeline", "text_rerank_pipeline"),
    ),
    "tests/peer": ("adapters", "beams", "genai", "rerank", "speculation", "whisper_pipeline"),
}
"""Files that compare what programs compute."""
GRACE_SECONDS = 10


@dataclass(frozen=True)
class Lane:
    name: str
    limit: int
    """In seconds."""
    script: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self) -> str | None:
        """Run the lane. Return why it failed, or None."""
        command = [sys.executable, f"scripts/{self.script}.py", *self.arguments]
        with subprocess.Popen(command, cwd=ROOT, env={**os.environ, **self.environment}) as process:
            try:
                code = process.wait(self.limit)
            except subprocess.TimeoutExpired:
                return f"it was not done after {self.limit} s"
            finally:
                if process.poll() is None:
                    _end(process)
        return f"exit code {code}" if code else None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def lanes(is_nightly: bool) -> Iterator[Lane]:
    """Return the lanes in their order."""
    without_real = tuple(f"--ignore=tests/peer/test_{name}.py" for name in OF_THE_REAL_LANE)
    yield Lane("check", 900, "check")
    yield Lane("demo", 600, "demo")
    # Intel's NPU compiler, which tests of the next lanes use as well: set up under Wine, or skipped with its reason
    yield Lane("npu", 600, "npu_check")
    if is_nightly:
        yield Lane("all tests", 6000, "test", ("--all", *without_real, "--durations=15", *AGAIN))
    else:
        yield Lane("quick tests", 1500, "test", (*without_real, *AGAIN))
        share = f"{_num_commits() % NUM_SHARES + 1}/{NUM_SHARES}"
        slow = ("--all", "--share", share, *without_real, "--durations=15", *AGAIN)
        yield Lane(f"slow tests, share {share}", 3000, "test", slow)
    yield Lane("real", 1500, "test_real", AGAIN)
    yield Lane("attached", 900, "test_attached")
    yield Lane("windows", 1500, "windows_check")  # under Wine, or skipped with its reason
    yield Lane("clients", 1500, "test_clients", AGAIN)
    if is_nightly:
        files = [f"{folder}/test_{name}.py" for folder, names in COMPUTED.items() for name in names]
        yield Lane("bf16", 1200, "test", ("tests/cpu/programs", *files, *AGAIN), OLDER)


def _num_commits() -> int:
    command = ["git", "rev-list", "--count", "HEAD"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return int(found.stdout) if found.returncode == 0 else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nightly", action="store_true", help="run all tests")
    table, has_failed = [], False
    try:
        for lane in lanes(parser.parse_args().nightly):
            print(f"lane: {lane.name}", flush=True)
            begin = time.monotonic()
            reason = lane.run()
            has_failed |= reason is not None
            minutes, seconds = divmod(round(time.monotonic() - begin), 60)
            table.append(f"{minutes}:{seconds:02}  {lane.name}{f'  FAILED: {reason}' if reason else ''}")
    finally:
        print("minutes:seconds of each lane:", *(table or ["none ended"]), sep="\n", flush=True)
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
