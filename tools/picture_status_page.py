#!/usr/bin/env python3
"""Draw docs/operate/status-page.png: the status page of two shards with real workers, in headless Chromium.

    python tools/picture_status_page.py [--output docs/operate/status-page.png] [--version 300]
        [--dark] [--width 1000] [--height 1160]

Needs Debian's packages chromium and chromium-driver. Exit status: 0 done, 1 there is no browser.
"""

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import torch
from torch import nn

import psclient
from psclient.rpc.local_server import LocalServer

ROOT = Path(__file__).resolve().parent.parent
WIDTH, HEIGHT = 1000, 1160
WORKERS = 4
LONGEST_SECONDS = 300
PAGE_SECONDS = 7  # a few looks of the page, so that it knows rates


def train(server: str, number: int, stop: threading.Event) -> None:
    """Train a small model as one worker, each at a pace of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = psclient.DGS(
        model.parameters(), lr=0.01, density=0.01, model=model, server=server, worker=f"worker-{number}"
    )
    inputs, labels = torch.randn(32, 256), torch.randint(0, 10, (32,))
    while not stop.wait(0.2 * (number + 1)):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.log_loss(loss)
        optimizer.step()
    optimizer.close()


def await_version(url: str, version: int) -> None:
    """Wait until the shard is at a version; raises ``TimeoutError`` where it does not come there."""
    end = time.monotonic() + LONGEST_SECONDS
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy of the environment
    while time.monotonic() < end:
        with direct.open(f"{url}status.json", timeout=30) as answer:
            if json.load(answer)["version"] >= version:
                return
        time.sleep(1)
    raise TimeoutError(f"version {version} was not reached in {LONGEST_SECONDS} s")


def picture(url: str, output: Path, width: int, height: int, *, is_dark: bool) -> None:
    """Look at a page until it knows rates, and keep what it looks like."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        driver.get(url)
        time.sleep(PAGE_SECONDS)
        driver.save_screenshot(str(output))
    finally:
        driver.quit()


def main() -> int:
    """Run a server and workers, and draw."""
    parser = argparse.ArgumentParser(description="Draw docs/operate/status-page.png.")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "operate" / "status-page.png")
    parser.add_argument("--version", type=int, default=300, help="version at which the picture is taken (default 300)")
    parser.add_argument("--dark", action="store_true", help="as a browser that prefers dark pages shows it")
    parser.add_argument("--width", type=int, default=WIDTH, help=f"of the window, pixels (default {WIDTH})")
    parser.add_argument("--height", type=int, default=HEIGHT, help=f"of the window, pixels (default {HEIGHT})")
    options = parser.parse_args()
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        print("chromium or chromedriver is missing: apt-get install chromium chromium-driver", file=sys.stderr)
        return 1
    stop = threading.Event()
    with tempfile.TemporaryDirectory() as data, LocalServer(shards=2, data_dir=data, snapshot_seconds=10) as server:
        threads = [threading.Thread(target=train, args=(server.server, n, stop)) for n in range(WORKERS)]
        for thread in threads:
            thread.start()
        try:
            url = f"http://{server.metrics_addresses[0]}/"
            await_version(url, options.version)
            picture(url, options.output, options.width, options.height, is_dark=options.dark)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
