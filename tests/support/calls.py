"""Chat templates that show calls as families of models write them, and the formats that are learnt from them."""

from staticllm.pipelines.conversation.formats import find_format

_BEGIN = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
_ARGUMENTS = "{{ c.function.arguments | tojson }}"
_NAME = "{{ c.function.name }}"


def showing(call, before="", after="", turn="{{ m.content or '' }}"):
    """Return a template with ``call`` for each call of a message, and with what is around all of them."""
    calls = f"{before}{{% for c in m.tool_calls %}}{call}{{% endfor %}}{after}"
    return f"{_BEGIN}{turn}{{% if m.tool_calls %}}{calls}{{% endif %}}{{% endfor %}}"


def _each(parameter):
    return "{% for name, value in c.function.arguments.items() %}" + parameter + "{% endfor %}"


_VALUE = "{{ value if value is string else value | tojson }}"
XML = showing(
    f"<tool_call>\n<function={_NAME}>\n"
    + _each("<parameter={{ name }}>\n" + _VALUE + "\n</parameter>\n")
    + "</function>\n</tool_call>\n"
)
GLM = showing(
    f"<tool_call>{_NAME}\n"
    + _each("<arg_key>{{ name }}</arg_key>\n<arg_value>" + _VALUE + "</arg_value>\n")
    + "</tool_call>\n"
)
_DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK = showing(
    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{_NAME}\n```json\n{_ARGUMENTS}\n```<｜tool▁call▁end｜>", *_DEEPSEEK
)
DEEPSEEK_31 = showing(f"<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>{_ARGUMENTS}<｜tool▁call▁end｜>", *_DEEPSEEK)
FUNCTION_JSON = showing(f"<function={_NAME}>{_ARGUMENTS}</function>")
MISTRAL = showing(f"[TOOL_CALLS]{_NAME}[CALL_ID]{{{{ c.id }}}}[ARGS]{_ARGUMENTS}")
LEARNT = {
    name: find_format(template)
    for name, template in (
        ("xml", XML), ("glm", GLM), ("deepseek", DEEPSEEK), ("deepseek31", DEEPSEEK_31), ("function_json", FUNCTION_JSON),
        ("mistral", MISTRAL),
    )
}  # fmt: skip
