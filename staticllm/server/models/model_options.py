"""The options of each served model: those for all models that know them, and its own, which win."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from staticllm.errors import ConfigError, DeviceError, shown
from staticllm.server.models.kinds import served_kinds
from staticllm.server.models.served import ModelSpec, kind_of
from staticllm.server.settings import WORK_CLASSES, ServerSettings


@dataclass(frozen=True)
class ModelOptions:
    """What a model is loaded with: the device, or several in their order, and the properties by name."""

    device: str
    properties: Mapping[str, object]


def options_of(spec: ModelSpec, settings: ServerSettings) -> ModelOptions:
    """Return the options of a model: those of the settings that its kind knows, and its own.

    A name that no kind knows is kept, so that loading refuses it.
    """
    device = spec.device or settings.device
    known = kind_of(spec).option_names(device)
    foreign = frozenset[str]().union(*(kind.option_names(device) for kind in served_kinds().values())) - known
    common = {name: value for name, value in settings.properties.items() if name not in foreign}
    return ModelOptions(device, {**common, **spec.properties})


def check_options(specs: Sequence[ModelSpec], settings: ServerSettings) -> None:
    """Check the options of all models before the first one is loaded.

    Raises:
        ConfigError: a model does not know an option of its own, none knows one that is for all, or a value is impossible.
    """
    for name, value in settings.properties.items():
        if not any(name in kind_of(spec).option_names(spec.device or settings.device) for spec in specs):
            raise _unknown_to_all(specs, settings, {name: value})
    for spec in specs:
        found = options_of(spec, settings)
        try:
            kind_of(spec).check_options(found.device, found.properties)
        except DeviceError:  # loading says so, when the model is asked for
            continue
        except ConfigError as error:
            raise ConfigError(f"the model {spec.name!r}: {error}") from None


def _unknown_to_all(specs: Sequence[ModelSpec], settings: ServerSettings, option: Mapping[str, object]) -> ConfigError:
    """Return why no model takes an option; the reason with a name that may be meant, if there is one."""
    reasons = []
    for spec in specs:
        try:
            kind_of(spec).check_options(spec.device or settings.device, option)
        except (ConfigError, DeviceError) as error:
            reasons.append(str(error))
    near = [reason for reason in reasons if "did you mean" in reason]
    name = next(iter(option))
    return ConfigError((near or reasons or [f"no model that is served knows the option {name!r}: leave it out"])[0])


def by_model(
    specs: Sequence[ModelSpec], arguments: Sequence[str], properties: Mapping[str, Any]
) -> tuple[list[ModelSpec], dict[str, Any]]:
    """Return the models with the options that are named ``MODEL:NAME``, and the other options, which are for all.

    ``arguments``: what the user gave for each model; a model is named by its name, or by its path as it was
    given.

    Raises:
        ConfigError: a model is not served.
    """
    indices = {str(spec.path): index for index, spec in enumerate(specs)}
    for index, argument in enumerate(arguments):
        indices[argument.partition("=")[2] or argument] = index
    indices.update({spec.name: index for index, spec in enumerate(specs)})
    own: dict[int, dict[str, Any]] = {}
    common = {}
    for key, value in properties.items():
        model, colon, name = key.rpartition(":")
        if not colon:
            common[key] = value
        elif model in indices:
            own.setdefault(indices[model], {})[name] = value
        else:
            raise ConfigError(_not_served(model, key, [spec.name for spec in specs]))
    given = [{**spec.properties, **own.get(index, {})} for index, spec in enumerate(specs)]
    default = _work_class(common, None)
    found = [
        replace(spec, work_class=_work_class(properties, default), properties=properties)
        for spec, properties in zip(specs, given, strict=True)
    ]
    return found, common


def _work_class(properties: dict[str, Any], default: str | None) -> str | None:
    """Take the class of work out of options, and return it.

    Raises:
        ConfigError: it is none.
    """
    found = properties.pop("WORK_CLASS", default)
    if found is None or found in WORK_CLASSES:
        return None if found is None else str(found)
    raise ConfigError(f"WORK_CLASS={shown(found)}: must be reactive or proactive")


def _not_served(model: str, key: str, names: Iterable[str]) -> str:
    known = list(names)
    near = get_close_matches(model, known, n=1)
    remedy = f"did you mean {near[0]!r}?" if near else f"the models are {', '.join(map(repr, known))}"
    return f"the option {shown(key)} is for the model {shown(model)}, which is not served: {remedy}"
