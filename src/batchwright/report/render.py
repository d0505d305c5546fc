"""Charts as pictures, and the JavaScript that draws them in a page: vl-convert does both, without a browser or network."""

from __future__ import annotations

from typing import Any

from batchwright.core.errors import MissingExtraError

from .charts.spec import Spec

_SCALE = 2.0  # pixels of a PNG per unit of the chart: sharp on paper and on dense screens


def svg(spec: Spec) -> str:
    """A chart as SVG."""
    return _converter().vegalite_to_svg(spec, allowed_base_urls=[])


def png(spec: Spec) -> bytes:
    """A chart as PNG."""
    return _converter().vegalite_to_png(spec, scale=_SCALE, allowed_base_urls=[])


def bundle() -> str:
    """JavaScript for a page: Vega, Vega-Lite and Vega-Embed, as `vegaEmbed`."""
    made = _converter().javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return made.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def available() -> bool:
    """Whether pictures can be made here."""
    from importlib.util import find_spec

    return find_spec("vl_convert") is not None


def _converter() -> Any:
    try:
        import vl_convert
    except ImportError as error:
        raise MissingExtraError(
            "report needs the package vl-convert-python, which is not installed: pip install 'batchwright[report]'. "
            "Without it, --markdown writes the tables.",
            field="report",
            given="vl-convert-python",
        ) from error
    return vl_convert
