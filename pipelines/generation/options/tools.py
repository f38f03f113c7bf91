"""What a request says about tools: the functions that the model may call, and whether it must."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from staticllm.errors import GenerationConfigError, shown


@dataclass(frozen=True)
class ToolOptions:
    """What a request says about tools. ``parse`` is None where the tools decide.

    ``tools`` are definitions of functions as OpenAI's API takes them. ``choice`` is ``auto``, ``none``, ``required`` or
    ``function``; then ``name`` is the function that must be called. ``extra_context`` holds more variables of the template.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    choice: str = "auto"
    name: str = ""
    parse: bool | None = None
    extra_context: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_call_required(self) -> bool:
        """Whether the answer must be a call."""
        return self.choice in ("required", "function")


def tool_options(given: Mapping[str, Any]) -> ToolOptions:
    """Return the checked options about tools of ``given``.

    Raises:
        GenerationConfigError: a value is impossible, or options contradict each other.
    """
    tools, parse, context = given.get("tools") or (), given.get("parse_tools"), given.get("extra_context") or {}
    if not isinstance(tools, (list, tuple)) or not all(map(is_tool, tools)):
        raise GenerationConfigError(
            f"tools={shown(tools)}: must be a list of {{'type': 'function', 'function': {{'name': …, 'parameters': …}}}}"
        )
    if parse not in (None, True, False):
        raise GenerationConfigError(f"parse_tools={shown(parse)}: must be True, False or None")
    if not isinstance(context, Mapping):
        raise GenerationConfigError(
            f"extra_context={shown(context)}: must be a dict of variables for the chat template"
        )
    names = [str(function_of(tool)["name"]) for tool in tools]
    choice, name = _tool_choice(given.get("tool_choice", "auto"), names)
    return ToolOptions(tuple(tools), choice, name, parse, dict(context))


def _tool_choice(value: object, names: Sequence[str]) -> tuple[str, str]:
    if value is None or value in ("auto", "none"):
        return str(value or "auto"), ""
    wanted = value.get("function") if isinstance(value, Mapping) else None
    name = wanted.get("name") if isinstance(wanted, Mapping) else None
    if value != "required" and not isinstance(name, str):
        raise GenerationConfigError(
            f"tool_choice={shown(value)}: must be 'auto', 'none', 'required' or "
            "{'type': 'function', 'function': {'name': …}}"
        )
    if not names:
        raise GenerationConfigError(f"tool_choice={shown(value)} without tools: pass the functions as tools=[…]")
    if isinstance(name, str) and name not in names:
        raise GenerationConfigError(f"tool_choice names {shown(name)}: the tools are {', '.join(names)}")
    return ("function", name) if isinstance(name, str) else ("required", "")


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the function of a tool, which has the keys ``name``, ``description`` and ``parameters`` (a JSON schema)."""
    inner = tool.get("function")
    return inner if isinstance(inner, Mapping) else tool


def is_tool(value: object) -> bool:
    """Return whether ``value`` is the definition of a function: a mapping with a name, as it is or below ``function``."""
    if not isinstance(value, Mapping):
        return False
    function = function_of(value)
    parameters = function.get("parameters")
    name = function.get("name")
    return isinstance(name, str) and bool(name) and (parameters is None or isinstance(parameters, Mapping))
