"""Translates a grammar into a syntax tree, and into the text that llguidance compiles.

The formats of structural tags, which mix free text with parts that a grammar governs, and their names are those of xgrammar's
JSON, which GenAI's ``StructuredOutputConfig`` also writes, and two of our own. ``string`` is a string of a JSON schema without
quotes, which does not contain the text ``excluded``. ``plain_string`` is a ``const_string`` without special tokens. Free text in
a tag ends with the first occurrence of the tag's end; free text elsewhere goes on to the end of the answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from staticllm.errors import GenerationConfigError

from ..generation.grammar import Grammar
from .ebnf import ROOT, parse_ebnf
from .json_schema import json_value, prepared, read_schema
from .nodes import (
    Alternatives,
    FixedText,
    LarkWriter,
    Node,
    Pattern,
    Reference,
    Repeat,
    Rules,
    Schema,
    Sequence,
    Shortest,
    one_of,
)
from .parameters import plain_text, xml_parameters
from .regex import rust_regex


@dataclass(frozen=True)
class SyntaxTree:
    """What an answer consists of, and the rules that it refers to."""

    root: Node
    rules: Rules = field(default_factory=dict)


def tree_of(grammar: Grammar, special: Mapping[str, int] | None = None) -> SyntaxTree | None:
    """Return the syntax tree of a grammar; None for one in Lark, which only llguidance reads.

    Where a structural tag has the text of one of the ``special`` tokens (ids by text), it stands for the token.

    Raises:
        GenerationConfigError: the grammar is malformed.
    """
    if grammar.kind == "json_schema":
        return SyntaxTree(Schema(prepared(read_schema(grammar.text))))
    if grammar.kind == "regex":
        return SyntaxTree(Pattern(rust_regex(grammar.text)))
    if grammar.kind == "choice":
        return SyntaxTree(one_of([FixedText(text) for text in choices_of(grammar)]))
    if grammar.kind == "ebnf":
        return SyntaxTree(Reference(ROOT), parse_ebnf(grammar.text))
    if grammar.kind == "structural_tag":
        tag = StructuralTag(grammar.text)
        return SyntaxTree(tag.root.with_special_tokens(special or {}), tag.rules)
    return None


def lark_of(grammar: Grammar, special: Mapping[str, int] | None = None) -> str:
    """Return the text of a grammar for llguidance. ``special`` is as for ``tree_of``.

    Raises:
        GenerationConfigError: the grammar is malformed.
    """
    tree = tree_of(grammar, special)
    return grammar.text if tree is None else LarkWriter(tree.rules).write(tree.root)


def choices_of(grammar: Grammar) -> list[str]:
    """Return the strings of a grammar of the kind ``choice``.

    Raises:
        GenerationConfigError: they are not a list of strings.
    """
    try:
        choices = json.loads(grammar.text)
    except ValueError:
        choices = None
    if not isinstance(choices, list) or not choices or not all(isinstance(text, str) for text in choices):
        raise GenerationConfigError(f"choice={grammar.text[:80]!r}: must be a list of str that is not empty")
    return choices


Ends = tuple[str, ...]
Format = Mapping[str, Any]
FREE_TEXT = Pattern("(?s:.*)")
MAX_DEPTH = 100


class StructuralTag:
    """The syntax tree of one structural tag: ``root`` and the rules that it refers to."""

    def __init__(self, text: str) -> None:
        given = json_value(text, "the structural tag")
        if isinstance(given, dict) and given.get("type") == "structural_tag":
            given = given.get("format")
        self.rules: dict[str, Node] = {}
        self._depth = 0
        self._num_grammars = 0
        self._writers: dict[str, Callable[[Format, Ends], Node]] = {
            "const_string": lambda form, ends: FixedText(_text(form, "value")),
            "plain_string": lambda form, ends: FixedText(_text(form, "value"), is_plain=True),
            "json_schema": lambda form, ends: self._schema(form),
            "qwen_xml_parameter": lambda form, ends: xml_parameters(_schema_of(form)),
            "string": lambda form, ends: plain_text(_schema_of(form), _text(form, "excluded")),
            "any_text": self._any_text,
            "grammar": lambda form, ends: self._grammar(form),
            "regex": lambda form, ends: Pattern(rust_regex(_text(form, "pattern"))),
            "sequence": self._sequence,
            "or": lambda form, ends: one_of([self._node(each, ends) for each in _parts(form, "elements")]),
            "optional": lambda form, ends: Repeat(self._limited(form["content"]), 0, 1),
            "plus": lambda form, ends: Repeat(self._limited(form["content"]), 1, None),
            "star": lambda form, ends: Repeat(self._limited(form["content"]), 0, None),
            "tag": lambda form, ends: self._tag(form),
            "triggered_tags": self._triggered,
            "tags_with_separator": lambda form, ends: self._separated(form),
        }
        self.root = self._node(given, ())

    def _node(self, form: Any, ends: Ends) -> Node:
        """Return the tree of a format. If it ends with free text, the tree includes one of ``ends``."""
        kind = form.get("type") if isinstance(form, dict) else form
        if not isinstance(kind, str) or not isinstance(form, dict) or kind not in self._writers:
            known = ", ".join(self._writers)
            raise GenerationConfigError(f"a structural tag has a format {kind!r}: must be one of {known}")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise GenerationConfigError(f"a structural tag has more than {MAX_DEPTH} nested formats: use fewer")
        if form["type"] == "or":
            free = [is_free(each) for each in _parts(form, "elements")]
            if any(free) and not all(free):
                raise GenerationConfigError(
                    "a structural tag has a choice (or) of free text and other formats: make all of them free text, or none"
                )
        try:
            return self._writers[form["type"]](form, ends)
        except KeyError as error:
            raise GenerationConfigError(
                f"a structural tag has a format {form['type']!r} without {error.args[0]!r}: add it"
            ) from None
        finally:
            self._depth -= 1

    def _limited(self, form: Any) -> Node:
        if is_free(form):
            raise GenerationConfigError(
                "a structural tag has something after free text, which has no end: put the free text into a tag with an end"
            )
        return self._node(form, ())

    def _schema(self, form: Format) -> Node:
        if form.get("style", "json") == "qwen_xml":
            return xml_parameters(_schema_of(form))
        if form.get("style", "json") != "json":
            raise GenerationConfigError(f"a JSON schema in the style {form['style']!r}: must be json or qwen_xml")
        return Schema(prepared(_schema_of(form)))

    def _any_text(self, form: Format, ends: Ends) -> Node:
        if form.get("excludes"):
            raise GenerationConfigError("any_text with excludes is not supported: put it into a tag with an end")
        return Shortest(ends) if ends else FREE_TEXT

    def _grammar(self, form: Format) -> Node:
        prefix = f"{self._num_grammars}/"
        self._num_grammars += 1
        self.rules.update(parse_ebnf(_text(form, "grammar"), prefix))
        return Reference(prefix + ROOT)

    def _sequence(self, form: Format, ends: Ends) -> Node:
        *first, last = _parts(form, "elements")
        return Sequence((*map(self._limited, first), self._node(last, ends)))

    def _tag(self, form: Format, begin: str | None = None) -> Node:
        """Return a tag; ``begin`` replaces its beginning."""
        ends = _ends(form)
        start = FixedText(_text(form, "begin", True) if begin is None else begin)
        if not is_free(form["content"]):
            return Sequence((start, self._node(form["content"], ()), one_of([FixedText(end) for end in ends])))
        if not all(ends):
            raise GenerationConfigError("a tag with free text has an empty end: give its end, at which the text stops")
        return Sequence((start, self._node(form["content"], ends)))

    def _triggered(self, form: Format, ends: Ends) -> Node:
        """Return text with tags: as soon as a trigger was written, one of its tags must follow."""
        triggers = form["triggers"]
        tags = _tags(form)
        stops = bool(form.get("stop_after_first"))
        at_least_one = bool(form.get("at_least_one"))
        if (
            not isinstance(triggers, list)
            or not triggers
            or not all(isinstance(trigger, str) and trigger for trigger in triggers)
        ):
            raise GenerationConfigError(
                f"triggered tags have the triggers {triggers!r}: must be strings that are not empty"
            )
        after: dict[str, list[Node]] = {trigger: [] for trigger in triggers}
        for tag in tags:
            begin = _text(tag, "begin")
            matching = [trigger for trigger in triggers if begin.startswith(trigger)]
            if len(matching) != 1:
                raise GenerationConfigError(
                    f"the tag {begin!r} begins with {len(matching)} of the triggers {triggers!r}: must be one"
                )
            after[matching[0]].append(self._tag(tag, begin.removeprefix(matching[0])))
        free: list[Node] = [
            Sequence((Shortest((trigger,)), one_of(bodies))) for trigger, bodies in after.items() if bodies
        ]
        rest: Node = Shortest(ends) if ends else FREE_TEXT
        close = one_of([FixedText(end) for end in ends]) if ends else FixedText("")
        if at_least_one and stops:
            return Sequence((one_of([self._tag(tag) for tag in tags]), close))
        if stops:
            return Alternatives((*(Sequence((each, close)) for each in free), rest))
        loop = Sequence((Repeat(one_of(free), 0, None), rest))
        return Sequence((one_of([self._tag(tag) for tag in tags]), loop)) if at_least_one else loop

    def _separated(self, form: Format) -> Node:
        tag = one_of([self._tag(tag) for tag in _tags(form)])
        more = Repeat(Sequence((FixedText(_text(form, "separator", True)), tag)), 0, None)
        body: Node = tag if form.get("stop_after_first") else Sequence((tag, more))
        return body if form.get("at_least_one") else Repeat(body, 0, 1)


def is_free(form: Any) -> bool:
    """Return whether a format ends with free text, which only the end of a tag or of the answer ends."""
    if not isinstance(form, dict):
        return False
    if form.get("type") in ("sequence", "or"):
        elements = form.get("elements")
        if not isinstance(elements, list) or not elements:
            return False
        return is_free(elements[-1]) if form["type"] == "sequence" else any(map(is_free, elements))
    return form.get("type") in ("any_text", "triggered_tags")


def has_free_text(text: str) -> bool:
    """Return whether a structural tag, given as JSON, leaves any part of an answer to the model."""
    todo: list[Any] = [json_value(text, "the structural tag")]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            if value.get("type") in ("any_text", "triggered_tags"):
                return True
            todo += value.values()
        elif isinstance(value, list):
            todo += value
    return False


def _text(form: Format, name: str, may_be_empty: bool = False) -> str:
    value = form[name]
    if not isinstance(value, str) or not (value or may_be_empty or name == "value"):
        raise GenerationConfigError(f"a structural tag has {name}={value!r}: must be a str that is not empty")
    return value


def _ends(form: Format) -> Ends:
    value = form["end"]
    ends = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else ()
    if not ends or not all(isinstance(end, str) for end in ends):
        raise GenerationConfigError(f"a tag has end={value!r}: must be a str or a list of str")
    return ends


def _parts(form: Format, name: str) -> list[Any]:
    value = form[name]
    if not isinstance(value, list) or not value:
        raise GenerationConfigError(f"a structural tag has {name}={value!r}: must be a list that is not empty")
    return value


def _tags(form: Format) -> list[Any]:
    tags = _parts(form, "tags")
    if wrong := [tag for tag in tags if not isinstance(tag, dict)]:
        raise GenerationConfigError(
            f"a structural tag has the tag {wrong[0]!r:.80}: must be an object with begin, content and end"
        )
    return tags


def _schema_of(form: Format) -> Any:
    schema = form["json_schema"]
    return read_schema(schema) if isinstance(schema, str) else schema
