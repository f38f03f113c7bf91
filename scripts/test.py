"""Everything a fresh machine needs, then the tests. Arguments go to pytest.

python scripts/test.py                # the quick ones
python scripts/test.py --all          # the slow ones too
python scripts/test.py tests/null -x
"""

from __future__ import annotations

import sys

from _setup import ensure_environment, run


def main() -> None:
    python = ensure_environment("test")
    run(python, "-m", "pytest", "--durations=10", *sys.argv[1:])


if __name__ == "__main__":
    main()
