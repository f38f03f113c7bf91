"""Write docs/models.md: which architectures, lowered, say what the original says.

    python scripts/models_table.py ../shared/zoo

The folder holds model directories, as optimum-intel exports them. ``tests/zoo`` runs the same checks.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from staticllm.errors import UnsupportedModelError
from staticllm.pipelines.verification import verify_model

TARGET = Path(__file__).resolve().parent.parent / "docs" / "models.md"
HEAD = """# Models

Tiny exports with random weights, one of each architecture, made with transformers and optimum-intel, against their original
stateful IR on the CPU in f32. Sixteen checks each: separate and shared programs, chunks of 16 and 64 tokens, and for
each of them the logits of 96 given tokens (at most 1e-3 of their range off) and 48 greedy tokens after prompts of 5, 40 and 300,
with capacities that generation outgrows. `staticllm verify MODEL` runs the same checks on a model of yours;
`scripts/models_table.py` writes this table, `tests/zoo` holds it to the truth.

| model | checks passed | | logits off by, share of the range |
|---|---|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    rows = [row_of(path.parent) for path in sorted(folder.glob("*/openvino_model.xml"))]
    TARGET.write_text(HEAD + "".join(f"{row}\n" for row in rows), encoding="utf-8")
    print(f"wrote {TARGET}")


def row_of(path: Path) -> str:
    print(path.name)
    try:
        verdicts = list(verify_model(path))
    except UnsupportedModelError as error:
        return f"| {path.name} | refused by `{error.stage}` | {error.reason} | |"
    good = sum(verdict.is_ok for verdict in verdicts)
    worst = max(verdict.value for verdict in verdicts if verdict.check.endswith("logits"))
    return f"| {path.name} | {good} of {len(verdicts)} | {'ok' if good == len(verdicts) else 'BAD'} | {worst:.0e} |"


if __name__ == "__main__":
    main()
