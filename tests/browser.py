"""A headless Chromium for tests marked ``browser``; they skip with a reason where there is none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next((p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), None)
DRIVER = shutil.which("chromedriver")


def start(profile: Path) -> Any:
    """A selenium driver that records console messages and network requests."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("needs chromium and chromedriver (apt-get install chromium chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium (pip install selenium)")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    flags = ["headless=new", "no-sandbox", "disable-gpu", "hide-scrollbars", "disable-dev-shm-usage"]
    for flag in [*flags, f"user-data-dir={profile}"]:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))


def forget(driver: Any) -> None:
    """Empty the logs."""
    driver.get_log("performance")
    driver.get_log("browser")


def complaints(driver: Any) -> list[str]:
    """Errors and warnings on the console since ``forget``."""
    return [e["message"] for e in driver.get_log("browser") if e["level"] in ("SEVERE", "WARNING")]


def requests(driver: Any, page: Path) -> list[str]:
    """Addresses that a page, not the browser itself, has asked for since ``forget``."""
    events = [json.loads(e["message"])["message"] for e in driver.get_log("performance")]
    sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
    return [e["request"]["url"] for e in sent if e["documentURL"] == page.as_uri()]
