"""JupyterLab in a real browser: the system's Chromium, driven by playwright."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update"]


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """JupyterLab on a free port of the loopback; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--no-browser", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token="]
    options += ["--allow-root"] if os.getuid() == 0 else []
    process = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", *options], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait_for(f"http://127.0.0.1:{port}/api")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=20)


@contextlib.contextmanager
def notebook(address: str, name: str) -> Iterator[Page]:
    """The notebook open in JupyterLab, its kernel ready, in a window high enough to hold many cells."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 2000})
        page.goto(f"{address}/lab/tree/{name}?reset")
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status='idle']", timeout=60_000)
        yield page
        browser.close()


def run_all(page: Page, seconds: float = 200) -> None:
    """Run All Cells, then waits until the kernel is idle and the last cell has a number."""
    page.click("text=Run >> visible=true")
    page.click("text=Run All Cells >> visible=true")
    last = page.locator(".jp-Notebook .jp-CodeCell .jp-InputPrompt").last
    deadline = time.monotonic() + seconds
    while not last.inner_text().strip("[]: ").isdigit():
        assert time.monotonic() < deadline, "the notebook did not run to its end"
        _scroll_to_end(page)
        time.sleep(0.3)


def _scroll_to_end(page: Page) -> None:
    page.locator(".jp-Notebook .jp-CodeCell").last.scroll_into_view_if_needed()


def _wait_for(url: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < deadline, "JupyterLab did not start"
            time.sleep(0.2)
