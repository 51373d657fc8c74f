"""The tree explorer: two reduction trees of one sum, and the additions that only one of them makes.

A tree is an integer (a term's number) or a tuple of trees (one addition, of two terms or, where a kernel fuses more, of
several). Any depth: a running sum over hundreds of terms is as deep as it is long.
"""

from typing import Mapping

import pandas as pd
from matplotlib.figure import Figure

from ...common import BadInput
from ...schedules import BATCH_WIDE, make_plan
from ..plots import explorers as plots
from .explorer import Explorer, canvas, choice, present

Tree = int | tuple


def additions(tree: Tree) -> dict[tuple[int, ...], tuple[int, list, list]]:
    """Every addition of a tree by what it adds: the sets of terms of its children, as bit masks.

    Maps (child mask, ...) sorted to (height, children's heights, children's mean terms). Raises BadInput for anything
    but integers and tuples, or a term that occurs twice.
    """
    found: dict[tuple[int, ...], tuple[int, list, list]] = {}
    done: list[tuple[int, int, float]] = []  # (mask, height, place), of subtrees whose parent is still open
    stack: list[tuple[Tree, bool]] = [(tree, False)]
    while stack:
        node, ready = stack.pop()
        if ready:
            parts = [done.pop() for _ in node][::-1]
            masks = [mask for mask, _, _ in parts]
            together = 0
            for mask in masks:
                if together & mask:
                    raise BadInput("a term occurs twice in the tree: each term is added once.")
                together |= mask
            height = 1 + max(high for _, high, _ in parts)
            place = sum(x for _, _, x in parts) / len(parts)
            found[tuple(sorted(masks))] = (height, [high for _, high, _ in parts], [x for _, _, x in parts])
            done.append((together, height, place))
        elif isinstance(node, tuple) and len(node) > 1:
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(node))
        elif isinstance(node, int) and not isinstance(node, bool) and node >= 0:
            done.append((1 << node, 0, float(node)))
        else:
            raise BadInput(f"{str(node)[:60]} is no tree: give a term's number, or a tuple of two trees or more.")
    return found


def lines_of(tree: Tree, other: Tree) -> pd.DataFrame:
    """The tree as lines (x0, y0, x1, y1), ``own`` where the other tree makes no such addition; and leaves."""
    mine, theirs = additions(tree), additions(other)
    rows = []
    for key, (height, below, places) in mine.items():
        own = key not in theirs
        rows.append((min(places), height, max(places), height, own))
        rows += [(x, low, x, height, own) for x, low in zip(places, below)]
    leaves = max((sum(key).bit_length() for key in mine), default=1)
    return pd.DataFrame(rows, columns=["x0", "y0", "x1", "y1", "own"]).assign(leaves=leaves)


def words(first: str, a: Tree, second: str, b: Tree) -> str:
    """How many additions the two share."""
    mine, theirs = additions(a), additions(b)
    shared = len(mine.keys() & theirs.keys())
    deep = [max((height for height, _, _ in one.values()), default=0) for one in (mine, theirs)]
    if mine.keys() == theirs.keys():
        return f"{first} and {second} make the same {len(mine)} additions: the same bits for the same terms. Depth {deep[0]}."
    return (f"{first} makes {len(mine)} additions, {deep[0]} deep; {second} {len(theirs)}, {deep[1]} deep. {shared} are the same; "
            f"the others, dashed, add other partial sums, so bits may differ.")


class TreeExplorer(Explorer):
    """Two choices among named trees of the same terms."""

    def __init__(self, trees: Mapping[str, Tree], first: str, second: str):
        self._trees = dict(trees)
        names = list(self._trees)
        controls = {"first": choice("first tree", names, first), "second": choice("second tree", names, second)}
        super().__init__(controls, self.draw, "Tree explorer: two orders of the same additions")

    def draw(self, first: str, second: str) -> tuple[Figure, str]:
        fig = canvas(9.4, 3.3)
        fig.subplots_adjust(left=0.055, right=0.985, top=0.9, bottom=0.16, wspace=0.13)
        for ax, one, other in zip(fig.subplots(1, 2), (first, second), (second, first)):
            lines = lines_of(self._trees[one], self._trees[other])
            plots.tree_on(ax, lines, int(lines.leaves.iloc[0]) if len(lines) else 1)
            ax.set_title(one, fontsize=10, y=1.0)
            ax.set_xlabel("term of the sum")
        fig.axes[0].set_ylabel("additions above it")
        return fig, words(first, self._trees[first], second, self._trees[second])


def tree_explorer(trees: Mapping[str, Tree], tier: str, n: int | str, pairs: list[tuple[str, str]] | None = None, name: str = "tree-explorer") -> str:
    """Display the explorer; returns a sentence on what its twin shows.

    trees: two or more by name, of the same terms. pairs: those that the static twin shows; the first pair is where the
    explorer starts. Default: the first tree against each of the next two. Raises BadInput for fewer than two trees, a
    name in ``pairs`` that is not among them, or what is no tree.
    """
    names = list(trees)
    if len(names) < 2:
        raise BadInput(f"the tree explorer has {len(names)} tree: give two or more by name.")
    pairs = pairs or [(names[0], other) for other in names[1:3]]
    unknown = sorted({one for pair in pairs for one in pair} - set(names))
    if unknown:
        raise BadInput(f"no tree is named {unknown[0]!r}: give some of {', '.join(names)}.")
    live = TreeExplorer(trees, *pairs[0])
    frames = []
    for first, second in pairs:
        for one, other in ((first, second), (second, first)):
            frames.append(lines_of(trees[one], trees[other]).assign(pair=f"{first} | {second}", tree=one))
    alt = " ".join(words(a, trees[a], b, trees[b]) for a, b in pairs)
    return present(live, plots.tree_pairs(pd.concat(frames, ignore_index=True)), name, alt, tier, n)


def fold_trees(p, batches: tuple[int, ...] = (1, 8, 64)) -> dict[str, Tree]:
    """Trees of the watched row's blocks in batches of several sizes, under FlashMLA's schedule and p's own-length rule.

    p: ``studies.split_scheduler.Parameters``. A term is a block; a piece adds its blocks one after another, and pieces
    fold left to right. What a kernel does inside a block is left out.
    """
    from ...studies.split_scheduler import batch_lengths

    found = {}
    for rule in (BATCH_WIDE, p.rule):
        for size in batches:
            lengths = [p.longest, *batch_lengths(p, size, seed=1)[1:]]
            plan = make_plan(rule, lengths, p.num_sm_parts, p.block_size, p.overhead)
            found[f"{rule}, batch of {size}"] = fold(plan.bounds_of(0))
    return found


def fold(bounds: list[int]) -> Tree:
    """The tree of pieces that begin at ``bounds`` (rising, the row's end last): blocks in turn, then pieces in turn."""
    pieces = [_in_turn(list(range(begin, end))) for begin, end in zip(bounds, bounds[1:]) if end > begin]
    return _in_turn(pieces) if pieces else 0


def _in_turn(parts: list) -> Tree:
    tree = parts[0]
    for part in parts[1:]:
        tree = (tree, part)
    return tree
