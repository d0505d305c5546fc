"""README and docs: every command prints what the page says, every Python block runs, every link leads somewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("render", ROOT / "docs" / "render.py")
render = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(render)

PAGES = render.PAGES
by_name = pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])


@by_name
def test_console_blocks_show_the_real_output(page):
    text = page.read_text(encoding="utf-8")
    assert render.render(text) == text, "run `make docs`"


@by_name
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        exec(compile(block, str(page), "exec"), names)


@by_name
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_verb_has_a_page_with_its_help_and_an_example():
    from batchwright.cli import GROUPS

    for verbs in GROUPS.values():
        for verb in verbs:
            page = (ROOT / "docs" / f"{verb}.md").read_text(encoding="utf-8")
            assert f"$ batchwright {verb} --help\n" in page
            assert "Example" in page.split("--help\n")[1]


def test_every_error_is_documented():
    from batchwright.core import errors

    names = [n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, errors.BatchwrightError)]
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert [n for n in names if f"`{n}`" not in text] == []
