"""What a run or a sweep leaves for a reader: results/<name>.json, summary.md, curves.png.

    python -m common.report DIR        # rebuild the report of a sweep or a run, for example after adding seeds

curves.py reads runs, statistics.py computes, tables.py, plots.py and run_page.py show, sweep.py writes. Nothing here
needs torch, and matplotlib is imported only when a picture is drawn.
"""

from common.report.sweep import write_run, write_sweep

__all__ = ["write_run", "write_sweep"]
