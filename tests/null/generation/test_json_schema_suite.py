"""Tests masks with the JSON Schema Test Suite (draft 2020-12, from the source package of jsonschema 4.26)."""

import json
import zipfile

import pytest
from support.engine.grammars import OTHER_SPECIAL, compiler_of

from staticllm.errors import GenerationConfigError
from staticllm.pipelines.grammars.grammar import Grammar

pytest.importorskip("llguidance")
VOCAB = OTHER_SPECIAL + 1
NUM_COMPILED = 190
"""The fewest groups whose schema llguidance 1.8 and later compile; the others have keywords that it does not support."""
SHARE_ACCEPTED = 0.93
"""The smallest share of valid instances that are accepted; the others have their properties or numbers in another form."""


@pytest.fixture(scope="module")
def groups(root):
    with zipfile.ZipFile(root / "tests" / "_json_schema_suite" / "draft2020-12.zip") as archive:
        names = [name for name in archive.namelist() if name.endswith(".json")]
        return [(name, group) for name in names for group in json.loads(archive.read(name))]


def is_accepted(matcher, instance):
    """Return whether the bytes of an instance are a whole answer."""
    copy, data = matcher.clone(), json.dumps(instance, ensure_ascii=False).encode(errors="replace")
    try:
        copy.accept(list(data))
    except GenerationConfigError:
        return False
    return copy.can_end


def test_no_invalid_instance_is_accepted_and_most_valid_ones_are(groups):
    """Schemas with keywords that are not supported are refused. Valid instances may have properties in another order."""
    compiler, num_compiled, num_accepted, num_valid = compiler_of(), 0, 0, 0
    for name, group in groups:
        try:
            matcher = compiler.matcher(Grammar("json_schema", json.dumps(group["schema"])), VOCAB)
        except GenerationConfigError as error:
            assert "\n" not in str(error)
            continue
        num_compiled += 1
        for case in group["tests"]:
            accepted = is_accepted(matcher, case["data"])
            assert case["valid"] or not accepted, (name, group["description"], case["description"])
            num_valid += case["valid"]
            num_accepted += accepted
    assert num_compiled >= NUM_COMPILED, f"{num_compiled} of {len(groups)} schemas compile"
    assert num_accepted >= SHARE_ACCEPTED * num_valid, (num_accepted, num_valid)
    print(f"{num_compiled} of {len(groups)} groups, {num_accepted} of {num_valid} valid instances")
