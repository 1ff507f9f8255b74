"""The dashboard under load, in a real browser: light, dark, and on a phone.

python articles/figures/11_dashboard.py      # writes 11_dashboard_*.png beside this file; takes four minutes

Needs Debian's chromium (tools/install_test_tools.sh) and the package playwright. Takes no picture of a busy
machine: if a step of at most eight requests takes longer than one of 32 did in part11_cost, it ends.
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
from benchmarks.record import read_record  # noqa: E402
from parts.stage import served  # noqa: E402

WAVES = ((40, 6), (20, 22), (35, 3), (15, 30), (30, 9), (12, 1), (80, 14))  # seconds, people
ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
VIEWS = {
    "light": {"viewport": {"width": 1220, "height": 680}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1220, "height": 680}, "color_scheme": "dark"},
    "phone": {
        "viewport": {"width": 390, "height": 844},
        "color_scheme": "light",
        "is_mobile": True,
        "device_scale_factor": 1.5,
    },
}


def demo():
    spec = importlib.util.spec_from_file_location("demo", ROOT / "parts" / "11_telemetry" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    torch.set_num_threads(1)
    module = demo()
    metrics, app = module.build()
    slowest = read_record("part11_cost")["figures"]["step_ms"]
    total = sum(length for length, _ in WAVES)
    with served(app) as address:
        crowd = threading.Thread(target=asyncio.run, args=[come(address, module.MODEL, WAVES)], daemon=True)
        crowd.start()
        time.sleep(total - 32)
        steps = metrics.histograms["ruvon:step_seconds"]
        mean = steps.sum / max(1, sum(steps.counts)) * 1e3
        if mean > slowest:
            sys.exit(
                f"a step takes {mean:.1f} ms, and one of 32 requests took {slowest:.1f}: the machine is busy"
            )
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=ARGUMENTS)
            for name, view in VIEWS.items():
                page = browser.new_context(**view).new_page()
                page.goto(f"{address}/dashboard")
                page.wait_for_selector("#status[data-state=live]")
                page.wait_for_timeout(300)
                path = Path(__file__).with_name(f"11_dashboard_{name}.png")
                page.screenshot(path=path, full_page=name != "phone")
                print(path.name, path.stat().st_size // 1024, "kB")
            browser.close()
        crowd.join()


if __name__ == "__main__":
    main()
