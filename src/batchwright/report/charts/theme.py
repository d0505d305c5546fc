"""How every chart looks: the colours of each role, light and dark, and the configuration that all charts share.

A chart names roles (`@blue`, `@text`), never colours, so one definition serves all themes. The colours are those of Okabe and
Ito (2008), which people with colour-blindness can tell apart, darker or lighter where the background needs it. Series
also differ in dash, shape or fill, so that they can be told apart in grey.
"""

from __future__ import annotations

from typing import Any

# Role -> (light, dark).
COLORS = {
    "background": ("#ffffff", "#14171c"),
    "text": ("#1f2328", "#e6e8eb"),
    "muted": ("#59636e", "#9aa4af"),
    "grid": ("#e3e6ea", "#2d333b"),
    "blue": ("#0072b2", "#56a8e0"),
    "orange": ("#d97a00", "#f0a83c"),
    "green": ("#009e73", "#3cc79d"),
    "purple": ("#b3578a", "#d992b8"),
    "sky": ("#56b4e9", "#8fd0f5"),
    "yellow": ("#c9b800", "#f0e442"),
    "red": ("#c4450c", "#f0804a"),
}
THEMES = ("light", "dark")
# A page and its charts have the same font. A picture is measured with a font that vl-convert carries.
PAGE_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
_FONT = "Helvetica, Arial, sans-serif"


def colors(theme: str) -> dict[str, str]:
    """The colours of a theme by role; those of `css` are variables of the page that shows the chart.

    >>> colors("light")["blue"], colors("css")["blue"]
    ('#0072b2', 'var(--blue)')
    """
    if theme == "css":
        return {role: f"var(--{role})" for role in COLORS}
    return {role: pair[THEMES.index(theme)] for role, pair in COLORS.items()}


def themed(spec: Any, theme: str) -> Any:
    """The same specification with a colour for every role.

    >>> themed({"mark": {"color": "@blue", "text": ["@dark"]}}, "light")
    {'mark': {'color': '#0072b2', 'text': ['@dark']}}
    """
    known = colors(theme)

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items() if key != "values"} | (
                {"values": value["values"]} if "values" in value else {}
            )
        if isinstance(value, list):
            return [walk(item) for item in value]
        return known.get(value[1:], value) if isinstance(value, str) and value.startswith("@") else value

    return walk(spec)


def config(theme: str) -> dict[str, Any]:
    """The `config` of a specification, with roles for colours."""
    page = theme == "css"
    return {
        "background": "transparent" if page else "@background",
        "font": PAGE_FONT if page else _FONT,
        "padding": 2 if page else 16,
        "view": {"stroke": None},
        "title": {
            "anchor": "start", "frame": "bounds", "offset": 16, "color": "@text", "fontSize": 17, "fontWeight": "bold",
            "subtitleColor": "@muted", "subtitleFontSize": 13, "subtitlePadding": 6, "limit": 0,
        },
        "axis": {
            "labelColor": "@muted", "labelFontSize": 12, "labelPadding": 5, "titleColor": "@text", "titleFontSize": 12,
            "titleFontWeight": "normal", "titlePadding": 8, "gridColor": "@grid", "domainColor": "@muted",
            "tickColor": "@muted",
        },
        "axisX": {"grid": False, "labelOverlap": "greedy", "labelSeparation": 8, "tickCount": 6},
        "axisY": {
            "domain": False, "ticks": False, "minExtent": 44, "tickCount": 5, "titleAngle": 0, "titleAlign": "left",
            "titleBaseline": "bottom", "titleX": -44, "titleY": -10,
        },
        "legend": {
            "orient": "top", "direction": "horizontal", "title": None, "labelColor": "@text", "labelFontSize": 12,
            "symbolSize": 90, "symbolStrokeWidth": 2, "labelLimit": 0, "offset": 34, "columnPadding": 16,
            "layout": {"top": {"anchor": "start", "direction": "horizontal", "margin": 16, "bounds": "full"}},
        },
        "line": {"strokeWidth": 2},
        "text": {"color": "@text", "fontSize": 12},
    }  # fmt: skip
