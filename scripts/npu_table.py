"""The full table of an NPU's predictions: what staticllm and NPUW take of one model, by the schedule of Intel's compiler.

python scripts/npu_table.py                        # a 0.5B shape in three quantizations, on three platforms: 20 minutes
python scripts/npu_table.py --platforms 4000 my_model_dir

Without model directories, the three are made first (`make_bench_model.py`), which installs PyTorch. The compiler must be there:
`python scripts/npu_compiler.py setup`. No NPU is used; docs/npu.md says what the predictions mean.
"""

from __future__ import annotations

import sys

from _setup import ROOT, ensure_environment, run
from make_bench_model import NPU_SHAPES, cache_dir

MODELS = tuple(NPU_SHAPES)


def main() -> None:
    python = ensure_environment("test")
    arguments = sys.argv[1:]
    if all(each.startswith("-") or each.isdecimal() for each in arguments):
        missing = [name for name in MODELS if not (cache_dir() / name).is_dir()]
        for name in missing:
            run(ensure_environment("train"), ROOT / "scripts" / "make_bench_model.py", name)
        arguments += [str(cache_dir() / name) for name in MODELS]
    run(python, ROOT / "scripts" / "npu_table_worker.py", *arguments)


if __name__ == "__main__":
    main()
