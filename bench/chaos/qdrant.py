"""Qdrant's REST interface over Qdrant's own local mode, as far as `stores` uses it.

A stand-in where no Qdrant server is to be had: the processes talk to it through Qdrant's HTTP client as to a server,
and what is stored and found is decided by Qdrant's code. It shows what becomes of calls that fail or hang between
processes; not how a server's shards, log and optimisers behave.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel
from qdrant_client import models

from bench.chaos.gate import Reply, Request
from bench.chaos.truth import HeadLog
from schemas.errors import VectorIndexError
from schemas.settings import QdrantSettings
from stores.points import read_head
from stores.qdrant import connect

SPACE = ":memory:chaos"


class QdrantStandIn:
    """Answers requests; notes every move of a head under the lock of the store."""

    def __init__(self, log: HeadLog) -> None:
        self.connection = connect(QdrantSettings(), SPACE)
        self._log = log

    def handle(self, request: Request) -> Reply:
        """One call."""
        segments = urlsplit(request.path).path.strip("/").split("/")
        body = json.loads(request.body) if request.body else {}
        try:
            if segments == [""]:
                return _json({"title": "qdrant - vector search engine", "version": "1.16.0", "commit": "stand-in"})
            result = self._call(request.method, segments[1] if len(segments) > 1 else "", segments[2:], body)
        except VectorIndexError as error:
            return _json({"status": {"error": str(error)}, "time": 0}, 400)
        return _json({"result": result, "status": "ok", "time": 0})

    def _call(self, method: str, collection: str, rest: list[str], body: dict[str, Any]) -> Any:
        call: Callable[..., Any] = self.connection.call
        match method, rest:
            case "GET", []:
                return call("get_collection", collection_name=collection)
            case "GET", ["exists"]:
                return {"exists": call("collection_exists", collection_name=collection)}
            case "PUT", []:
                vectors = models.CreateCollection.model_validate(body).vectors or {}
                return call("create_collection", collection_name=collection, vectors_config=vectors)
            case "DELETE", []:
                return call("delete_collection", collection_name=collection)
            case "PUT", ["index"]:
                return _done()
            case "PUT", ["points"]:
                return self._upsert(collection, models.PointsList.model_validate(body))
            case "POST", ["points", "delete"]:
                selector: Any = models.PointIdsList if "points" in body else models.FilterSelector
                call("delete", collection_name=collection, points_selector=selector.model_validate(body))
                return _done()
            case "POST", ["points", "payload"]:
                asked = models.SetPayload.model_validate(body)
                where = asked.points if asked.points is not None else models.FilterSelector(filter=asked.filter)
                call("set_payload", collection_name=collection, payload=asked.payload, points=where)
                return _done()
            case "POST", ["points"]:
                get = models.PointRequest.model_validate(body)
                return call(
                    "retrieve",
                    collection_name=collection,
                    ids=get.ids,
                    with_payload=get.with_payload,
                    with_vectors=get.with_vector,
                )
            case "POST", ["points", "scroll"]:
                page = models.ScrollRequest.model_validate(body)
                points, following = call(
                    "scroll",
                    collection_name=collection,
                    scroll_filter=page.filter,
                    limit=page.limit,
                    offset=page.offset,
                    with_payload=page.with_payload,
                    with_vectors=page.with_vector,
                )
                return {"points": points, "next_page_offset": following}
            case "POST", ["points", "query"]:
                nearest = body["query"].get("nearest") if isinstance(body["query"], dict) else body["query"]
                return call(
                    "query_points",
                    collection_name=collection,
                    query=nearest,
                    query_filter=models.Filter.model_validate(body["filter"]) if body.get("filter") else None,
                    limit=body["limit"],
                    with_payload=body.get("with_payload", True),
                    with_vectors=body.get("with_vector", False),
                )
            case "POST", ["points", "count"]:
                count = models.CountRequest.model_validate(body)
                return call("count", collection_name=collection, count_filter=count.filter, exact=True)
        raise VectorIndexError(f"the stand-in has no {method} {rest}")

    def _upsert(self, collection: str, asked: models.PointsList) -> Any:
        with self.connection._lock:  # nobody reads a head that is not noted
            self.connection.call(
                "upsert", collection_name=collection, points=asked.points, update_filter=asked.update_filter
            )
            if collection.endswith("_heads"):
                ids = [point.id for point in asked.points]
                for record in self.connection.call("retrieve", collection_name=collection, ids=ids):
                    self._log.note(read_head(record), time.monotonic())
        return _done()


def call_name(request: Request) -> str:
    """Such as `chunks.upsert` or `heads.retrieve`."""
    segments = urlsplit(request.path).path.strip("/").split("/")
    if len(segments) < 3:
        return "collection"
    verb = {"points": "upsert" if request.method == "PUT" else "retrieve"}.get("/".join(segments[2:]), segments[-1])
    return f"{segments[1].rpartition('_')[2]}.{verb}"


def _done() -> dict[str, Any]:
    return {"operation_id": 0, "status": "completed"}


def _json(value: Any, status: int = 200) -> Reply:
    return Reply(status, {"content-type": "application/json"}, json.dumps(value, default=_plain).encode())


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_none=True)
    return str(value)
