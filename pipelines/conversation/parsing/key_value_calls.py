"""Calls with a pair of tags per parameter (GLM 4.5): ``<tool_call>weather<arg_key>city</arg_key><arg_value>…``."""

from __future__ import annotations

import json
from collections.abc import Mapping

from staticllm.pipelines.conversation.parsing.json_calls import take_call_objects
from staticllm.pipelines.conversation.parsing.output import Output
from staticllm.pipelines.conversation.parsing.source import MalformedError, Source, Steps
from staticllm.pipelines.conversation.parsing.xml_calls import Types, take_parameter_value

ARG_KEY, ARG_VALUE = ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")


def take_key_value_call(source: Source, output: Output, functions: Mapping[str, Types], end: str) -> Steps[None]:
    """Take what follows ``<tool_call>``: a name, pairs of keys and values, and ``end``, which is not taken.

    Values are written as in ``take_xml_call``, but without line breaks around them. A JSON object is taken as well.

    Raises:
        MalformedError: it is no call.
    """
    if (yield from source.skip_space()) in "{[":
        yield from take_call_objects(source, output)
        return
    name = (yield from source.word("\n<")).strip()
    if not name:
        raise MalformedError("a call without a name")
    output.begin_call(name)
    types, seen, before = functions.get(name, {}), set[str](), "{"
    while (yield from source.skip_space()) and not (yield from source.starts_with(end)):
        yield from source.expect(ARG_KEY[0])
        key = (yield from source.word("<")).strip()
        yield from source.expect(ARG_KEY[1])
        yield from source.skip_space()
        yield from source.expect(ARG_VALUE[0])
        if not key or key in seen:
            raise MalformedError(f"the parameter {key!r} is empty or comes twice")
        seen.add(key)
        written = f"{before}{json.dumps(key, ensure_ascii=False)}: "
        if (yield from take_parameter_value(source, output, written, types.get(key, {}), ARG_VALUE[1])):
            before = ", "
    if not (yield from source.starts_with(end)):
        raise MalformedError("a call without an end")
    output.arguments("{}" if before == "{" else "}")
    output.end_call()
    source.mark()
