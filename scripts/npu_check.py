"""Compiles a few programs for each NPU platform with Intel's compiler, which needs no NPU, and compares its predictions with
those on record (`npu_check.json`). Where there is no compiler it is set up under Wine, for root with the distribution's packages.

python scripts/npu_check.py
python scripts/npu_check.py --write    # put the predictions on record
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from _setup import ROOT, ensure_environment, run


def main() -> None:
    python = ensure_environment("test")
    zoo = Path(os.environ.get("STATICLLM_ZOO", ROOT.parent / "shared" / "zoo"))
    if not zoo.is_dir():
        print(f"skipped: no tiny models at {zoo}: set STATICLLM_ZOO")
        return
    run(python, ROOT / "scripts" / "npu_check_worker.py", zoo, *sys.argv[1:])


if __name__ == "__main__":
    main()
