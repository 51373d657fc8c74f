"""Explorers: a few controls, a figure that follows them, and a static twin for pages that no kernel stands behind.

Each is one library call in a notebook cell. The live control and the twin are one output, so a page shows the twin.
"""

from .divergence import divergence_explorer
from .schedule import schedule_explorer
from .threshold import threshold_explorer
from .tree import fold_trees, tree_explorer

__all__ = ["divergence_explorer", "fold_trees", "schedule_explorer", "threshold_explorer", "tree_explorer"]
