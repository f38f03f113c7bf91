"""A manifest without a key, or with a value of another kind, and with the right digest is refused in one line or is harmless."""

import copy
import random
from collections import defaultdict
from dataclasses import asdict

import pytest
from support.encoders.encoder_directories import a_directory
from support.helpers import EXACT, forge, one_line

from staticllm import BlobError, StaticEmbeddingPipeline, StaticLLMPipeline, demo_model_path
from staticllm.compiler_passes.artifacts.blob_set import MANIFEST
from staticllm.compiler_passes.artifacts.fingerprint import bytes_digest
from staticllm.compiler_passes.artifacts.manifest import (
    SCHEMA,
    ManifestError,
    _canonical,
    _framed,
    cost_from_json,
    cost_to_json,
    decode,
    stored,
)
from staticllm.core import CrossWindowShape, CrossWindowVariant

VALUES = (None, True, 0, -1, 1 << 70, 0.5, "", "x", [], {}, [1], {"x": 1})


def places(value, path=()):
    """Yield the path of each key and index inside a JSON value; of a list only the first and the last."""
    keys = (
        value if isinstance(value, dict) else sorted({0, len(value) - 1}) if isinstance(value, list) and value else ()
    )
    for key in keys:
        yield (*path, key)
        yield from places(value[key], (*path, key))


def changes(content):
    """Yield changed copies of the content of a manifest, each with its place and what was done."""
    for *path, key in places(content):
        for value in ("deleted", *VALUES):
            changed = copy.deepcopy(content)
            inner = changed
            for step in path:
                inner = inner[step]
            if value == "deleted":
                del inner[key]
            elif inner[key] == value:
                continue
            else:
                inner[key] = value
            yield changed, (*path, key), f"{[*path, key]} = {value!r}"


def a_decoder(folder):
    return StaticLLMPipeline(
        demo_model_path(), "CPU", BLOB_PATH=folder, MAX_PROMPT_LEN=64, MIN_RESPONSE_LEN=32, **EXACT
    )


def content_of(folder):
    found = []
    forge(folder, lambda content: found.append(copy.deepcopy(content)))
    return found[0]


@pytest.fixture(scope="module")
def decoder_set(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoder") / "set"
    options = {"MAX_PROMPT_LEN": 64, "MIN_RESPONSE_LEN": 32, **EXACT}
    with StaticLLMPipeline(demo_model_path(), "CPU", BLOB_PATH=folder, EXPORT_BLOB=True, **options):
        pass
    return folder


def check_every_key(folder, load, count):
    """Decode every changed manifest, and load with one of those that can be decoded for each place, or for ``count`` places.

    Digests of passes are only printed, so a few of their places stand for all.
    """
    content = content_of(folder)
    harmless = defaultdict(list)
    for changed, place, what in changes(content):
        stored = _framed(changed, bytes_digest(_canonical(changed), b""), False)
        try:
            decode(stored)
        except ManifestError as error:
            assert "\n" not in str(error), what
        else:
            harmless[place if place[0] != "passes" else f"passes {len(harmless) % 3}"].append((stored, what))
    assert len(harmless) > 20
    chance = random.Random(1)
    cases = [chance.choice(found) for found in harmless.values()]
    for stored, what in chance.sample(cases, min(count, len(cases))):
        (folder / MANIFEST).write_bytes(stored)
        try:
            load(folder).close()
        except BlobError as error:
            assert "\n" not in str(error), what
        except Exception as error:
            raise AssertionError(what) from error


def test_each_key_of_a_decoders_manifest(decoder_set, num_cases):
    check_every_key(decoder_set, a_decoder, num_cases(200))


def test_each_key_of_an_encoders_manifest(tmp_path, num_cases):
    directory, folder = tmp_path / "model", tmp_path / "set"
    directory.mkdir()
    a_directory(directory)
    StaticEmbeddingPipeline(directory, "CPU", BLOB_PATH=folder, EXPORT_BLOB=True).close()
    check_every_key(folder, lambda path: StaticEmbeddingPipeline(directory, "CPU", BLOB_PATH=path), num_cases(200))


@pytest.mark.parametrize("part", ["prefill", "generate"])
def test_a_manifest_without_a_part_is_refused(decoder_set, part):
    whole = (decoder_set / MANIFEST).read_bytes()
    forge(decoder_set, lambda content: content["properties"].pop(part))
    try:
        with pytest.raises(BlobError, match=f"no part '{part}'") as error:
            a_decoder(decoder_set)
        one_line(error)
    finally:
        (decoder_set / MANIFEST).write_bytes(whole)


@pytest.mark.parametrize("schema", [SCHEMA - 1, SCHEMA + 1, 0, "9", None, [SCHEMA]])
def test_a_set_of_another_schema_is_refused(decoder_set, schema):
    """Whatever its fields are called: those of the older schema had other names."""
    whole = (decoder_set / MANIFEST).read_bytes()
    forge(decoder_set, lambda content: content.update(schema=schema))
    try:
        with pytest.raises(BlobError, match=f"this version reads {SCHEMA}; export the set again") as error:
            a_decoder(decoder_set)
        assert f"has schema {schema}, " in one_line(error)
    finally:
        (decoder_set / MANIFEST).write_bytes(whole)


def test_shapes_and_variants_have_their_own_names_in_sets():
    shape = CrossWindowShape(bands=4, columns=20, cross_window_len=5, states=())
    variant = CrossWindowVariant(2)
    assert stored(CrossWindowShape, {**asdict(shape), "states": []}) == shape
    assert cost_from_json(cost_to_json(variant, 0.5), CrossWindowVariant) == (variant, 0.5)
    for kind, content, field in (
        (CrossWindowShape, {"bands": 4, "columns": 20, "source_len": 5, "states": []}, "cross_window_len"),
        (CrossWindowVariant, {"sources": 2}, "cross_windows"),
        (CrossWindowVariant, {"sources": 2, "cross_windows": 2}, "sources"),
    ):
        with pytest.raises(ValueError, match=f"the field '{field}' is unknown or missing"):
            stored(kind, content)
