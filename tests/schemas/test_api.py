"""Bodies of the HTTP API: what a client may send."""

import pytest
from pydantic import ValidationError

from schemas.api import MAX_QUESTION_CHARS, AnswerRequest, CacheMode, DocumentBody, ErrorBody


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "question\n  Field required"),
        ({"question": ""}, "at least 1 character"),
        ({"question": "x" * (MAX_QUESTION_CHARS + 1)}, "at most 8000 characters"),
        ({"question": "x", "k": 0}, "greater than or equal to 1"),
        ({"question": "x", "temperature": -0.1}, "greater than or equal to 0"),
        ({"question": "x", "top_p": 0}, "greater than 0"),
        ({"question": "x", "max_tokens": 100_000}, "less than or equal to 4096"),
        ({"question": "x", "cache_mode": "fast"}, "Input should be 'exact', 'blend' or 'reuse'"),
        ({"question": "x", "tenant": "acme"}, "Extra inputs are not permitted"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_by_field(fields, said):
    with pytest.raises(ValidationError) as refused:
        AnswerRequest(**fields)
    assert said in str(refused.value)


def test_api_04_no_body_has_a_field_for_the_tenant():
    """Bug (vllm PR#53347 and others): the caller could set the salt that separates tenants."""
    assert "tenant" not in AnswerRequest.model_fields
    assert "tenant" not in DocumentBody.model_fields


@pytest.mark.parametrize("field", ["chunks", "context", "documents", "messages", "token_ids"])
def test_eng_09_a_client_sends_the_question_and_never_the_text_of_chunks(field):
    """With text or ids of its own a client would have to know how chunks were cut and at which positions they lie."""
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        AnswerRequest(question="Why?", **{field: ["The lake is deep."]})


def test_a_question_alone_is_greedy_reuse_without_a_stream():
    request = AnswerRequest(question="Why?")
    assert (request.cache_mode, request.stream, request.temperature) == (CacheMode.REUSE, False, 0.0)


def test_an_error_has_the_shape_of_openais_error_object():
    body = ErrorBody.model_validate({"error": {"message": "m", "type": "invalid_request_error"}})
    assert body.model_dump() == {
        "error": {"message": "m", "type": "invalid_request_error", "param": None, "code": None}
    }
