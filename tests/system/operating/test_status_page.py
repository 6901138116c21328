"""The status page in a real browser: what it shows, that it follows, and that it asks nobody but its own server."""

import json
import shutil
import urllib.parse

import pytest

import psclient
from psclient.rpc.local_server import LocalServer
from tests.system.tools import QUICK, make_data, make_model, train_step, wait_until

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
HOSTILE = "<img src=x onerror=alert(1)>"

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed (Debian: chromium chromium-driver)"
)


@pytest.fixture
def browser(tmp_path):
    """A headless browser with an empty profile that remembers what it has asked for."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
        "--window-size=390,800",
        f"--user-data-dir={tmp_path / 'profile'}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(60)
    yield driver
    driver.quit()


def text(browser, name):
    return browser.execute_script("return document.getElementById(arguments[0]).innerText", name)


def requested(browser, origin):
    """The addresses that pages of this origin have asked for; the browser has pages of its own."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
    return [each["request"]["url"] for each in sent if each["documentURL"].startswith(origin)]


def test_workers_appear_follow_and_go_and_the_page_keeps_to_its_server(browser):
    with LocalServer() as server:
        origin = f"http://{server.metrics_addresses[0]}"
        browser.get(f"{origin}/")
        wait_until(lambda: browser.title == "psservice shard 0 of 1", 60)
        assert "No live workers" in text(browser, "none")
        model = make_model(batch_norm=False)
        optimizer = psclient.DGS(
            model.parameters(), lr=0.1, model=model, server=server.server, worker=HOSTILE, settings=QUICK
        )
        train_step(model, optimizer, *make_data())
        wait_until(lambda: HOSTILE in text(browser, "workers"), 60)
        before = text(browser, "workers")
        for seed in range(3):
            train_step(model, optimizer, *make_data(seed))
        wait_until(lambda: text(browser, "workers").split()[:5] != before.split()[:5], 60)
        wait_until(lambda: "Version\n4" in text(browser, "facts"), 60)
        assert "Saved against dense" in text(browser, "facts")
        width = browser.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
        assert width[0] <= width[1], "nothing has to be scrolled sideways on a phone"
        headers = browser.execute_script("return [...document.querySelectorAll('thead th')].map(h => h.scope)")
        assert set(headers) == {"col"}
        assert browser.execute_script("return document.documentElement.lang") == "en"
        assert not browser.execute_script("return document.querySelector('tbody img, tbody script') !== null")
        optimizer.close()
        wait_until(lambda: text(browser, "workers") == "", 60)
        asked = requested(browser, origin)
        assert {urllib.parse.urlsplit(url).path for url in asked if url.startswith(origin)} == {
            "/",
            "/status.json",
            "/recent.json",
        }
        assert all(url.startswith((f"{origin}/", "data:")) for url in asked), asked
        assert browser.get_log("browser") == []
    wait_until(lambda: "No answer since" in text(browser, "trouble"), 60)


CURVES = """return Object.fromEntries([...document.querySelectorAll('#curves figure')].map((figure) => [
    figure.querySelector('figcaption span').textContent,
    [...figure.querySelectorAll('path')].map((path) => path.getAttribute('d')),
]))"""


def points(path):
    """The coordinates of a curve's points."""
    return [tuple(map(float, each.split())) for each in path.replace("M", "L").split("L")[1:]]


def rows(browser, name):
    return [row.split() for row in text(browser, name).splitlines()]


@pytest.mark.long
def test_shard_0_draws_the_past_of_all_shards_and_others_say_whose_page_does(browser):
    with LocalServer(shards=2) as server:
        model = make_model(batch_norm=False)
        optimizer = psclient.DGS(
            model.parameters(), lr=0.1, model=model, server=server.server, worker="w", settings=QUICK
        )
        first, second = (f"http://{address}/" for address in server.metrics_addresses)
        browser.get(first)

        def trains_until(holds):
            train_step(model, optimizer, *make_data())
            optimizer.log_loss(-0.5)
            return holds()

        def curves():
            return browser.execute_script(CURVES)

        wait_until(lambda: trains_until(lambda: len(points(*curves().get("Loss, mean of workers", [""]))) > 1), 120)
        wait_until(lambda: trains_until(lambda: [row[0] for row in rows(browser, "shards")] == ["0", "1"]), 60)
        wait_until(lambda: trains_until(lambda: all(int(row[1]) > 0 for row in rows(browser, "shards"))), 60)
        found = curves()
        assert {name: len(paths) for name, paths in found.items()} == {
            "Loss, mean of workers": 1,
            "Versions a second": 1,
            "Staleness": 2,
            "Bytes a second": 2,
            "Samples a second": 1,
            "Live workers": 1,
        }
        versions = points(*found["Versions a second"])
        assert [x for x, _ in versions] == sorted(x for x, _ in versions)
        assert min(y for _, y in versions) < max(y for _, y in versions), "it has risen from nothing"
        assert browser.execute_script(
            "return document.querySelector('#curves svg').getAttribute('aria-label')"
        ).startswith("Loss, mean of workers: now loss -0.5;")
        browser.execute_script("document.getElementById('history').click()")
        wait_until(lambda: any(url == f"{first}history.json" for url in requested(browser, first)), 60)
        for width in (320, 1200):
            size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            wide = browser.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
            assert wide[0] <= wide[1], "nothing has to be scrolled sideways"
        browser.get(second)
        wait_until(lambda: "shard 0's page" in text(browser, "others"), 60)
        assert [row[0] for row in rows(browser, "shards")] == ["1"]
        assert browser.get_log("browser") == []
        optimizer.close()
