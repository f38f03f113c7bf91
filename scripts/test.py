"""Everything a fresh machine needs, then the tests. Arguments go to pytest.

python scripts/test.py                # the quick ones, on several cores at once
python scripts/test.py --all          # every test, one after the other
python scripts/test.py tests/null -x
"""

from __future__ import annotations

import os
import sys

from _setup import ensure_environment, run

MAX_WORKERS = 4  # each has programs of its own in memory


def main() -> None:
    python = ensure_environment("test")
    workers = min(os.cpu_count() or 1, MAX_WORKERS)
    in_parallel = [] if "--all" in sys.argv or workers == 1 else ["-n", str(workers), "--dist", "loadfile"]
    run(python, "-m", "pytest", "--durations=10", *in_parallel, *sys.argv[1:])


if __name__ == "__main__":
    main()
