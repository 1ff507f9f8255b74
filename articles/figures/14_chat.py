"""The chat page while others use the server, too, in a real browser: light, dark with tokens, and on a phone.

python articles/figures/14_chat.py      # writes 14_chat_*.png beside this file; takes a minute

Needs Debian's chromium (tools/install_test_tools.sh) and the package playwright.
"""

import asyncio
import importlib.util
import sys
import threading
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from playwright.sync_api import Page, sync_playwright  # noqa: E402

from benchmarks.part11_crowd import come  # noqa: E402
from parts.stage import served  # noqa: E402

CROWD = ((30, 4),)  # seconds, people
ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
DESK = {"viewport": {"width": 1280, "height": 720}}
QUESTION = "Tell me a story about a dog and a red ball"


def demo():
    spec = importlib.util.spec_from_file_location("demo", ROOT / "parts/14_streaming_client/demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ask(page: Page, question: str, letters: int) -> None:
    """Ask, and return once an answer has this length."""
    before = page.locator(".assistant").count()
    page.get_by_label("message of").first.fill(question)
    page.get_by_label("message of").first.press("Enter")
    longest = f"Math.max(0, ...[...document.querySelectorAll('.assistant .text')].slice({before})"
    while page.evaluate(longest + ".map(text => text.textContent.length))") <= letters:
        page.wait_for_timeout(20)  # the page's policy forbids wait_for_function its eval


def whole(page: Page) -> None:
    while page.locator(".running").count():
        page.wait_for_timeout(20)


def three_at_once(page: Page) -> None:
    for _ in range(2):
        page.get_by_role("button", name="New").click()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Ask all conversations").check()
    page.keyboard.press("Escape")
    ask(page, QUESTION, 260)


def tokens(page: Page) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Show the tokens").check()
    page.get_by_label("Seed").fill("3")
    page.keyboard.press("Escape")
    ask(page, QUESTION, 100)
    whole(page)
    page.locator(".token.p3").nth(2).hover()


def on_the_way(page: Page) -> None:
    ask(page, QUESTION, 0)
    whole(page)
    ask(page, "Tell me a story about a cat and a boat", 160)


VIEWS = {
    "light": (DESK | {"color_scheme": "light"}, three_at_once),
    "dark": (DESK | {"color_scheme": "dark"}, tokens),
    "phone": (
        {
            "viewport": {"width": 390, "height": 760},
            "color_scheme": "light",
            "is_mobile": True,
            "has_touch": True,
            "device_scale_factor": 1.5,
        },
        on_the_way,
    ),
}


def main() -> None:
    torch.set_num_threads(1)
    module = demo()
    app = module.build()[-1]
    with served(app) as address:
        crowd = threading.Thread(target=asyncio.run, args=[come(address, module.MODEL, CROWD)])
        crowd.start()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=ARGUMENTS)
            for name, (view, play) in VIEWS.items():
                page = browser.new_context(**view).new_page()
                page.goto(address)
                page.locator("#model", has_text=module.MODEL).wait_for()
                play(page)
                path = Path(__file__).with_name(f"14_chat_{name}.png")
                page.screenshot(path=path)
                print(path.name, path.stat().st_size // 1024, "kB")
                page.context.close()
            browser.close()
        crowd.join()


if __name__ == "__main__":
    main()
