"""Two cards of the page /engine of a server at work, memory and requests, in a real browser, light and dark.

python articles/figures/20_live.py      # writes 20_live_*.png beside this file; takes half a minute

Needs Debian's chromium (tools/install_test_tools.sh) and the package playwright.
"""

import io
import json
import re
import sys
import tempfile
import threading
from pathlib import Path

import httpx
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from playwright.sync_api import Page, sync_playwright  # noqa: E402

from engine.demo.server import served  # noqa: E402
from engine.speculation.measuring import ALWAYS_DRAFT  # noqa: E402

DRAFTS = {"model": "storyteller-draft", "num_speculative_tokens": 4, "step_times": ALWAYS_DRAFT.as_dict()}
FLAGS = [
    "--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--max-model-len", "256",
    "--kv-cache-memory-bytes", "15000000", "--swap-space", "0.01", "--preemption-mode", "swap",
    "--speculative-config", json.dumps(DRAFTS),
]  # fmt: skip
BEGINNING = (
    "Lily and her mom were in the kitchen. They wanted to bake a big cake for the party. They took eggs, "
    "milk and sugar, and a big bowl. "
)
ENDS = ("Lily said", "The dog", "Then her friend Tim came", "But the oven", "Her mom", "One day", "They")
ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
STEPS = 100  # before the picture
GAP = 12  # pixels between the cards
COLOURS = 64  # of the picture: fewer bytes, and no difference to see


def ask(url: str, number: int, stopping: threading.Event) -> None:
    """Ask again and again, each time two samples of one prompt, until `stopping`."""
    body = {"model": "storyteller", "prompt": BEGINNING + ENDS[number], "n": 2, "temperature": 0.8}
    with httpx.Client(base_url=url, timeout=600, trust_env=False) as client:
        while not stopping.is_set():
            client.post("/v1/completions", json=body | {"max_tokens": 100 + 20 * number})


def step_of(page: Page) -> int:
    """The number of the newest step that the page has shown."""
    found = re.match(r"Step ([\d,]+)", page.locator("#step-words").inner_text())
    return int(found[1].replace(",", "")) if found else 0


def cards(page: Page) -> Image.Image:
    """The two cards side by side, on the page's ground."""
    whole = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    sections = (page.locator(f"[aria-labelledby={name}-title]") for name in ("memory", "requests"))
    boxes = [section.bounding_box() for section in sections]
    width = sum(int(box["width"]) for box in boxes) + GAP
    picture = Image.new("RGB", (width, max(int(box["height"]) for box in boxes)), whole.getpixel((2, 2)))
    left = 0
    for box in boxes:
        x, y, w, h = (int(box[side]) for side in ("x", "y", "width", "height"))
        picture.paste(whole.crop((x, y, x + w, y + h)), (left, 0))
        left += w + GAP
    return picture


def main() -> None:
    stopping = threading.Event()
    with tempfile.TemporaryDirectory() as folder, served(Path(folder) / "log", *FLAGS) as (url, _):
        crowd = [threading.Thread(target=ask, args=(url, number, stopping)) for number in range(len(ENDS))]
        for one in crowd:
            one.start()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=ARGUMENTS)
            page = browser.new_page(viewport={"width": 1220, "height": 640})
            page.goto(f"{url}/engine")
            page.locator("#lanes svg").wait_for()
            while step_of(page) < STEPS:
                page.wait_for_timeout(50)
            page.get_by_role("button", name="Pause").click()
            page.locator("#labels button", has_text=re.compile(r"\d")).first.click()  # a row with a request
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                path = Path(__file__).with_name(f"20_live_{scheme}.png")
                cards(page).quantize(COLOURS).save(path, optimize=True)
                print(path.name, path.stat().st_size // 1024, "kB")
            browser.close()
        stopping.set()
        for one in crowd:
            one.join()


if __name__ == "__main__":
    main()
