"""Makes docs/example_report.html from a real sweep, and docs/example_report.png, a picture of it on desktop and phone.

harness sweep -c configs/sweeps/pet_names.yaml
python -m docs.report_picture runs/sweep_pet_names        (needs playwright and a chromium)
"""

from __future__ import annotations

import argparse
import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from harness.tools.report import page as report_page

ROOT = Path(__file__).resolve().parents[1]
DESKTOP, PHONE = (1280, 1500), (390, 844)
EDGE, GAP = 32, 28
BACKGROUND = (226, 230, 237)


def shot(browser: Browser, page: Path, size: tuple[int, int], scheme: str, at: str = "") -> Image.Image:
    """The page in a window of ``size`` CSS pixels, scrolled to the section ``at``."""
    phone = size[0] < 600
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, is_mobile=phone, has_touch=phone
    )
    window = context.new_page()
    window.goto(page.as_uri())
    window.wait_for_selector("html[data-ready]", timeout=60_000)
    if at:
        window.evaluate("(id) => document.getElementById(id).scrollIntoView({behavior: 'instant'})", at)
        window.wait_for_timeout(300)
    return Image.open(io.BytesIO(window.screenshot())).convert("RGB")


def picture(page: Path, out: Path) -> None:
    """Write a picture of a light desktop and two phones, one in dark mode."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        desktop = shot(browser, page, DESKTOP, "light")
        height = (DESKTOP[1] - GAP) // 2
        phones = [
            shot(browser, page, (PHONE[0], height), "dark", "target"),
            shot(browser, page, (PHONE[0], height), "light", "time"),
        ]
        browser.close()
    sheet = Image.new("RGB", (DESKTOP[0] + PHONE[0] + GAP + 2 * EDGE, DESKTOP[1] + 2 * EDGE), BACKGROUND)
    sheet.paste(desktop, (EDGE, EDGE))
    for place, phone in enumerate(phones):
        sheet.paste(phone, (EDGE + DESKTOP[0] + GAP, EDGE + place * (height + GAP)))
    sheet.quantize(256, dither=Image.Dither.NONE).save(out, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sweep", type=Path, nargs="?", default=Path("runs/sweep_pet_names"))
    page = ROOT / "docs" / "example_report.html"
    report_page.write([parser.parse_args().sweep], page)
    picture(page, page.with_suffix(".png"))
    print(page.with_suffix(".png"))


if __name__ == "__main__":
    main()
