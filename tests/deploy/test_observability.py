"""The dashboard and the rules ask only for what a running deployment really tells."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

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
)
WORDS = {"by", "without", "and", "or", "unless", "on", "ignoring", "group_left", "group_right", "bool", "offset"}
GIVEN_BY_PROMETHEUS = {"instance", "job", "namespace"}


def panels() -> list[dict[str, Any]]:
    return json.loads(DASHBOARD.read_text())["panels"]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of everything that is asked."""
    for panel in panels():
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for rule in rules():
        yield rule["alert"], rule["expr"]


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
    """The labels of every metric that the three services tell after some requests."""
    found: dict[str, set[str]] = {}
    async with observed() as deployment:
        for seed in range(3):
            await deployment.generate(seed, max_tokens=200)
        for text in (await deployment.scrape()).values():
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
async def test_every_query_names_only_metrics_and_labels_that_exist(told):
    assert len(list(queries())) > 30
    for where, expression in queries():
        names = metrics_in(expression)
        assert names, where
        assert names <= told.keys(), f"{where}: {names - told.keys()} is told by nobody"
        known = {label for name in names for label in told[name]} | GIVEN_BY_PROMETHEUS
        assert labels_in(expression) <= known, f"{where}: {labels_in(expression) - known} labels none of {names}"


def test_every_query_of_the_dashboard_is_about_the_chosen_namespaces_and_data_source():
    board = json.loads(DASHBOARD.read_text())
    assert {each["name"] for each in board["templating"]["list"]} == {"datasource", "namespace"}
    for panel in panels():
        for target in panel.get("targets", ()):
            asked = re.findall(r"\b(?:specdec_|vllm:|gen_ai_|process_)[\w:]+(\{[^}]*\})?", target["expr"])
            assert asked, panel["title"]
            assert all('namespace=~"$namespace"' in labels for labels in asked), panel["title"]
            assert target["datasource"]["uid"] == panel["datasource"]["uid"] == "${datasource}"


async def test_every_label_in_a_legend_is_left_by_its_query(told):
    for panel in panels():
        for target in panel.get("targets", ()):
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                grouped = re.search(r"\bby\s*\(([^)]*)\)", target["expr"])
                known = {label for name in metrics_in(target["expr"]) for label in told[name]} | GIVEN_BY_PROMETHEUS
                assert label in (grouped[1].replace(" ", "").split(",") if grouped else known), panel["title"]


def test_the_dashboard_has_a_panel_for_every_question():
    titles = [panel["title"] for panel in panels() if panel["type"] != "row"]
    for question in QUESTIONS:
        assert any(title.startswith(question) for title in titles), question
    assert all(panel["description"] for panel in panels() if panel["type"] != "row")


@pytest.mark.slow
def test_the_dashboard_is_what_its_script_makes(tmp_path):
    program = (
        "import runpy, pathlib; made = runpy.run_path('deploy/observability/grafana/make_dashboard.py');"
        f"pathlib.Path({str(tmp_path / 'made.json')!r}).write_text(made['text']())"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
    fresh = (tmp_path / "made.json").read_text()
    assert fresh == DASHBOARD.read_text(), "run python deploy/observability/grafana/make_dashboard.py"


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


needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)"
)


@needs_promtool
@pytest.mark.parametrize("what", ["config", "rules"])
def test_promtool_accepts_what_prometheus_is_told(what):
    file = RULES if what == "rules" else RULES.with_name("prometheus.yml")
    run = subprocess.run(["promtool", "check", what, str(file)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr


@needs_promtool
def test_every_alert_fires_in_its_trouble_and_none_when_all_is_well():
    file = RULES.with_name("rules_test.yml")
    run = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr
    expected = set(re.findall(r'alertname="(\w+)"', file.read_text()))
    assert expected == {rule["alert"] for rule in rules()}


def test_the_collector_takes_what_is_sent_and_sends_it_where_somebody_listens():
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


@pytest.mark.parametrize("file", sorted(FOLDER.rglob("*.y*ml")), ids=lambda file: file.name)
def test_every_configuration_is_yaml(file):
    assert isinstance(yaml.safe_load(file.read_text()), dict)


def test_what_grafana_is_provisioned_with_fits_the_dashboard():
    provisioning = FOLDER / "grafana" / "provisioning"
    sources = yaml.safe_load((provisioning / "datasources" / "datasources.yml").read_text())["datasources"]
    [chosen] = [
        each for each in json.loads(DASHBOARD.read_text())["templating"]["list"] if each["type"] == "datasource"
    ]
    assert chosen["current"]["value"] in {source["uid"] for source in sources if source["type"] == chosen["query"]}
