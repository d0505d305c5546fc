"""A report in Debian's Chromium, from file://: every chart is drawn, nothing else is loaded, nothing overflows."""

from __future__ import annotations

import json

import pytest

import batchwright
from tests.needs import needs, needs_program
from tests.report import material

needs("vl_convert")
needs("playwright")

# Chromium as root in a container, without anything that would use a network.
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    paths = [material.run_directory(folder / 'a "<run>" of everything', losses={20: "nan", 150: 9.5})]
    paths.append(material.rl_directory(folder / "rl"))
    for kind, document in material.documents().items():
        paths.append(folder / f"{kind}.json")
        paths[-1].write_text(json.dumps(document))
    made = batchwright.report(*paths, output=folder / "report.html")
    return folder / "report.html", made


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    program = needs_program("chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as player:
        profile = tmp_path_factory.mktemp("profile")
        context = player.chromium.launch_persistent_context(
            profile, executable_path=program, headless=True, args=FLAGS, timeout=120_000
        )
        yield context
        context.close()


DRAWN = "[...document.querySelectorAll('figure[data-chart]')].every(figure => figure.dataset.drawn)"
SIZES = """[...document.querySelectorAll('figure[data-chart] svg')].map(picture => {
  const box = picture.getBoundingClientRect();
  return [box.width, box.height, picture.querySelectorAll('path').length];
})"""


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1280, "light"),
        (390, "dark"),
        pytest.param(390, "light", marks=pytest.mark.rounds),
        pytest.param(1280, "dark", marks=pytest.mark.rounds),
    ],
)
def test_every_chart_is_drawn(chromium, report, width, scheme):
    path, made = report
    page = chromium.new_page()
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(path.as_uri())
    page.wait_for_function(DRAWN, timeout=120_000)
    sizes = page.evaluate(SIZES)
    assert len(sizes) == len(made.charts) == 15
    assert all(w > 200 and h > 40 and paths > 2 for w, h, paths in sizes), sizes
    assert said == [] and [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cut = (
        "[...document.querySelectorAll('.chart')].filter(one => one.querySelector('svg').clientWidth > one.clientWidth)"
    )
    assert page.evaluate(f"{cut}.length") == 0
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 28)"}[scheme]
    line = page.evaluate(
        "getComputedStyle(document.querySelector('[data-chart=\"1-staircase\"] .mark-line path')).stroke"
    )
    assert line == {"light": "rgb(0, 114, 178)", "dark": "rgb(86, 168, 224)"}[scheme], (
        "charts follow the theme of the page"
    )
    page.set_viewport_size({"width": 800, "height": 900})
    page.wait_for_function("document.querySelector('figure[data-chart]').drawnAt > 600 && " + DRAWN)
    page.close()
