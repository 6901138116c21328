"""Alert rules, runbook and metrics belong together: each refers to what the others have."""

import json
import re
import sys
from itertools import pairwise

import promql_parser
import pytest
import yaml

from pscore.wire.errors import ErrorCode
from psservice.observability.metrics import Metrics
from psservice.settings import ServerSettings
from tests.deploy.monitoring_tools import (
    DASHBOARD,
    ROOT,
    RULES,
    RULES_TEST,
    anchors,
    dashboard_expressions,
    needs_promtool,
    panels,
    promtool,
)
from tools import generate_metrics_reference
from tools.generate_metrics_reference import declared_labels, exposed_name

RUNBOOK = ROOT / "docs" / "operate" / "alerts.md"

ALERTS = {rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}
EXPRESSIONS = [(name, rule["expr"]) for name, rule in ALERTS.items()] + [*dashboard_expressions()]

FROM_PROMETHEUS = {"up": {"job", "instance"}, "ALERTS": {"alertname", "alertstate"}}


def known_series():
    """Every name that can be asked for, with its labels."""
    metrics = Metrics()
    labels = declared_labels(metrics)
    known = dict(FROM_PROMETHEUS)
    for metric in metrics.registry.collect():
        names = [exposed_name(metric)]
        if metric.type == "histogram":
            names = [f"{metric.name}_{part}" for part in ("bucket", "sum", "count")]
        known |= {name: {*labels.get(metric.name, ()), "job", "instance"} for name in names}
    return known


def buckets(name):
    """The finite upper bounds of a histogram, as a server exposes them."""
    (metric,) = [each for each in Metrics().registry.collect() if each.name == name]
    bounds = [float(sample.labels["le"]) for sample in metric.samples if sample.name.endswith("_bucket")]
    return sorted(bound for bound in bounds if bound != float("inf"))


def test_staleness_is_told_apart_above_what_the_rule_asks_for_at_any_number_of_workers():
    """A quantile is never above the last finite bound: the rule must not ask for more than that."""
    (most,) = re.findall(r"clamp\(4 \* psservice_live_workers, 8, (\d+)\)", ALERTS["SparsepsStalenessHigh"]["expr"])
    assert 4 * 1000 <= int(most) < buckets("psservice_staleness")[-1]


def test_waiting_and_applying_are_told_apart_beyond_a_second():
    for name in ("psservice_apply_seconds", "psservice_queue_seconds"):
        assert buckets(name)[-1] >= 100


def test_sizes_and_times_are_told_apart_from_small_models_to_large_ones_on_slow_lines():
    dense, line = 4 * 1_000_000_000, 10e6 / 8
    assert buckets("psservice_push_size_bytes")[0] <= 1024
    assert buckets("psservice_push_size_bytes")[-1] >= dense
    declared = Metrics()
    declared.call_seconds.of("PushSparse").observe(1.0)
    (metric,) = declared.call_seconds.collect()
    bounds = [float(each.labels["le"]) for each in metric.samples if each.name.endswith("_bucket")]
    assert sorted(bounds)[-2] >= 0.9 * dense / line
    assert buckets("psservice_reply_density")[0] <= 1e-4


def selectors(expression):
    found = []

    def visit(node):
        if isinstance(node, promql_parser.MatrixSelector):
            found.append(node.vector_selector)
        elif isinstance(node, promql_parser.VectorSelector):
            found.append(node)

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


def test_every_expression_asks_for_metrics_and_labels_that_there_are():
    known = known_series()
    for where, expression in EXPRESSIONS:
        asked = selectors(expression)
        assert asked, where
        for selector in asked:
            assert selector.name in known, f"{where}: {selector.name}"
            labels = {matcher.name for matcher in selector.matchers.matchers}
            assert labels <= known[selector.name], f"{where}: {selector.name}{labels}"


def test_every_refusal_that_a_rule_waits_for_is_a_reason():
    named = {name for _, expression in EXPRESSIONS for name in re.findall(r'reason="([A-Z_]+)"', expression)}
    assert named
    assert named <= set(ErrorCode.__members__)


def test_the_runbook_has_a_section_for_every_alert_and_no_other():
    sections = re.split(r"^### ", RUNBOOK.read_text(), flags=re.MULTILINE)[1:]
    told = {section.split("\n", 1)[0]: section for section in sections}
    assert list(told) == list(ALERTS)
    for name, section in told.items():
        for part in ("**Means**", "**Look**", "**Do**", "**Harmless**"):
            assert part in section, f"{name} lacks {part}"


def test_every_alert_says_how_severe_it_is_what_happens_and_where_to_read_on():
    found = anchors(RUNBOOK)
    for name, rule in ALERTS.items():
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}, name
        assert rule["annotations"]["summary"], name
        assert rule["annotations"]["description"].endswith("."), name
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert page == "docs/operate/alerts.md", name
        assert anchor in found, name


def test_the_anchors_that_the_runbook_refers_to_are_there():
    for page, anchor in re.findall(r"\]\(([a-z]+\.md)?#([^)]+)\)", RUNBOOK.read_text()):
        assert anchor in anchors(RUNBOOK.with_name(page) if page else RUNBOOK), (page, anchor)


def test_the_runbook_names_settings_that_there_are():
    flags = {"--" + name.replace("_", "-") for name in ServerSettings.model_fields}
    of_commands = {"--allow-older", "--checkpoint", "--name", "--once", "--tls-ca"}
    named = set(re.findall(r"--[a-z][a-z-]+[a-z]", RUNBOOK.read_text()))
    assert named - of_commands <= flags


def test_every_alert_is_shown_firing_and_not_firing():
    checks = [
        check for test in yaml.safe_load(RULES_TEST.read_text())["tests"] for check in test.get("alert_rule_test", ())
    ]
    assert {check["alertname"] for check in checks if check["exp_alerts"]} == set(ALERTS)
    assert {check["alertname"] for check in checks if not check["exp_alerts"]} == set(ALERTS)


@needs_promtool
def test_promtool_finds_the_rules_sound():
    answer = promtool("check", "rules", str(RULES))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert f"{len(ALERTS)} rules found" in answer.stdout


@pytest.mark.long
@needs_promtool
@pytest.mark.timeout(400)  # half a minute of a core
def test_alerts_fire_when_they_should_and_only_then():
    answer = promtool("test", "rules", str(RULES_TEST))
    assert answer.returncode == 0, answer.stdout + answer.stderr


@needs_promtool
def test_an_alert_that_does_not_fire_is_noticed(tmp_path):
    (tmp_path / "rules.yaml").write_text(RULES.read_text().replace("psservice_durable == 0", "psservice_durable == 2"))
    written = yaml.safe_load(RULES_TEST.read_text())
    written["tests"] = [test for test in written["tests"] if test["name"] == "the journal cannot be written"]
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(written))
    answer = promtool("test", "rules", str(tmp_path / "test.yaml"))
    assert answer.returncode != 0
    assert "SparsepsNotDurable" in answer.stdout + answer.stderr


def test_the_list_of_metrics_is_up_to_date(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["generate_metrics_reference.py", "--check"])
    assert generate_metrics_reference.main() == 0


# The dashboard


def test_panels_have_their_own_numbers_and_lie_beside_one_another():
    found = panels()
    assert len({panel["id"] for panel in found}) == len(found)
    taken = {}
    for panel in found:
        place = panel["gridPos"]
        assert place["x"] >= 0, panel["title"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"], (panel["title"], taken[x, y])
    assert all(above["gridPos"]["y"] <= below["gridPos"]["y"] for above, below in pairwise(found))


def test_panels_say_what_they_show():
    rows = [panel["title"] for panel in panels() if panel["type"] == "row"]
    assert len(rows) == len(set(rows)) >= 6
    for panel in panels():
        if panel["type"] == "row":
            continue
        title = panel["title"]
        assert len(panel["description"]) > 20, title
        assert panel["fieldConfig"]["defaults"]["unit"], title
        assert panel["datasource"]["uid"] == "${datasource}", title
        assert panel["targets"], title
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references), title
        for target in panel["targets"]:
            assert target["legendFormat"], title
            assert target["datasource"]["uid"] == "${datasource}", title
        if panel["type"] == "timeseries":
            assert panel["options"]["legend"]["showLegend"], title


def test_the_dashboard_asks_for_a_data_source_a_run_and_shards():
    variables = {v["name"]: v for v in json.loads(DASHBOARD.read_text())["templating"]["list"]}
    assert list(variables) == ["datasource", "run", "shard"]
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    for name in ("run", "shard"):
        metric = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", variables[name]["definition"])
        assert metric is not None
        assert metric[2] in known_series()[metric[1]]
