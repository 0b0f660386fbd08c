"""The Grafana dashboard asks for metrics and labels that the server has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from server import running

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "grafana"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "dashboards" / "quire.json").read_text("utf-8"))
GRAPHS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = {target["expr"] for panel in GRAPHS for target in panel["targets"]}
METRIC = re.compile(r"((?:vllm|quire):\w+)(?:\{([^}]*)\})?")
LABEL = re.compile(r"(\w+)\s*=~?\s*\"")
GROUPED = re.compile(r"by \((\w+)\) \((?:rate\()?((?:vllm|quire):\w+)")


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The names of all samples of a server with a link, after a request, with their labels."""
    folder = tmp_path_factory.mktemp("link")
    key = folder / "key"
    key.write_bytes(b"a key of enough bytes")
    key.chmod(0o600)
    link = ("--role", "decode", "--link", f"unix:{folder / 'nobody'}", "--link-key-file", str(key))
    with running(*link) as server, server.client() as client:
        assert client.post("/v1/completions", json={"prompt": "a fox", "max_tokens": 4}).status_code == 200
        text = client.get("/metrics").text
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    return {one.name: {*one.labels} for one in samples}


@pytest.mark.parametrize("query", sorted(QUERIES))
def test_a_query_has_its_metrics_and_labels(query: str, labels: dict[str, set[str]]) -> None:
    found = METRIC.findall(query)
    assert found
    for name, selector in found:
        assert name in labels
        assert set(LABEL.findall(selector)) <= labels[name]
    for label, name in GROUPED.findall(query):
        assert label in labels[name]


def test_panels_are_explained_and_apart() -> None:
    assert all(panel["description"] and panel["targets"] for panel in GRAPHS)
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    cells = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells
        assert max(x for x, _ in own) < 24
        cells |= own


def test_the_files_of_the_setup_name_each_other() -> None:
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text("utf-8"))
    mounted = [line.split(":") for one in compose["services"].values() for line in one["volumes"]]
    assert all((FOLDER / source).exists() for source, *_ in mounted)
    provider = yaml.safe_load((FOLDER / "provisioning" / "dashboards" / "quire.yaml").read_text("utf-8"))
    assert provider["providers"][0]["options"]["path"] in [target for _, target, *_ in mounted]
    source = yaml.safe_load((FOLDER / "provisioning" / "datasources" / "prometheus.yaml").read_text("utf-8"))
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    assert "prometheus" in compose["services"]
