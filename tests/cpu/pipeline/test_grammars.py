"""Tests grammars with the embedded model: every answer of random text is valid, whatever else is asked for."""

from __future__ import annotations

import json
import re

import openvino_genai as genai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openvino_genai import StructuredOutputConfig as Soc
from support.quick import examples

import staticllm
from staticllm import GenerationConfigError, StaticLLMPipeline
from staticllm.pipelines.scheduling.planner import POLICIES
from tests.support.attach.daemons import daemon_thread
from tests.support.helpers import EXACT, assert_nothing_held

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

pytestmark = pytest.mark.usefixtures("shared_programs")

WILD = {"do_sample": True, "temperature": 3.0, "apply_chat_template": False}
LENGTHS = {"MAX_PROMPT_LEN": 64, "MIN_RESPONSE_LEN": 960}
CITIES = {
    "type": "object",
    "properties": {"city": {"enum": ["Dublin", "Dubai"]}, "age": {"type": "integer", "minimum": 0, "maximum": 128}},
    "required": ["city", "age"],
}


@pytest.fixture(scope="module")
def pipe():
    with StaticLLMPipeline(staticllm.demo_model_path(), "CPU", MAX_NUM_SEQS=4, **LENGTHS, **EXACT) as pipe:
        yield pipe


scalars = st.one_of(
    st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"const": 'é"\\'},
            {"const": 7},
            {"format": "ipv4", "type": "string"},
            {"type": "string", "pattern": "^[A-Z][a-z]{1,6}$"},
            {"type": "string", "format": "password", "maxLength": 4},
        ]
    ),
    st.integers(0, 6).map(lambda most: {"type": "string", "maxLength": most}),
    st.tuples(st.integers(0, 3), st.integers(3, 6)).map(
        lambda both: {"type": "string", "minLength": both[0], "maxLength": both[1]}
    ),
    st.tuples(st.integers(-200, 0), st.integers(0, 9999)).map(
        lambda both: {"type": "integer", "minimum": both[0], "maximum": both[1]}
    ),
    st.lists(
        st.one_of(
            st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=6),
            st.integers(-99, 99),
            st.booleans(),
        ),
        min_size=1,
        max_size=4,
    ).map(lambda values: {"enum": values}),
)
names = st.text("abcdefgh_é ", min_size=1, max_size=6)


def objects(inner):
    def build(parts):
        properties, required, closed = parts
        schema = {
            "type": "object",
            "properties": properties,
            "required": [name for name in properties if name in required],
        }
        return {**schema, "additionalProperties": False} if closed else schema

    return st.tuples(
        st.dictionaries(names, inner, min_size=1, max_size=4), st.sets(names, max_size=3), st.booleans()
    ).flatmap(lambda parts: st.just(build((parts[0], parts[1] | set(list(parts[0])[::2]), parts[2]))))


schemas = st.recursive(
    scalars,
    lambda inner: st.one_of(
        objects(inner),
        st.tuples(inner, st.integers(0, 1), st.integers(1, 3)).map(
            lambda three: {"type": "array", "items": three[0], "minItems": three[1], "maxItems": three[2]}
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts}),
        inner.map(
            lambda schema: (
                {"$ref": "#/$defs/x", "$defs": {"x": schema}} if "$defs" not in json.dumps(schema) else schema
            )
        ),
    ),
    max_leaves=5,
)


def is_top_level_reference(schema):
    """Return whether references, which begin at the root, can be followed."""
    inner = dict(schema)
    inner.pop("$defs", None)
    return "$defs" not in json.dumps(inner) or inner.get("$ref") == "#/$defs/x"


def check(schema, text):
    jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker(["ipv4"])).validate(
        json.loads(text)
    )


@settings(deadline=None, max_examples=examples(300), suppress_health_check=list(HealthCheck))
@given(schema=schemas.filter(is_top_level_reference), seed=st.integers(1, 1 << 30))
def test_every_answer_validates(pipe, schema, seed):
    answer = pipe.generate("Write JSON.", json_schema=schema, rng_seed=seed, max_new_tokens=900, **WILD)
    assert answer.finish_reasons == ["stop"], answer
    check(schema, answer)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"regex": r"\d{4}-\d{2}-\d{2}"}, r"\d{4}-\d{2}-\d{2}"),
        ({"regex": re.compile("^(Dublin|Dubai)!{1,3}$")}, "(Dublin|Dubai)!{1,3}"),
        ({"choice": ["yes", "no", "I do not know"]}, "yes|no|I do not know"),
        ({"grammar": 'root ::= "<" [a-f]{2,5} ">" root | "."'}, r"(<[a-f]{2,5}>)*\."),
        ({"grammar": 'start: "a" B+\nB: /[xy]/'}, "a[xy]+"),
        ({"grammar": Soc.ConstString("a") + Soc.Regex("b{1,3}") | Soc.ConstString("c")}, "ab{1,3}|c"),
        ({"structured_output_config": Soc(regex="^[a-z]{3}$")}, "[a-z]{3}"),
        ({"structured_output_config": Soc(grammar='root ::= "x" | "y"')}, "x|y"),
        ({"structured_output_config": Soc(compound_grammar=Soc.ConstString("one"))}, "one"),
        (
            {
                "structured_output_config": Soc(
                    structural_tags_config='{"type": "structural_tag", "format": {"type": "const_string", "value": "abc"}}'
                )
            },
            "abc",
        ),
    ],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_every_kind_of_grammar(pipe, options, pattern, seed):
    answer = pipe.generate("Hello", rng_seed=seed, max_new_tokens=900, **options, **WILD)
    assert answer.finish_reasons == ["stop"]
    assert re.fullmatch(pattern, answer)


def test_the_old_structural_tags(pipe):
    tags = genai.StructuralTagsConfig(
        structural_tags=[genai.StructuralTagItem(begin="<f>", schema=json.dumps(CITIES), end="</f>")], triggers=["<f>"]
    )
    config = genai.GenerationConfig(max_new_tokens=400, do_sample=True, rng_seed=3, temperature=3.0)
    config.structured_output_config = Soc(structural_tags_config=tags)
    text = pipe.generate("Hello", config)
    for found in re.findall("<f>(.*?)</f>", text):
        check(CITIES, found)


def test_a_pydantic_model_is_a_schema(pipe):
    pydantic = pytest.importorskip("pydantic")

    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(pattern="^[A-Z][a-z]{1,20}$")
        age: int = pydantic.Field(ge=0, le=128)
        tags: list[bool] = pydantic.Field(max_length=2)

    for seed in range(1, 6):
        Person.model_validate_json(
            pipe.generate("A person", json_schema=Person, rng_seed=seed, max_new_tokens=300, **WILD)
        )


def test_greedy_answers_beside_others_and_with_everything_else(pipe):
    """Penalties, a minimum, log-probabilities, several answers, stop strings and streams, all at once."""
    greedy = pipe.generate("Hello", json_schema=CITIES, max_new_tokens=200)
    free = pipe.generate("What is an NPU?", max_new_tokens=24)
    handles = [
        pipe.submit("Hello", json_schema=CITIES, max_new_tokens=200),
        pipe.submit(
            "Hello",
            json_schema=CITIES,
            max_new_tokens=200,
            logprobs=1,
            repetition_penalty=1.3,
            presence_penalty=0.4,
            min_new_tokens=5,
        ),
        pipe.submit("Hello", regex="[a-z]{20,40}", max_new_tokens=60, num_return_sequences=4, rng_seed=5, **WILD),
        pipe.submit("What is an NPU?", max_new_tokens=24),
        pipe.submit("Hello", regex="(ab|cd){30,60}", stop_strings={"cdab"}, max_new_tokens=200, rng_seed=2, **WILD),
    ]
    same, penalized, several, other, stopped = (handle.result() for handle in handles)
    assert same == greedy
    check(CITIES, greedy)
    check(CITIES, penalized)
    assert penalized.scores[0] < 0
    assert len(set(several.texts)) == 4
    assert all(re.fullmatch("[a-z]{20,40}", text) for text in several.texts)
    assert other == free
    assert re.fullmatch("(ab|cd)*", stopped)
    assert "cdab" not in stopped
    parts = []
    assert (
        pipe.generate("Hello", json_schema=CITIES, max_new_tokens=200, streamer=parts.append)
        == "".join(parts)
        == greedy
    )
    assert_nothing_held(pipe)


def test_several_answers_are_those_of_single_calls(pipe):
    options = {"json_schema": CITIES, "max_new_tokens": 200, **WILD}
    together = pipe.generate(["Hello"], num_return_sequences=3, rng_seed=11, **options).texts
    assert together == [pipe.generate("Hello", rng_seed=11 + index, **options) for index in range(3)]


def test_a_default_grammar_and_its_replacement(pipe):
    config = pipe.get_generation_config()
    config.structured_output_config = Soc(regex="[ab]{3}")
    assert re.fullmatch("[ab]{3}", pipe.generate("Hello", config, max_new_tokens=9))
    assert pipe.generate("Hello", config, max_new_tokens=9, choice=["xyz"]) == "xyz"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "a", "choice": ["b"]}, "choice and regex in one call"),
        ({"regex": "a", "structured_output_config": Soc(regex="b")}, "regex and structured_output_config in one call"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos=True with a grammar"),
        ({"regex": "(?=a)b"}, r"the grammar \(regex\) cannot be compiled"),
        ({"regex": ""}, "regex='': must be a str"),
        ({"choice": []}, "must be a list of str"),
        ({"choice": ["a", 3]}, "must be a list of str"),
        ({"json_schema": "{"}, "the JSON schema is no JSON"),
        ({"json_schema": {"type": "spam"}}, "cannot be compiled"),
        ({"json_schema": {"a": {1}}}, "the JSON schema is no JSON"),
        ({"json_schema": 3}, "must be a str that is not empty, a dict or a pydantic model"),
        ({"grammar": "root"}, "malformed at line 1"),
        ({"grammar": 3}, "must be a str that is not empty in EBNF or Lark"),
        ({"structured_output_config": 3}, "must be an openvino_genai.StructuredOutputConfig"),
        ({"structured_output_config": Soc()}, "has no grammar"),
        ({"regex": "[a-z]{999}", "max_new_tokens": 3}, "max_new_tokens=3 leaves no room"),
        ({"choice": ["What is an NPU? What is an NPU?"], "max_new_tokens": 2}, "max_new_tokens=2 leaves no room"),
        ({"regexp": "a"}, "did you mean 'regex'"),
    ],
)
def test_impossible_grammars_are_one_line_errors(pipe, options, message):
    with pytest.raises(GenerationConfigError, match=message) as error:
        pipe.generate("Hello", **{"max_new_tokens": 20, **options})
    assert "\n" not in str(error.value)
    assert pipe.generate("Hello", choice=["yes"], max_new_tokens=9) == "yes"


@pytest.mark.parametrize("scheduler", sorted(POLICIES))
def test_under_every_policy(scheduler):
    with StaticLLMPipeline(staticllm.demo_model_path(), "CPU", scheduler=scheduler, MAX_NUM_SEQS=2, **LENGTHS) as pipe:
        handles = [
            pipe.submit("Hello", json_schema=CITIES, max_new_tokens=200, rng_seed=seed, **WILD) for seed in range(1, 7)
        ]
        for handle in handles:
            check(CITIES, handle.result())


def test_the_daemon_compiles_grammars_too(monkeypatch, tmp_path, pipe):
    expected = pipe.generate("Hello", json_schema=CITIES, max_new_tokens=200)
    with daemon_thread(monkeypatch, tmp_path / "run"):
        load = {"MAX_NUM_SEQS": 4, **LENGTHS, **EXACT, "daemon": True}
        with StaticLLMPipeline(staticllm.demo_model_path(), "CPU", **load) as remote:
            assert remote.generate("Hello", json_schema=CITIES, max_new_tokens=200) == expected
            with pytest.raises(GenerationConfigError, match="cannot be compiled"):
                remote.generate("Hello", regex="(?=a)b", max_new_tokens=9)
            assert remote.generate("Hello", choice=["yes"], max_new_tokens=9) == "yes"
        own = genai.Tokenizer(staticllm.demo_model_path())
        with (
            StaticLLMPipeline(staticllm.demo_model_path(), "CPU", tokenizer=own, **load) as remote,
            pytest.raises(GenerationConfigError, match="daemon=True"),
        ):
            remote.generate("Hello", choice=["yes"])


@pytest.mark.parametrize("options", [{}, {"num_beam_groups": 2, "diversity_penalty": 0.5}, {"stop_criteria": "never"}])
def test_beams_keep_a_grammar_alone_and_beside_others(pipe, options):
    asked = {"num_beams": 4, "num_return_sequences": 3, "max_new_tokens": 60, "regex": "[a-d]{2}-[0-9]{1,3}", **options}
    other = pipe.submit("Hello", json_schema=CITIES, max_new_tokens=200, rng_seed=1, **WILD)
    result = pipe.generate(["Hello"], **asked)
    check(CITIES, other.result())
    assert all(re.fullmatch("[a-d]{2}-[0-9]{1,3}", text) for text in result.texts)
    assert list(result.scores) == sorted(result.scores, reverse=True)
    again = pipe.generate(["Hello"], **asked)
    assert (again.texts, again.scores) == (result.texts, pytest.approx(result.scores, abs=1e-4))
    with pytest.raises(GenerationConfigError, match="num_return_sequences is 4") as error:
        pipe.generate(["Hello"], num_beams=4, num_return_sequences=4, choice=["yes"], max_new_tokens=9)
    assert "\n" not in str(error.value)


def test_metrics_have_the_time_of_a_grammar(pipe):
    result = pipe.generate(
        ["Hello"] * 2, regex="[a-f]{5,9}x", do_sample=True, num_return_sequences=2, max_new_tokens=20
    )
    metrics = result.perf_metrics
    assert len(metrics.raw_metrics.grammar_compile_times) == 2  # of each prompt
    mean, _, least, most = metrics.get_grammar_compile_time().as_tuple()
    assert 0 < least <= mean <= most
    assert metrics.get_grammar_compiler_init_times()["llguidance"] > 0
    free = pipe.generate(["Hello"], max_new_tokens=2).perf_metrics
    assert free.get_grammar_compile_time().as_tuple() == (-1, -1, -1, -1)
    assert (free + metrics).get_grammar_compile_time() == metrics.get_grammar_compile_time()
    assert (free + metrics).get_grammar_compiler_init_times() == metrics.get_grammar_compiler_init_times()
