"""The dashboard and the rules ask only for metrics that a running deployment exports."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from specdec.cli.processes import free_ports, listening, service
from tests.checkout import ROOT
from tests.deploy.compose_file import BASE, load
from tests.observed import observed, samples

FOLDER = ROOT / "deploy" / "observability"
DASHBOARD = FOLDER / "grafana" / "dashboards" / "specdec.json"
RULES = FOLDER / "prometheus" / "rules.yml"
QUESTIONS = (
    "Is speculation paying right now?",
    "Where does a round's time go?",
    "Which draft is bad?",
    "Is the target saturated?",
    "How far from target-only speed are we?",
    "What do clients of HTTP get?",
)
WORDS = {"by", "without", "and", "or", "unless", "on", "ignoring", "group_left", "group_right", "bool", "offset"}
GIVEN_BY_PROMETHEUS = {"instance", "job", "namespace"}


def panels() -> list[dict[str, Any]]:
    return json.loads(DASHBOARD.read_text())["panels"]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def targets() -> Iterator[tuple[str, dict[str, Any]]]:
    """(title of the panel, target) of the dashboard."""
    return ((panel["title"], target) for panel in panels() for target in panel.get("targets", ()))


def queries() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of every query."""
    yield from ((title, target["expr"]) for title, target in targets())
    yield from ((rule["alert"], rule["expr"]) for rule in rules())


def metrics_in(expression: str) -> set[str]:
    bare = re.sub(r'"[^"]*"', "", expression)
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]", " ", bare)
    bare = re.sub(r"\b(by|without|on|ignoring)\s*\([^)]*\)", " ", bare)
    return {name for name, call in re.findall(r"([a-zA-Z_:][\w:]*)\s*(\()?", bare) if not call and name not in WORDS}


def labels_in(expression: str) -> set[str]:
    matched = re.findall(r"[{,]\s*(\w+)\s*(?:=~|!~|!=|=)", expression)
    grouped = re.findall(r"\bby\s*\(([^)]*)\)", expression)
    return {*matched, *(label.strip() for group in grouped for label in group.split(","))}


@pytest.fixture(scope="module")
async def told() -> dict[str, set[str]]:
    """The labels of every metric that the services and a gateway export after some requests."""
    found: dict[str, set[str]] = {}
    port, metrics_port = free_ports(2)
    async with observed() as deployment:
        own = [f"--orchestrator={deployment.running.orchestrator.address}", f"--metrics-port={metrics_port}"]
        async with service("gateway", port, own) as gateway:
            await listening(gateway)
            deployment.metrics_ports["gateway"] = metrics_port
            await asyncio.to_thread(urllib.request.urlopen, f"http://{gateway.address}/v1/models", timeout=30)
            for seed in range(2):
                # A fixed number of draft tokens is drafted on the slowest machine, too.
                await deployment.generate(seed, max_tokens=100, **({"num_draft_tokens": 4} if seed else {}))
            texts = await deployment.scrape()
        for text in texts.values():
            for name, points in samples(text).items():
                found.setdefault(name, set()).update(label for labels in points for label, _ in labels)
    return found


def test_names_and_labels_are_found_in_a_query():
    query = (
        'histogram_quantile(0.9, sum by (le, a) (rate(x_bucket{b!~"c|d", e="f"}[5m]))) / scalar(vllm:y_total) > 0 and z'
    )
    assert metrics_in(query) == {"x_bucket", "vllm:y_total", "z"}
    assert labels_in(query) == {"le", "a", "b", "e"}


@pytest.mark.slow
async def test_every_query_and_legend_names_only_metrics_and_labels_that_exist(told):
    assert len(list(queries())) > 30
    for where, expression in queries():
        names = metrics_in(expression)
        assert names, where
        assert names <= told.keys(), f"{where}: no service has {names - told.keys()}"
        known = {label for name in names for label in told[name]} | GIVEN_BY_PROMETHEUS
        assert labels_in(expression) <= known, f"{where}: {labels_in(expression) - known} labels none of {names}"
    for title, target in targets():
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            grouped = re.search(r"\bby\s*\(([^)]*)\)", target["expr"])
            known = {label for name in metrics_in(target["expr"]) for label in told[name]} | GIVEN_BY_PROMETHEUS
            assert label in (grouped[1].replace(" ", "").split(",") if grouped else known), title


def test_every_query_of_the_dashboard_is_about_the_chosen_namespaces_and_data_source():
    board = json.loads(DASHBOARD.read_text())
    assert {each["name"] for each in board["templating"]["list"]} == {"datasource", "namespace"}
    for title, target in targets():
        asked = re.findall(r"\b(?:specdec_|vllm:|gen_ai_|process_)[\w:]+(\{[^}]*\})?", target["expr"])
        assert asked, title
        assert all('namespace=~"$namespace"' in labels for labels in asked), title
        assert target["datasource"]["uid"] == "${datasource}"
    assert {panel["datasource"]["uid"] for panel in panels() if panel.get("targets")} == {"${datasource}"}


def test_the_dashboard_has_a_panel_for_every_question():
    shown = [panel for panel in panels() if panel["type"] != "row"]
    for question in QUESTIONS:
        assert any(panel["title"].startswith(question) for panel in shown), question
    assert all(panel["description"] for panel in shown)


def test_the_dashboard_is_what_its_script_makes():
    made = runpy.run_path(str(FOLDER / "grafana" / "make_dashboard.py"))
    assert made["text"]() == DASHBOARD.read_text(), "run python -m deploy.observability.grafana.make_dashboard"


def test_every_alert_has_a_summary_and_a_section_in_the_runbook():
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
    assert len(rules()) >= 8
    for rule in rules():
        assert rule["annotations"]["summary"], rule["alert"]
        file, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert file == "docs/operations.md"
        assert anchor in anchors, f"{rule['alert']}: docs/operations.md has no section #{anchor}"
        assert anchor == rule["alert"].lower()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
@pytest.mark.parametrize("what", ["check config prometheus.yml", "check rules rules.yml", "test rules rules_test.yml"])
def test_promtool_accepts_the_configuration_and_every_alert_fires_in_its_trouble_alone(what):
    run = subprocess.run(["promtool", *what.split()], cwd=RULES.parent, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_alert_has_a_test_for_promtool():
    expected = set(re.findall(r'alertname="(\w+)"', RULES.with_name("rules_test.yml").read_text()))
    assert expected == {rule["alert"] for rule in rules()}


def test_the_collector_takes_what_is_sent_and_sends_it_where_a_receiver_listens():
    given = yaml.safe_load((FOLDER / "collector" / "otel-collector.yaml").read_text())
    tempo = yaml.safe_load((FOLDER / "tempo" / "tempo.yaml").read_text())
    for part in ("receivers", "processors", "exporters"):
        used = {name for pipeline in given["service"]["pipelines"].values() for name in pipeline[part]}
        assert used == set(given[part]), part
    own, stored = (each["receivers"]["otlp"]["protocols"]["grpc"] for each in (given, tempo["distributor"]))
    services = load(BASE, COMPOSE_PROFILES="observability")["services"]
    told = services["orchestrator"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"]
    assert told == f"http://collector:{own['endpoint'].rpartition(':')[2]}"
    assert given["exporters"]["otlp"]["endpoint"] == f"tempo:{stored['endpoint'].rpartition(':')[2]}"
    assert stored["max_recv_msg_size_mib"] >= own["max_recv_msg_size_mib"]


@pytest.mark.slow
async def test_the_collector_gives_counters_the_names_of_a_scrape(told):
    given = yaml.safe_load((FOLDER / "collector" / "otel-collector.yaml").read_text())
    [rule] = given["processors"]["metricstransform"]["transforms"]
    # The collector reads $$ as $; Python's spelling of ${1} is \1.
    pattern, new_name = (rule[name].replace("$$", "$") for name in ("include", "new_name"))
    theirs = {name for name in told if name.startswith("vllm:")}
    assert theirs
    for name in theirs:
        sent = name.removeprefix("vllm:").removesuffix("_total")
        assert re.sub(pattern, new_name.replace("${1}", r"\1"), sent) + "_total" == name


def test_the_data_source_of_the_dashboard_is_one_that_grafana_is_provisioned_with():
    provisioning = FOLDER / "grafana" / "provisioning"
    sources = yaml.safe_load((provisioning / "datasources" / "datasources.yml").read_text())["datasources"]
    [chosen] = [
        each for each in json.loads(DASHBOARD.read_text())["templating"]["list"] if each["type"] == "datasource"
    ]
    assert chosen["current"]["value"] in {source["uid"] for source in sources if source["type"] == chosen["query"]}


def test_every_configuration_is_yaml():
    assert all(isinstance(yaml.safe_load(file.read_text()), dict) for file in FOLDER.rglob("*.y*ml"))
