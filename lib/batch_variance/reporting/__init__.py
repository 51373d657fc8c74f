"""What a notebook reports with: checks, figures and tables. Importing it applies the project's matplotlib style.

The runner (``reporting.runner``) and the HTML export (``reporting.html``) are imported by the command line only,
so that a notebook's kernel starts without them.
"""

from .checks import Check, check, collect, judge
from .figures import apply_style, show, table

apply_style()

__all__ = ["Check", "check", "collect", "judge", "show", "table"]
