"""Tests that code, options, traces, docs and tests use the terms of the field, not the private ones that they replaced."""

from __future__ import annotations

import re
import subprocess

import pytest

OLD = {
    "KV slot": r"KV rows?|arena rows?|\brow_(type|bytes)\b|RowType|StoredRows|RowAllocator|\b(kv|free|own)_rows\b|KV_ROWS",
    "running request": r"decode slots?\b|\bfree_slot_for\b|\bnum_slots_taken\b|has_free_slot",
    "host pool": r"[Ss]hel(f|ves)\b|[Ss]helved?\b",
    "swapped": r"\b[Pp]ark(ed|ing|s)?\b|PARKED_ROWS|parked_rows",
    "preempt": r"\bby[_ ]force\b|_evictions\b",
    "max_seq_len, kv_len, num_slots or stride": r"\bcapacit(y|ies)\b",
    "buckets": r"\b[Ll]adders?\b|_LADDER\b",
    "request table": r"\b[Bb]ook\b(?!s)",
    "KV cache manager": r"[Tt]enanc(y|ies)|\bsettle[sd]?\b|is_settled|\babandon\b",
    "input processor": r"\b[Ii]ntake\b",
    "output processor, request output": r"\b[Dd]elivery\b|(?-i:\bOutcome\b)",
    "text delta": r"(?-i:\bPiece\b)",
    "output queue": r"[Mm]ailbox(es)?|\bletters?_of\b",
    "spans, tracks": r"\b[Ll]anes?\b",
    "cached, offloading": r"\bresidents?\b|\bmakes? way\b|make_way",
    "to_host": r"set[_ ]aside|\baside\b",
    "run_between_steps": r"\berrands?\b",
    "refresh_variants, install_runner, expire_requests": r"\b_seat\b|is_seated|\b_sweep\b",
    "weightless": r"\bis_light\b|wants_light",
    "failed verification": r"\bis_bad\b|write_bad",
    "the same tokens": r"says_the_same|the same words|other words than",
    "with_preemption, common": r"\bbegun_first\b|scheduling[./]moves",
    "batched with others, batching delay": r"\bcompany\b|\b[Pp]atien(ce|tly)\b|PATIENCE",
    "prepare and commit time": r"masks_seconds|rows_seconds",
}
"""From the term of the field to a pattern of the private terms that it replaced."""
ANY = re.compile("|".join(pattern for pattern in OLD.values()), re.IGNORECASE)
ALLOWED = {"tests/null/door/test_words.py", "CHANGELOG.md"}  # the changelog says what was renamed


def texts(root):
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.splitlines():
        # the demo model's training text is about books and parks
        is_ours = name.endswith((".py", ".md", ".toml")) and not name.startswith(
            ("scripts/demo_", "staticllm/demo_model")
        )
        if is_ours and name not in ALLOWED and (root / name).is_file():
            yield name, (root / name).read_text(encoding="utf-8")


def test_no_replaced_term_is_left(root):
    found = []
    for name, text in texts(root):
        text = re.sub(r"(?<=[a-z])_(?=[a-z])|\b_", " ", text)  # noqa: PLW2901 - the words of a name are words too
        if not ANY.search(text):
            continue
        for field, pattern in OLD.items():
            for hit in re.finditer(pattern, text, re.IGNORECASE):
                line = text.count("\n", 0, hit.start()) + 1
                found.append(f"{name}:{line}: {hit[0]!r}, say: {field}")
    assert not found, "\n".join(found)
