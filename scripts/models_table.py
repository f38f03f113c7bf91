"""Writes docs/reference/architectures.md, which says for each architecture whether it computes what the original computes.

    python scripts/models_table.py ../shared/zoo
    python scripts/models_table.py ../shared/zoo --more zoo     # and others, made by scripts/make_zoo.py

The folders hold model directories as optimum-intel exports them. ``tests/zoo`` runs most of these checks on the first folder.
Without ``--more``, the second table is not changed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from staticllm.errors import UnsupportedModelError
from staticllm.pipelines.diagnostics.kinds import diagnosis_of, job_in

TARGET = Path(__file__).resolve().parent.parent / "docs" / "reference" / "architectures.md"
HEAD = """# Architectures

These models are tiny exports with random weights. Each is compared with its original stateful IR on the CPU in f32, in four
configurations: separate and shared programs, with chunks of 16 and 64 tokens. Each configuration has six checks:

- Three checks compare the logits of 96 given tokens, which may differ by at most 1e-3 of their range. The sequence runs
  alone, interleaved with a second sequence, and as a draft that is accepted in part.
- Three checks compare 48 greedy tokens after prompts of 5, 40 and 300 tokens. The generation outgrows the first KV length.

Models with recurrent states run one sequence per call and have 16 checks instead of 24. `scripts/models_table.py` writes these
tables. `tests/zoo` checks the first one: a few models in all configurations, the others in two each, and all in blocks.

"""
OTHERS = "\n## Others\n"
MORE = """
These models were made by `scripts/make_zoo.py`, with transformers 5.5.4 or an older version if optimum-intel requires it. They
were checked once, before drafts were added to the checks, and are not part of the test suite. Mamba exports run token by token,
and are compared with the original running token by token ([decisions](../decisions.md#passes)).

"""
COLUMNS = "| model | checks passed | | logits off by, share of the range |\n|---|---|---|---|\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--more", type=Path, help="a folder of further models")
    options = parser.parse_args()
    page = TARGET.read_text(encoding="utf-8")
    more = MORE + table(options.more) if options.more else page.partition(OTHERS)[2]
    TARGET.write_text(HEAD + table(options.folder) + OTHERS + more, encoding="utf-8")
    print(f"wrote {TARGET}")


def table(folder: Path) -> str:
    return COLUMNS + "".join(f"{row_of(path.parent)}\n" for path in sorted(folder.glob("*/openvino_model.xml")))


def row_of(path: Path) -> str:
    print(path.name)
    try:
        job = job_in(path, "CPU", {})
        verdicts = list(diagnosis_of(job.kind.name).verdicts(job, ("separate", "shared")))
    except UnsupportedModelError as error:
        return f"| {path.name} | refused by `{error.stage}` | {error.reason} | |"
    good = sum(verdict.is_ok for verdict in verdicts)
    worst = max(verdict.value for verdict in verdicts if verdict.check.endswith("logits"))
    return f"| {path.name} | {good} of {len(verdicts)} | {'ok' if good == len(verdicts) else 'FAIL'} | {worst:.0e} |"


if __name__ == "__main__":
    main()
