"""What running servers expose, before Prometheus: sound, and such that rules and dashboard find what they ask for."""

import urllib.request
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families

import psclient
from psclient.rpc.local_server import LocalServer
from tests.deploy.monitoring_tools import RULES, dashboard_expressions, needs_promtool, promtool
from tests.system.tools import QUICK, make_data, make_model, train_step, wait_until

pytestmark = needs_promtool

EMPTY_HERE = {"Refusals", "Calls cut", "Alerts firing"}
"""Panels that may show nothing: nothing was refused, and nobody stalled."""

EXPIRED = "psservice_leases_expired_total"
BOUNDS_OFF = ("psservice_max_staleness", "psservice_ssp_bound")


def scrape(server: LocalServer) -> list[str]:
    return [
        urllib.request.urlopen(f"http://{address}/metrics", timeout=30).read().decode()
        for address in server.metrics_addresses
    ]


def total(text: str, name: str) -> float:
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return sum(sample.value for sample in found if sample.name == name)


def input_series(before: list[str], after: list[str]) -> list[dict[str, str]]:
    """What Prometheus would hold: ten minutes of the first scrapes, then ten of the second."""
    values: dict[str, list[float | None]] = {}
    for moment, texts in enumerate((before, after)):
        for shard, text in enumerate(texts):
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    labels = {"job": "psservice", "instance": f"shard-{shard}:9464", **sample.labels}
                    series = sample.name + "{" + ", ".join(f'{name}="{labels[name]}"' for name in sorted(labels)) + "}"
                    values.setdefault(series, [None, None])[moment] = sample.value
    return [
        {"series": series, "values": " ".join("_x9" if value is None else f"{value!r}x9" for value in pair)}
        for series, pair in values.items()
    ]


def test_a_killed_worker_is_alerted_of_and_every_panel_shows_something(tmp_path: Path):
    options = {"data_dir": tmp_path / "data", "lease_seconds": 2, "snapshot_seconds": 300}
    with LocalServer(shards=2, **options) as server:
        models = [make_model(), make_model()]
        x, y = make_data()
        optimizers = [
            psclient.DGS(model.parameters(), lr=0.1, model=model, server=server, worker=name, settings=QUICK)
            for model, name in zip(models, ("anna", "bert"), strict=True)
        ]
        for _ in range(2):
            for model, optimizer in zip(models, optimizers, strict=True):
                train_step(model, optimizer, x, y)
        before = scrape(server)
        optimizers[1]._run.leases.stop()  # as if killed: it renews no longer, and does not leave
        for _ in range(3):
            train_step(models[0], optimizers[0], x, y)
        alive = [total(text, EXPIRED) for text in before]
        wait_until(lambda: all(total(text, EXPIRED) > old for text, old in zip(scrape(server), alive, strict=True)))
        after = scrape(server)
        for optimizer in optimizers:
            optimizer.close()

    for text in after:
        checked = promtool("check", "metrics", stdin=text)
        assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
        assert total(text, "psservice_training") == 1
        assert total(text, "psservice_shards") == 2
        assert total(text, "psservice_pushes_total") == 7
        assert total(text, "psservice_joins_total") >= 2
        assert total(text, "psservice_snapshot_unix_seconds") > 0
        assert total(text, "psservice_unsaved_since_unix_seconds") > 0
        assert total(text, "psservice_queue_seconds_count") >= 7
        dense = 4 * total(text, "psservice_elements")
        answered = 7 + total(text, "psservice_repeated_pushes_total") + total(text, "psservice_pulls_total")
        assert total(text, "psservice_dense_bytes_total") == dense * answered

    (run,) = {
        sample.labels["run"]
        for family in text_string_to_metric_families(after[0])
        for sample in family.samples
        if sample.name == "psservice_shard_info"
    }
    firing = 'count by (alertname) (ALERTS{alertstate="firing"})'
    dead = {"labels": '{alertname="SparsepsWorkerDead"}', "value": 1}
    checks = [
        {"expr": firing, "eval_time": "9m", "exp_samples": []},
        {"expr": firing, "eval_time": "12m", "exp_samples": [dead]},
    ]
    for title, expression in dashboard_expressions():
        if title not in EMPTY_HERE and not any(name in expression for name in BOUNDS_OFF):
            here = expression.replace('run="r"', f'run="{run}"')
            some = f"clamp_max(count({here}), 1)"
            checks.append({"expr": some, "eval_time": "12m", "exp_samples": [{"labels": "{}", "value": 1}]})
    written = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": input_series(before, after), "promql_expr_test": checks}],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(written))
    answer = promtool("test", "rules", str(tmp_path / "test.yaml"))
    assert answer.returncode == 0, answer.stdout + answer.stderr
