"""Draws runs: a page for a browser, figures of matplotlib, a line of text for a terminal."""

from perdure.report.figure import plot
from perdure.report.run_report import report

__all__ = ["plot", "report"]
