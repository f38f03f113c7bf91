"""`/v1/decisions` and `/v1/systemone`: the forms of both APIs, what they refuse, and clients that leave."""

from __future__ import annotations

import json
import time

import httpx
import pytest
from support.server.served import serving

from staticllm import demo_model_path
from staticllm.server.models.served import ModelSpec

S = "Parcel 88 arrived broken. Please send a new one, I leave on Friday."
P = {"type": "predicate", "name": "broken", "instructions": "The parcel arrived damaged."}
C = {
    "type": "choice",
    "name": "desk",
    "instructions": "Which desk takes this?",
    "choices": [
        {"value": "money", "description": "refunds, invoices"},
        {"value": "parcels", "description": "lost or damaged parcels"},
        {"value": "praise"},
    ],
}
L = {
    "type": "score",
    "name": "heat",
    "instructions": "How urgent is it?",
    "levels": [{"label": "can wait"}, {"label": "this week"}, {"label": "today"}],
}
CLIENT = httpx.Client(timeout=60, trust_env=False)


def asked(served, **changes):
    return CLIENT.post(
        served.url + "/v1/decisions", json={"model": "demo", "input": S, "questions": [P, C, L], **changes}
    )


def answers(served, **changes):
    found = asked(served, **changes)
    assert found.status_code == 200, found.text
    return found.json()["answers"]


def system_one(served, **changes):
    body = {
        "model": "jev-latest",
        "state": S,
        "questions": {"a": {"type": "noul", "instructions": "It is broken."}},
        **changes,
    }
    return CLIENT.post(served.url + "/v1/systemone", json=body)


def test_answers_have_the_form_of_openai(served):
    found = asked(served).json()
    broken, desk, heat = found["answers"]
    assert set(found) == {"answers", "model", "usage"} and found["model"] == "demo"
    assert set(broken) == {"type", "name", "probability"}
    assert set(desk) == {"type", "name", "choice", "confidence", "probabilities"}
    assert [set(each) for each in heat["probabilities"]] == [{"label", "value", "probability"}] * 3
    assert [each["value"] for each in heat["probabilities"]] == [0, 1, 2]
    usage = found["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] and usage["output_tokens"] == 0
    details = usage["input_tokens_details"]
    assert 0 <= details["cached_tokens"] <= usage["input_tokens"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    again = asked(served).json()
    assert again["answers"] == found["answers"]
    assert again["usage"]["input_tokens_details"]["cached_tokens"] > 0


def test_names_order_and_company_change_nothing(served):
    broken, desk, heat = answers(served)
    assert answers(served, questions=[L, C, P]) == [heat, desk, broken]
    for question, answer in ((P, broken), (C, desk), (L, heat)):
        assert answers(served, questions=[question]) == [answer]
    unnamed = {key: value for key, value in P.items() if key != "name"}
    found = answers(served, questions=[unnamed, {**P, "name": ""}, P, P])
    assert [each["name"] for each in found] == [None, "", "broken", "broken"]
    assert {each["probability"] for each in found} == {broken["probability"]}


def test_one_message_is_its_text_and_conversations_calls_and_json_are_read(served):
    (broken,) = answers(served, questions=[P])
    for same in ([{"role": "user", "content": S}], [{"role": "user", "content": [{"type": "input_text", "text": S}]}]):
        assert answers(served, input=same, questions=[P]) == [broken]
    call = {"type": "function_call", "call_id": "1", "name": "find", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "1", "output": "a parcel"}
    data = {"type": "input_json", "data": {"parcel": 88}}
    for other in (
        [call, output],
        [{"role": "user", "content": [data]}],
        [{"role": "system", "content": "Be brief."}, *[call]],
    ):
        assert len(answers(served, input=other)) == 3
    parts = {**P, "instructions": [{"type": "input_text", "text": P["instructions"]}]}
    assert answers(served, questions=[parts]) == [broken]


def test_values_keep_their_types(served):
    choices = [{"value": True}, {"value": "true"}, {"value": "false"}]
    (found,) = answers(served, questions=[{**C, "choices": choices}])
    assert [each["value"] for each in found["probabilities"]] == [True, "true", "false"]


def of_choices(*values):
    return [{**C, "choices": [{"value": value} for value in values]}]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"questions": []}, "questions"),
        ({"questions": [P] * 401}, "questions"),
        ({"questions": of_choices("a")}, "questions.0.choices"),
        ({"questions": of_choices(*map(str, range(256)))}, "questions.0.choices"),
        ({"questions": [P, *of_choices("a", "b", "a")]}, "questions.1.choices.2.value"),
        ({"questions": of_choices("a", 3)}, "questions.0.choices.1.value"),
        ({"questions": of_choices("a", None)}, "questions.0.choices.1.value"),
        ({"questions": [{**C, "choices": {"a": "b"}}]}, "questions.0.choices"),
        ({"questions": [{**L, "levels": ["a", "b"]}]}, "questions.0.levels.0"),
        ({"questions": [{**L, "levels": L["levels"][:1]}]}, "questions.0.levels"),
        ({"questions": [{**L, "levels": [{"label": str(each)} for each in range(11)]}]}, "questions.0.levels"),
        ({"questions": [{**P, "type": "noul"}]}, "questions.0.type"),
        ({"questions": [{"instructions": "a"}]}, "questions.0.type"),
        ({"questions": [{**P, "instructions": ""}]}, "questions.0.instructions"),
        ({"questions": [{**P, "choices": []}]}, "questions.0.choices"),
        ({"questions": ["a"]}, "questions.0"),
        ({"input": ""}, "input"),
        ({"input": " "}, "input"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input.0.role"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "a"}]}, "input.0.call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]}, "input.0.content.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_json", "data": [1]}]}]}, "input.0.content.0.data"),
        ({"temperature": 1}, "temperature"),
        ({"questions": [{"type": []}]}, "questions.0.type"),
        ({"input": [{"type": {}}]}, "input.0.type"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_its_place(served, changes, param):
    found = asked(served, **changes)
    error = found.json()["error"]
    assert (found.status_code, error["param"]) == (400, param)
    assert error["type"] == "invalid_request_error" and "\n" not in error["message"]


def test_too_long_states_and_unknown_models_have_their_own_codes(served):
    long = asked(served, input="word " * 5000)
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    unknown = asked(served, model="nobody")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    with serving([ModelSpec("demo", demo_model_path(), "chat")], api_keys=("secret",)) as locked:
        assert asked(locked).status_code == 401
        found = system_one(locked)
        assert found.status_code == 401
        assert found.json()["detail"]["error_type"] == "authentication_error"


def test_systemone_has_maps_and_legends(served):
    questions = {
        "a.b c": {"type": "noul", "criteria": {"true": "it is broken"}},
        "질문 🙂": {"type": "choice", "instructions": "Which?", "criteria": {"환불": None, "🙂": {"a": 1}}},
        "s": {"type": "score", "criteria": [{"level": "low"}, "high"]},
    }
    found = system_one(served, questions=questions).json()
    assert list(found["answers"]) == list(questions) and found["model"] == "demo"
    noul, choice, score = found["answers"].values()
    assert set(noul) == {"type", "noul"}
    assert set(choice["probabilities"]) == {"환불", "🙂"}
    assert score["legend"] == {"0": {"level": "low"}, "1": "high"} and set(score["probabilities"]) == {"0", "1"}
    assert isinstance(found["usage"]["input_tokens"], int)


def test_the_same_texts_have_the_same_probabilities_on_both_doors(served):
    criteria = {each["value"]: each.get("description") for each in C["choices"]}
    questions = {"x": {"type": "choice", "instructions": C["instructions"], "criteria": criteria}}
    mine = system_one(served, questions=questions).json()["answers"]["x"]
    (other,) = answers(served, questions=[C])
    assert mine["probabilities"] == {each["value"]: each["probability"] for each in other["probabilities"]}
    assert mine["confidence"] == other["confidence"]


@pytest.mark.parametrize(
    "changes",
    [
        {"state": None},
        {"state": 5},
        {"questions": {}},
        {"questions": []},
        {"questions": {"a": {"type": "box"}}},
        {"questions": {"a": {"type": None}}},
        {"questions": {"a": {"type": "noul"}}},
        {"questions": {"a": {"type": "choice", "criteria": {}}}},
        {"questions": {"a": {"type": "choice", "criteria": {str(each): None for each in range(256)}}}},
        {"questions": {"a": {"type": "score", "criteria": {"0": "low"}}}},
        {"questions": {"a": {"type": "score", "criteria": ["low", None]}}},
        {"questions": {"a": {"type": "score", "criteria": [str(each) for each in range(11)]}}},
        {"model": ""},
    ],
)
def test_systemone_refuses_bodies_as_its_clients_know(served, changes):
    found = system_one(served, **changes)
    (detail,) = found.json()["detail"]
    assert found.status_code == 422
    assert detail["loc"][0] == "body" and detail["msg"] and detail["type"]


@pytest.mark.parametrize(
    ("question", "where"),
    [
        ({"type": "noul", "criteria": {"true": ""}}, ["instructions"]),
        ({"type": "noul", "instructions": "a", "criteria": {"false": ""}}, ["criteria", "false"]),
        ({"type": "score", "criteria": ["low", ""]}, ["criteria", 1]),
        ({"type": "choice", "criteria": {"b": None, "": None}}, ["criteria", ""]),
    ],
)
def test_systemone_says_where_a_question_is_wrong(served, question, where):
    found = system_one(served, questions={"x.y": question})
    assert found.status_code == 422
    assert found.json()["detail"][0]["loc"] == ["body", "questions", "x.y", *where]


def test_systemone_reads_json_only_and_bodies_in_zstd(served):
    url = served.url + "/v1/systemone"
    broken = CLIENT.post(url, content=b"{")
    assert (broken.status_code, broken.json()["detail"][0]["loc"]) == (422, ["body"])
    picture = CLIENT.post(url, files={"asset-0": b"x"}, data={"request": "{}"})
    assert picture.status_code == 415 and picture.json()["detail"]["message"]
    zstd = pytest.importorskip("backports.zstd")
    questions = {"a": {"type": "noul", "instructions": "It is broken."}}
    body = json.dumps({"model": "jev-latest", "state": S * 40, "questions": questions, "x_nonce": 1}).encode()
    plain = CLIENT.post(url, content=body).json()["answers"]
    small = CLIENT.post(url, content=zstd.compress(body), headers={"Content-Encoding": "zstd"})
    assert small.json()["answers"] == plain
    for data, coding, status in (
        (b"no zstd", "zstd", 400),
        (zstd.compress(body)[:-3], "zstd", 400),
        (zstd.compress(b" " * (served.settings.max_body + 1)), "zstd", 413),
        (body, "br", 415),
    ):
        found = CLIENT.post(url, content=data, headers={"Content-Encoding": coding})
        assert found.status_code == status, found.text


def test_a_client_that_leaves_cancels_the_rest_and_its_state_stays_cached(served):
    state = "Another text about parcels. " * 30
    many = [{**P, "instructions": f"It has {number} parts."} for number in range(400)]
    with pytest.raises(httpx.ReadTimeout):
        CLIENT.post(
            served.url + "/v1/decisions", json={"model": "demo", "input": state, "questions": many}, timeout=0.4
        )
    begin = time.monotonic()
    served.wait_until_idle()
    assert time.monotonic() - begin < 20
    usage = asked(served, input=state).json()["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] > 0


def test_one_list_of_models_serves_both_clients(served):
    found = CLIENT.get(served.url + "/v1/models").json()
    assert [each["id"] for each in found["data"]] == ["demo"]
    assert [set(each) for each in found["models"]] == [{"name", "description", "release_date"}]
