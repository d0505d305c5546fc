"""Results that show themselves in a notebook: their numbers as a table, and their charts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from batchwright.core.errors import BatchwrightError

if TYPE_CHECKING:
    from .charts.spec import Spec

# JupyterLab and VS Code draw it themselves, without network.
VEGA_LITE = "application/vnd.vegalite.v5+json"


class Shown:
    """A result with charts. `kind` says which; `document` is what they are drawn from."""

    kind: ClassVar[str]

    def document(self) -> Mapping[str, Any]:
        """What `--json` prints."""
        return self.to_json()  # type: ignore[attr-defined]

    def chart(self, name: str | None = None, *, theme: str = "light") -> Spec | None:
        """A Vega-Lite specification: the chart with this name, or all below each other; None if there is nothing to draw."""
        from .charts import chart_of

        return chart_of(self.kind, self.document(), name, theme)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """For notebooks: a table and the charts as SVG; without the extra [report], a chart that the notebook draws."""
        from .html import fragment
        from .render import available, svg
        from .sections import section

        shown: dict[str, Any] = {"text/plain": repr(self)}
        try:
            made = section(self.kind, self.document(), "", "light")
            if available():
                return shown | {"text/html": fragment(made, [svg(spec) for spec in made.charts.values()])}
            chart = self.chart()
        except (BatchwrightError, OSError):  # the files of a run are gone
            return shown
        # JupyterLab would show the HTML where there is both.
        return shown | ({"text/html": fragment(made, [])} if chart is None else {VEGA_LITE: chart})
