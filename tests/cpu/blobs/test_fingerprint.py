"""What a set is for: equal where it may be loaded, with one difference named where it may not."""

from dataclasses import replace

import pytest
from helpers import FINGERPRINT

from staticllm.compiler_passes.decoder import DECODER
from staticllm.pipelines.blobs.cache import key_of
from staticllm.pipelines.blobs.fingerprint import Fingerprint, pass_digests


def test_every_pass_has_a_digest(root):
    """Each module that makes programs is in the fingerprint, whichever room it lies in."""
    folder = root / "compiler_passes"
    files = {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.py")}
    assert set(pass_digests()) == files | {"ports", "keep_small_constants"} and all(pass_digests().values())
    assert {entry.name for entry in DECODER.passes} <= {name.rpartition("/")[2] for name in files}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ir_digest": "7" * 20}, "IR digest: different graph (777777777777 here, 1 in the blob)"),
        ({"weights_digest": "7"}, "weights digest: different weights (7 here, 2 in the blob)"),
        ({"openvino": "2026.5"}, "OpenVINO 2026.5, blob 2026.4"),
        ({"driver": "3"}, "driver 3, blob nothing"),
        ({"max_prompt_len": "64"}, "MAX_PROMPT_LEN 64 asked, the blob has 1024"),
        ({"prefill_rows": "(16,)", "generate_properties": "A=1"}, "PREFILL_ROWS (16,) asked, the blob has default"),
        ({"generate_properties": "A=1"}, "generate properties A=1 asked, the blob has nothing"),
    ],
)
def test_the_first_difference_is_named(change, message):
    assert replace(FINGERPRINT, **change).difference(FINGERPRINT) == message


def test_equal_fingerprints_have_one_key_and_come_back_from_json():
    content = FINGERPRINT.to_json()
    assert Fingerprint.from_json(dict(reversed(content.items()))) == FINGERPRINT
    assert FINGERPRINT.difference(FINGERPRINT) is None and "driver" not in content and content["IR digest"] == "1"
    assert key_of(Fingerprint.from_json(content)) == key_of(FINGERPRINT) != key_of(replace(FINGERPRINT, device="NPU"))
    for wrong in ({**content, "surprise": "1"}, {name: value for name, value in content.items() if name != "plugin"}):
        with pytest.raises(ValueError, match=r"surprise|plugin"):
            Fingerprint.from_json(wrong)
