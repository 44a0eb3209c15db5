"""The page: nothing from elsewhere, all charts there, readable on a desk and on a phone."""

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from launcher import HANG_S
from mindspeed_chunk.config import SCHEDULES
from mindspeed_chunk.planner.compare.recipes import RECIPES
from mindspeed_chunk.planner.device import load_device
from mindspeed_chunk.planner.model import load_model
from mindspeed_chunk.planner.page import page
from mindspeed_chunk.planner.report import make_report
from mindspeed_chunk.planner.setting import Job

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTHS = (1280, 390)


@pytest.fixture(scope="module")
def pages():
    """A page with a plan, and one on which nothing fits."""
    made = {}
    for model, device in (("35b", "ascend-910c"), ("397b", "h100")):
        job = Job(
            model=load_model(model), device=load_device(device), nodes=8, devices_per_node=8,
            recipe=RECIPES["bf16-fsdp2"], global_batch=64,
        )  # fmt: skip
        made[model] = page(make_report(job))
    return made


class Elements(HTMLParser):
    void = {"meta", "link"}

    def __init__(self, text):
        super().__init__()
        self.found, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_closed_and_asks_for_nothing(pages):
    for text in pages.values():
        elements = Elements(text)
        assert not elements.open
        tags = {tag for tag, _ in elements.found}
        assert not tags & {"script", "img", "iframe", "object", "embed", "video", "audio", "form"}
        for tag, attributes in elements.found:
            assert not {"src", "srcset", "action", "xlink:href"} & attributes.keys(), tag
            assert attributes.get("href", "data:,") == "data:,"
        style = re.search(r"<style>(.*?)</style>", text, re.S)[1]
        assert "url(" not in style and "@import" not in style and "prefers-color-scheme: dark" in style


def test_charts_are_there(pages):
    elements = Elements(pages["35b"]).found
    bars = [a for tag, a in elements if tag == "svg" and a["class"] == "bar"]
    assert len(bars) >= 2 * 3 and all(a["aria-label"] for a in bars)  # memory and time of three layouts at least
    assert sum(tag == "polyline" for tag, _ in elements) == len(SCHEDULES)
    assert "Nothing fits" in pages["397b"]


@pytest.mark.skipif(BROWSER is None, reason="no chromium here (Debian package chromium)")
def test_in_a_browser_at_both_widths(pages, tmp_path):
    """Inside of frames as wide as a desk and a phone: drawn charts, no sideways scrolling, no console message."""
    frames = "".join(
        f'<iframe srcdoc="{html.escape(text)}" style="width:{width}px;height:900px;border:0"></iframe>'
        for text in pages.values()
        for width in WIDTHS
    )
    script = """
    onload = () => {
      const seen = [...document.querySelectorAll("iframe")].map(frame => {
        const page = frame.contentDocument, root = page.documentElement;
        const sizes = [...page.querySelectorAll("svg")].map(svg => svg.getBoundingClientRect());
        const text = [...page.querySelectorAll("p, li, td, b, span")].map(each =>
          parseFloat(getComputedStyle(each).fontSize));
        return {view: frame.clientWidth, needed: root.scrollWidth, charts: sizes.length,
          drawn: sizes.every(box => box.width > 100 && box.height > 10), smallest: Math.min(...text)};
      });
      document.body.replaceChildren(Object.assign(document.createElement("pre"), {textContent: JSON.stringify(seen)}));
    };"""
    (tmp_path / "frames.html").write_text(f"<!DOCTYPE html><body>{frames}<script>{script}</script></body>")
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
        "--enable-logging=stderr", "--virtual-time-budget=3000", "--dump-dom", f"file://{tmp_path / 'frames.html'}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert "CONSOLE" not in done.stderr, done.stderr
    seen = json.loads(html.unescape(re.search(r"<pre>(.*?)</pre>", done.stdout, re.S)[1]))
    assert [each["view"] for each in seen] == [*WIDTHS, *WIDTHS]
    for each in seen:
        assert each["needed"] <= each["view"], each
        assert each["charts"] >= 7 and each["drawn"] and each["smallest"] >= 12, each
