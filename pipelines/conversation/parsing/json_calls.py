"""Calls as JSON objects: ``{"name": …, "arguments": …}`` with markers around them, or bare at the beginning of an answer."""

from __future__ import annotations

import json
from collections.abc import Callable

from staticllm.pipelines.conversation.parsing.json_text import take_json, take_value
from staticllm.pipelines.conversation.parsing.output import Output
from staticllm.pipelines.conversation.parsing.source import MalformedError, Source, Steps

ARGUMENT_KEYS = ("arguments", "parameters")
NAME_KEYS = ("name", "tool_name")
CALL_KEYS = (*ARGUMENT_KEYS, *NAME_KEYS, "function", "type", "id")
MAX_ID_CHARS = 64


class CallObject:
    """One call object, whose keys may come in any order. Arguments are written as they come once the name is known.

    ``is_bare``: the text may also be an ordinary JSON object, so the call begins only with arguments for a known function.
    """

    def __init__(self, source: Source, output: Output, is_bare: bool = False) -> None:
        self._source, self._output, self._is_bare = source, output, is_bare
        self._name: str | None = None
        self._waiting: list[str] | None = None  # arguments that came before the name
        self._has_begun = False

    def take(self) -> Steps[None]:
        """Take the object, and write the call.

        Raises:
            MalformedError: it is no call.
        """
        yield from self._object(is_inner=False)
        if not self._has_begun:
            if self._name is None or (self._waiting is None and self._is_bare):
                raise MalformedError("an object without a name or arguments")
            self._begin()
            self._output.arguments("{}" if self._waiting is None else "".join(self._waiting))
        self._output.end_call()
        self._source.mark()

    def _object(self, is_inner: bool) -> Steps[None]:
        source = self._source
        yield from source.expect("{")
        if (yield from source.skip_space()) != '"':
            raise MalformedError("an object without keys")
        while True:
            yield from self._member(is_inner)
            after = yield from source.skip_space()
            if after == "}":
                source.take()
                return
            yield from source.expect(",")
            if (yield from source.skip_space()) != '"':
                raise MalformedError("a key is missing")

    def _member(self, is_inner: bool) -> Steps[None]:
        source = self._source
        key = yield from take_value(source)
        if self._is_bare and key not in CALL_KEYS:
            raise MalformedError("an ordinary object")
        yield from source.skip_space()
        yield from source.expect(":")
        first = yield from source.skip_space()
        if key in NAME_KEYS or (key == "function" and first == '"'):
            if first != '"' or self._name is not None:
                raise MalformedError("the name is no string, or comes twice")
            self._name = yield from take_value(source)
        elif key == "function" and first == "{" and not is_inner:
            yield from self._object(is_inner=True)
        elif key in ARGUMENT_KEYS:
            yield from self._arguments(first)
        else:
            yield from take_value(source)

    def _arguments(self, first: str) -> Steps[None]:
        if self._waiting is not None or self._has_begun:
            raise MalformedError("arguments come twice")
        if first == "{":
            write: Callable[[str], object] = self._output.arguments
            if self._name is None:
                self._waiting = []
                write = self._waiting.append
            else:
                self._begin()
            yield from take_json(self._source, write)
            return
        value = yield from take_value(self._source)
        text = "{}" if value is None else value
        if not isinstance(text, str) or not isinstance(_loaded(text), dict):
            raise MalformedError("arguments that are no object")
        self._waiting = [text]

    def _begin(self) -> None:
        name = self._name or ""
        if not name:
            raise MalformedError("an empty name")
        if self._is_bare:
            self._output.begin_bare_call(name)
        else:
            self._output.begin_call(name)
        self._has_begun = True


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def take_call_objects(source: Source, output: Output, is_bare: bool = False) -> Steps[None]:
    """Take one call object, or a list of them; ``is_bare`` as for ``CallObject``.

    Raises:
        MalformedError: it is neither. The calls before the one that is malformed are written.
    """
    if (yield from source.skip_space()) != "[":
        yield from CallObject(source, output, is_bare).take()
        return
    source.take()
    while True:
        yield from source.skip_space()
        yield from CallObject(source, output, is_bare).take()
        if (yield from source.skip_space()) == "]":
            source.take()
            return
        yield from source.expect(",")


def take_bare_objects(source: Source, output: Output) -> Steps[None]:
    """Take a list of call objects, or objects that are separated by semicolons.

    Raises:
        MalformedError: one is no call of a known function.
    """
    if (yield from source.skip_space()) == "[":
        yield from take_call_objects(source, output, is_bare=True)
        return
    yield from CallObject(source, output, is_bare=True).take()
    while (yield from source.skip_space()) == ";":
        source.take()
        yield from source.skip_space()
        yield from CallObject(source, output, is_bare=True).take()


def take_listed_calls(source: Source, output: Output) -> Steps[None]:
    """Take ``{"tool_calls": [...]}``, as tools are described to models whose template shows none. It may have a ``content``.

    Raises:
        MalformedError: it is something else. The calls before the one that is malformed are written.
    """
    yield from source.skip_space()
    yield from source.expect("{")
    content, has_calls = "", False
    while True:
        yield from source.skip_space()
        key = yield from take_value(source)
        yield from source.skip_space()
        yield from source.expect(":")
        if key == "tool_calls" and not has_calls and (yield from source.skip_space()) == "[":
            yield from take_call_objects(source, output, is_bare=True)
            has_calls = True
        elif key == "content":
            content = str((yield from take_value(source)) or "")
        else:
            raise MalformedError("an ordinary object")
        if (yield from source.skip_space()) == "}":
            break
        yield from source.expect(",")
    if not has_calls:
        raise MalformedError("an object without calls")
    source.take()
    output.content(content)


def take_keyed_calls(source: Source, output: Output) -> Steps[None]:
    """Take a list of objects ``{"name": {…}}``, whose keys are the functions and whose values are the arguments.

    Raises:
        MalformedError: it is none. The calls before the one that is malformed are written.
    """
    yield from source.skip_space()
    is_list = yield from source.skip("[")
    while True:
        yield from source.skip_space()
        yield from source.expect("{")
        yield from source.skip_space()
        name = yield from take_value(source)
        if not isinstance(name, str) or not name:
            raise MalformedError("a call without a name")
        yield from source.skip_space()
        yield from source.expect(":")
        if (yield from source.skip_space()) != "{":
            raise MalformedError("arguments that are no object")
        output.begin_bare_call(name)
        yield from take_json(source, output.arguments)
        yield from source.skip_space()
        yield from source.expect("}")
        output.end_call()
        source.mark()
        if not is_list or (yield from source.skip_space()) != ",":
            break
        source.take()
    if is_list:
        yield from source.expect("]")


def take_named_calls(source: Source, output: Output) -> Steps[None]:
    """Take what follows ``[TOOL_CALLS]``: a list of call objects, or ``name[ARGS]{…}``, or ``name{…}``.

    Raises:
        MalformedError: it is neither.
    """
    if (yield from source.skip_space()) in ("[", "{"):
        yield from take_call_objects(source, output)
        return
    name = (yield from source.word("[{")).strip()
    if not name:
        raise MalformedError("a call without a name")
    if (yield from source.skip("[CALL_ID]")):
        yield from source.word("[", MAX_ID_CHARS)
    yield from source.skip("[ARGS]")
    if (yield from source.skip_space()) != "{":
        raise MalformedError("a call without arguments")
    output.begin_call(name)
    yield from take_json(source, output.arguments)
    output.end_call()
    source.mark()
