"""docs/operations.md says what the code has: metrics, kinds of drift, places of a receipt, routes."""

import re
from pathlib import Path

from prometheus_client import REGISTRY, CollectorRegistry

import ingest.telemetry
from ingest.reconcile import Kind
from schemas.receipt import Place
from serve.telemetry import Telemetry

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "operations.md").read_text()


def rows(columns):
    """The rows of the tables with so many columns, as lists of cells."""
    found = re.findall(r"^\| (`.*?) \|$", PAGE, re.MULTILINE)
    split = ([cell.strip().replace("`", "") for cell in row.split("|")] for row in found)
    return [cells for cells in split if len(cells) == columns]


def metrics(registry):
    for collector in registry._collector_to_names:
        name = getattr(collector, "_name", "")
        if name.startswith("kvquilt_"):
            suffix = "_total" if collector._type == "counter" else ""
            yield name + suffix, collector._type, ", ".join(collector._labelnames)


def test_every_metric_is_documented_with_its_type_and_labels_and_nothing_else_is():
    """A dashboard is made from this table."""
    assert ingest.telemetry.LAG is not None, "the pipelines' metrics are in the default registry"
    service = CollectorRegistry()
    Telemetry("model", service)
    documented = [tuple(cells[:3]) for cells in rows(4)]
    assert sorted(documented) == sorted([*metrics(service), *metrics(REGISTRY)])


def test_every_kind_of_drift_is_documented():
    assert [cells[0] for cells in rows(3) if cells[0] in set(Kind)] == list(Kind)


def test_every_place_that_a_receipt_counts_is_documented():
    assert [cells[0] for cells in rows(2) if cells[0] in set(Place)] == list(Place)


def test_every_route_is_documented():
    """Bug: a route that nobody can find is not there."""
    from serve.introspection import router as introspection
    from serve.routes import router as routes

    page = (DOCS / "http_api.md").read_text()
    documented = set(re.findall(r"`(GET|PUT|POST|DELETE) (/[^`]*)`", page))
    real = {
        (method, re.sub(r"\{\w+(:path)?\}", "{id}", route.path))
        for router in (routes, introspection)
        for route in router.routes
        for method in route.methods
    }
    assert real <= documented
