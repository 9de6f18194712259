"""Results of the page that opens first, computed before anybody asks."""

from __future__ import annotations

from gpusim.report.figures.breakdown import breakdown_figure
from gpusim.report.figures.explored import bounds_figure, gain_figure
from gpusim_dashboard import results
from gpusim_dashboard.choice import first


def first_page() -> None:
    """The overview of the default trace; drawn once, too, because plotly loads its parts on first use."""
    choice = first()
    breakdown_figure(results.breakdown_of(choice), "")
    explored = results.quick_of(choice)
    bounds_figure(explored)
    gain_figure(explored)
