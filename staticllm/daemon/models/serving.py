"""Makes what serves a client's model: an engine, a packed model, or the model as it is."""

from __future__ import annotations

from staticllm.core import OnProgress
from staticllm.daemon.models.compiling import compile_model, read
from staticllm.daemon.models.language_model import LanguageModel, compile_language_model
from staticllm.daemon.models.plain import PlainModel
from staticllm.daemon.models.sources import LanguageSource, ModelSource
from staticllm.daemon.packed.model import PackedModel
from staticllm.daemon.sharing.devices import Devices, is_virtual
from staticllm.devices import check_device, get_core


def compile_source(
    source: ModelSource | LanguageSource, id: int, devices: Devices, on_progress: OnProgress
) -> LanguageModel | PackedModel | PlainModel:
    """Compile the model of a client, with the number ``id``; only engines report progress.

    Raises ``StaticLLMError`` (it cannot be read, or the device is missing or refuses it) and ``RuntimeError`` (OpenVINO
    refuses it).
    """
    if isinstance(source, LanguageSource):
        return compile_language_model(source, id, devices, on_progress)
    if source.mode == "auto" and read(source.xml, source.weights).get_variables():
        packed = PackedModel(source.xml, source.device, dict(source.config), source.weights, id=id, devices=devices)
        if packed.reason is None:
            return packed
        packed.close()
    if not is_virtual(source.device):
        check_device(get_core(), source.device)
    return PlainModel(id, compile_model(source), source.device, devices, source.num_bytes)
