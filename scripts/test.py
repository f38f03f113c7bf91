"""Sets up a fresh machine and runs the tests. Arguments are passed to pytest.

python scripts/test.py                # the quick tests, on several cores
python scripts/test.py --all          # all tests, also those of optional packages
python scripts/test.py tests/null -x
"""

from __future__ import annotations

import os
import sys

from _setup import ensure_environment, run

OPTIONAL = ("examples", "adapters", "frozen")
"""The extras whose tests run with ``--all``; without them these tests are skipped."""

MAX_WORKERS = 4
"""The most processes that run tests, one more than there are cores: a third of their time, tests wait for processes and timers.
Each worker has its own programs in memory. One process for all tests would come near the limit of memory maps, because the
plugin's kernels leave some behind."""


def main() -> None:
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
    python = ensure_environment("test", *(OPTIONAL if "--all" in sys.argv else ()))
    workers = min((os.cpu_count() or 1) + 1, MAX_WORKERS)
    # A worker that dies ends the run and is named: with one in its place, xdist may wait forever for tests that have run.
    in_parallel = ["-n", str(workers), "--dist", "loadfile", "--max-worker-restart", "0"]
    run(python, "-m", "pytest", "--durations=10", *in_parallel, *sys.argv[1:])


if __name__ == "__main__":
    main()
