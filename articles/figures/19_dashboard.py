"""The dashboard with the cost of a run, in a real browser, while a crowd comes and goes.

python articles/figures/19_dashboard.py      # writes 19_dashboard.png beside this file; takes a minute

Needs Debian's chromium (tools/install_test_tools.sh) and the package playwright.
"""

import asyncio
import importlib.util
import sys
import threading
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from playwright.sync_api import sync_playwright  # noqa: E402

from benchmarks.part11_crowd import come  # noqa: E402
from parts.stage import served  # noqa: E402

WAVES = ((15, 2), (15, 12), (12, 1), (18, 20))  # seconds, people
ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]


def demo():
    spec = importlib.util.spec_from_file_location("demo", ROOT / "parts" / "19_cost_dashboard" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    torch.set_num_threads(1)
    module = demo()
    _, app = module.build()
    with served(app) as address:
        crowd = threading.Thread(target=asyncio.run, args=[come(address, module.MODEL, WAVES)])
        crowd.start()
        time.sleep(sum(length for length, _ in WAVES) - 6)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=ARGUMENTS)
            page = browser.new_context(viewport={"width": 1220, "height": 620}).new_page()
            page.goto(f"{address}/dashboard")
            page.wait_for_selector("#panels .panel")
            page.wait_for_timeout(300)
            path = Path(__file__).with_suffix(".png")
            page.screenshot(path=path)
            print(path.name, path.stat().st_size // 1024, "kB")
            browser.close()
        crowd.join()


if __name__ == "__main__":
    main()
