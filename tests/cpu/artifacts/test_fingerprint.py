"""Tests fingerprints: they are equal if a set may be loaded, and otherwise the first difference is named."""

from dataclasses import replace

import pytest
from support.helpers import FINGERPRINT

from staticllm.compiler_passes.artifacts.cache import key_of
from staticllm.compiler_passes.artifacts.fingerprint import Fingerprint, pass_digests
from staticllm.compiler_passes.decoder import DECODER


def test_the_fingerprint_covers_every_module_of_a_program(root):
    """Each module that makes programs is in the fingerprint, whichever folder it is in."""
    folder = root / "compiler_passes"
    files = {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.py")}
    beside = ("artifacts/", "compiling/", "conversion/", "npu_compiler/")  # no passes
    files = {name for name in files if not name.startswith(beside)}
    assert set(pass_digests()) == files | {"ports", "keep_small_constants"}
    assert all(pass_digests().values())
    assert {entry.name for entry in DECODER.passes} <= {name.rpartition("/")[2] for name in files}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ir_digest": "7" * 20}, "IR digest: different graph (777777777777 here, 1 in the blob)"),
        ({"weights_digest": "7"}, "weights digest: different weights (7 here, 2 in the blob)"),
        ({"openvino": "2026.5"}, "OpenVINO 2026.5, blob 2026.4"),
        ({"driver": "3"}, "driver 3, blob nothing"),
        ({"choices": {"MAX_PROMPT_LEN": "64"}}, "MAX_PROMPT_LEN 64 asked, the blob has 1024"),
        (
            {"choices": {"PREFILL_ROWS": "(16,)", "generate properties": "A=1"}},
            "PREFILL_ROWS (16,) asked, the blob has default",
        ),
        ({"choices": {"generate properties": "A=1"}}, "generate properties A=1 asked, the blob has nothing"),
        (
            {"choices": {"Dense modules": "7" * 20}},
            "Dense modules: different weights (777777777777 here, nothing in the blob)",
        ),
    ],
)
def test_the_first_difference_is_named(change, message):
    chosen = {**FINGERPRINT.choices, **change.get("choices", {})}
    assert replace(FINGERPRINT, **{**change, "choices": chosen}).difference(FINGERPRINT) == message


def test_a_choice_that_only_the_set_has_is_a_difference():
    other = replace(FINGERPRINT, choices={**FINGERPRINT.choices, "surprise": "1"})
    assert FINGERPRINT.difference(other) == "surprise nothing asked, the blob has 1"


def test_equal_fingerprints_have_equal_keys_and_survive_json():
    content = FINGERPRINT.to_json()
    assert Fingerprint.from_json(dict(reversed(content.items()))) == FINGERPRINT
    assert FINGERPRINT.difference(FINGERPRINT) is None
    assert "driver" not in content
    assert content["IR digest"] == "1"
    assert key_of(Fingerprint.from_json(content)) == key_of(FINGERPRINT) != key_of(replace(FINGERPRINT, device="NPU"))
    with pytest.raises(ValueError, match="plugin"):
        Fingerprint.from_json({name: value for name, value in content.items() if name != "plugin"})
