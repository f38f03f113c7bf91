"""Lowers each encoder only once per module of tests. Each pipeline still compiles its own programs.

Most tests of embedding pipelines load the same tiny encoder, and of such a load three quarters are its lowering.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest

from staticllm.pipelines.embedding import encoder_kind
from staticllm.pipelines.loading import kind


class SharedLowering:
    """Wraps the functions with which the loader reads and lowers encoders, and caches the lowered ones.

    They are known by the bytes of the graph and of its weights, the options and the passes.
    """

    def __init__(self) -> None:
        self._now = threading.local()  # the model that this thread has read but not lowered
        self._lowered: dict = {}
        self._read_model, self._lower = kind.read_model, encoder_kind.lower_encoder
        self._keep_small_constants = kind.keep_small_constants

    @contextmanager
    def in_place(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, "read_model", self.read_model)
            patch.setattr(kind, "keep_small_constants", self.keep_small_constants)
            patch.setattr(encoder_kind, "lower_encoder", self.lower)
            yield

    def read_model(self, core, path, *given, **more):
        model = self._read_model(core, path, *given, **more)
        self._now.model, self._now.name = None, ("whole", *digests(Path(path)))
        if not any(value is not None for value in given[:2]):  # weights from elsewhere, or decrypted ones
            self._now.model = model
        return model

    def keep_small_constants(self, model):
        self._now.name = ("for blobs", *self._now.name[1:])
        return self._keep_small_constants(model)

    def lower(self, model, options, passes):
        if model is not getattr(self._now, "model", None) or options.dense:
            return self._lower(model, options, passes)
        self._now.model = None
        name = (self._now.name, options, id(passes))
        if name not in self._lowered:
            self._lowered[name] = self._lower(model, options, passes)
        return self._lowered[name]


def digests(path: Path) -> list[bytes]:
    """Return the digests of the files of the models in a directory."""
    files = sorted(file for file in path.iterdir() if file.suffix in (".xml", ".bin"))
    return [sha256(file.read_bytes()).digest() for file in files]
