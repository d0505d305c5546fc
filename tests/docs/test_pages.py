"""README and docs: every command prints what the page shows, every Python block runs, every link resolves."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.needs import needs

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


@pytest.mark.filterwarnings(
    "ignore:The `srun` command is available:UserWarning"
)  # of Lightning, where Slurm is installed
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch deprecates what Lightning uses
@by_name
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        exec(compile(block, str(page), "exec"), names)


@by_name
def test_every_relative_link_resolves(page):
    for target in links(page):
        assert target.exists(), f"{page.name} links to {target}"


def links(page: Path) -> list[Path]:
    """The files that a page links to."""
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    return [(page.parent / target).resolve() for target in targets if "://" not in target]


@by_name
def test_every_link_to_a_heading_resolves(page):
    for target, heading in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            linked = (page.parent / target).resolve() if target else page
            assert heading in headings(linked), f"{page.name} links to {linked.name}#{heading}"


def headings(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page; of several equal ones the later ones are numbered."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for title in re.findall(r"^#+ +(.*?)\s*$", text, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()  # a link is shown as its text
        name = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        found.add(next(n for n in (name, *(f"{name}-{i}" for i in range(1, 100))) if n not in found))
    return found


def test_the_anchors_of_headings_are_those_of_github(tmp_path):
    page = tmp_path / "x.md"
    page.write_text("# A [b](c.md): `d_e.py`\n## One, two\n## One, two\n```text\n# no heading\n```\n")
    assert headings(page) == {"a-b-d_epy", "one-two", "one-two-1"}


def test_pictures_are_current_small_and_shown():
    needs("vl_convert")
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.pictures()
    assert {path.name: path.read_text(encoding="utf-8") for path in module.FOLDER.glob("*.svg")} == made, (
        "run `make docs`"
    )
    assert all(len(text) < 100_000 for text in made.values())
    shown: set[Path] = set()
    for page in PAGES:
        for block in re.findall(r"<picture>.*?</picture>", page.read_text(encoding="utf-8"), re.DOTALL):
            light, dark = re.search(r'src="([^"]+)"', block)[1], re.search(r'srcset="([^"]+)"', block)[1]
            assert light.replace("-light.svg", "-dark.svg") == dark and re.search(r'alt="[^"]{20,}"', block)
            shown |= {(page.parent / light).resolve(), (page.parent / dark).resolve()}
    assert {path.name for path in shown} == set(made) and all(path.exists() for path in shown)


def test_the_index_links_every_page():
    index = ROOT / "docs" / "README.md"
    assert {page for page in PAGES if page != index} <= set(links(index))


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


def test_every_module_answers_a_question_of_the_design():
    source = ROOT / "src" / "batchwright"
    table = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").split("## Where is it?")[1].split("\n## ")[0]
    named = re.findall(r"`([\w/]+\.py)`", table)
    # An `__init__` of one line has only the docstring of its folder.
    modules = [path for path in source.rglob("*.py") if len(path.read_text(encoding="utf-8").splitlines()) > 1]
    folders = {
        f"{room}/__init__.py" for room in ("probe", "estimate", "runtime/check")
    }  # they repeat one module's names
    assert sorted(named) == sorted({str(path.relative_to(source)) for path in modules} - folders)


def test_the_comparison_has_the_numbers_of_the_benchmarks():
    """Each row of the finders: found, trials and ratio of CPU time are those of docs/benchmarks.md."""
    pages = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("comparison", "benchmarks")}
    rows = re.findall(
        r"^\| (?:batchwright|Lightning|Accelerate)[^|]*\| (\d+) \| (\d+) \| ([\d.]+) \|$", pages["comparison"], re.M
    )
    assert len(rows) == 4
    for found, trials, ratio in rows:
        assert re.search(rf"\| {found}[^|]*\| {trials} \| {ratio} \|", pages["benchmarks"]), (found, trials, ratio)
