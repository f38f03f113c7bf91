"""Writes the tables of docs/models.md, which say for each architecture whether it computes what the original computes.

    python scripts/models_table.py ../shared/zoo
    python scripts/models_table.py ../shared/zoo --more zoo     # and others, made by scripts/make_zoo.py

The folders hold model directories as optimum-intel exports them. ``tests/zoo`` runs the same checks on the first folder.
Without ``--more``, the second table is not changed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from staticllm.errors import UnsupportedModelError
from staticllm.pipelines.diagnostics.kinds import diagnosis_of, job_in

TARGET = Path(__file__).resolve().parent.parent / "docs" / "models.md"
HEAD = """# Models

Each tiny export has random weights and is compared with its original stateful IR on the CPU in f32, in 24 checks. There are
six for each of four configurations (separate and shared programs, chunks of 16 and 64 tokens): the logits of 96 given
tokens, at most 1e-3 of their range off, for the sequence alone, interleaved with a second sequence, and as a draft that is
accepted in part; and 48 greedy tokens after prompts of 5, 40 and 300 tokens, with KV lengths that the generation outgrows.
Models with recurrent states run one sequence per call and have 16 checks. `staticllm verify MODEL` runs the same checks on
a model of yours; `scripts/models_table.py` writes these tables, and `tests/zoo` holds the first one to the truth.

"""
EXPORT, OTHERS = "\n## Export\n", "\n## Others\n"
MORE = """
Made by `scripts/make_zoo.py` (transformers 5.5.4, or an older version where optimum-intel asks for it), checked once and not in
every run of the tests, before drafts were a check. Mamba exports run token by token, and are compared with the original run in
the same way ([decisions](decisions.md)).

"""
COLUMNS = "| model | checks passed | | logits off by, share of the range |\n|---|---|---|---|\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--more", type=Path, help="a folder of further models")
    options = parser.parse_args()
    page = TARGET.read_text(encoding="utf-8")
    export, _, others = page[page.index(EXPORT) :].partition(OTHERS)
    more = MORE + table(options.more) if options.more else others
    TARGET.write_text(HEAD + table(options.folder) + export + OTHERS + more, encoding="utf-8")
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
