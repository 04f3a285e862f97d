"""The routes of `/v1`. No logic: each hands its request to the service and the result back."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import JSONResponse, Response
from fastapi.security import HTTPBearer

from schemas.api import (
    Accepted,
    AnswerRequest,
    AnswerResponse,
    DeletedMany,
    DeleteMany,
    DocumentBody,
    DocumentStatus,
    ErrorBody,
    Question,
    RetrieveResponse,
    Timing,
)
from schemas.events import Version
from schemas.ids import DocumentKey
from schemas.receipt import Receipt
from serve.answer import Asked
from serve.disconnect import or_disconnect
from serve.service import State, whole
from serve.sse import EventStream

# the gate has checked the key before a route runs; this only puts the scheme into the API's description
_DOCUMENTED = Depends(HTTPBearer(auto_error=False, description="A key of `serve.api_keys`; not needed without any."))
router = APIRouter(
    prefix="/v1",
    dependencies=[_DOCUMENTED],
    responses={
        "4XX": {"model": ErrorBody, "description": "The request is wrong, or the service is busy (429)"},
        "5XX": {"model": ErrorBody, "description": "The service, or something that it needs, failed"},
    },
)
DocId = Annotated[str, Path(min_length=1, max_length=512, description="May hold slashes.")]


@router.post(
    "/answer",
    response_model=AnswerResponse,
    tags=["questions"],
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def answer(body: AnswerRequest, request: Request) -> Response:
    """Answer a question from the chunks that match it best.

    With `stream`, server-sent events: `citations` (the chunks in the prompt), `token` (`{"text": …}`) for each
    piece of the answer, `done` (the same body as without `stream`); `error` (an error body) if it fails midway.
    Where no visible chunk is found the model is not asked: the answer says so and all token counts are 0.
    """
    state = _state(request)
    asked = Asked(body, request.state.tenant, request.state.request_id, request.state.received_s)
    events = state.service.answerer.events(asked)
    if body.stream:
        return EventStream(events, state.stopped, state.settings.serve.send_timeout_s)
    response = await or_disconnect(request.receive, whole(events), state.stopped)
    return JSONResponse(response.model_dump(mode="json"), headers={"server-timing": _server_timing(response.timing)})


@router.post("/retrieve", tags=["questions"])
async def retrieve(body: Question, request: Request) -> RetrieveResponse:
    """The visible chunks that match a question best, without an answer."""
    state = _state(request)
    k = body.k or state.settings.serve.k
    start_s = time.perf_counter()
    search = state.service.retrieve(request.state.tenant, body.question, k)
    found = await or_disconnect(request.receive, search, state.stopped)
    return RetrieveResponse(chunks=[one.citation() for one in found], retrieve_s=time.perf_counter() - start_s)


@router.post("/documents/delete", status_code=202, tags=["documents"])
async def delete_documents(body: DeleteMany, request: Request) -> DeletedMany:
    """Publish the deletion of every live document that matches a metadata filter, or of all; the answer lists them."""
    return await _state(request).service.documents.delete_many(request.state.tenant, body)


@router.get("/documents/{doc_id:path}/receipt", tags=["documents"])
async def get_receipt(
    doc_id: DocId, request: Request, version: Annotated[Version | None, Query()] = None
) -> Receipt | DocumentStatus:
    """The receipt of a document's deletion: what was there, what was deleted, what a recount found, what is missing.

    A document whose own id ends in `/receipt` is asked for with that slash written as `%2F`.
    """
    if not request.scope["raw_path"].endswith(b"/receipt"):
        return await get_document(f"{doc_id}/receipt", request)
    return await _state(request).service.documents.receipt(_key(request, doc_id), version)


@router.get("/documents/{doc_id:path}", tags=["documents"])
async def get_document(doc_id: DocId, request: Request) -> DocumentStatus:
    """Version and state of a document, and how many of its chunks are servable. A deleted one is `deleted`."""
    return await _state(request).service.documents.status(_key(request, doc_id))


@router.put("/documents/{doc_id:path}", status_code=202, tags=["documents"])
async def put_document(doc_id: DocId, body: DocumentBody, request: Request) -> Accepted:
    """Publish a new version of a document. It is servable once `GET` shows it."""
    return await _state(request).service.documents.put(_key(request, doc_id), body)


@router.delete("/documents/{doc_id:path}", status_code=202, tags=["documents"])
async def delete_document(
    doc_id: DocId, request: Request, version: Annotated[Version | None, Query()] = None
) -> Accepted:
    """Publish the deletion of a document, also of one that is not known (yet)."""
    return await _state(request).service.documents.delete(_key(request, doc_id), version)


def _state(request: Request) -> State:
    state: State = request.app.state.kvquilt
    return state


def _key(request: Request, doc_id: str) -> DocumentKey:
    return DocumentKey(request.state.tenant, doc_id)


def _server_timing(timing: Timing) -> str:
    return ", ".join(f"{name.removesuffix('_s')};dur={1000 * value:.3f}" for name, value in timing.model_dump().items())
