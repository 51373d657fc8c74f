"""The tree explorer: two reduction trees of one sum, and the additions that only one of them makes.

A tree is what ``numerics.trees`` reveals of a kernel, or nested tuples of terms' numbers: ``((0, 1), 2)``.
"""

from typing import Mapping

import pandas as pd
from matplotlib.figure import Figure

from ...common import BadInput
from ...numerics.trees import Nested, Tree
from ...schedules import BATCH_WIDE, make_plan
from ..plots import explorers as plots
from .explorer import Explorer, canvas, choice, present


def additions(tree: Tree | Nested) -> dict[tuple[int, ...], tuple[int, list[int], list[float]]]:
    """Every addition of a tree by what it adds: the sets of terms of its operands, as bit masks in order.

    Maps to (height above the terms, operands' heights, operands' places among the terms in the tree's order). Raises BadInput for
    nested tuples that are no tree.
    """
    tree = tree if isinstance(tree, Tree) else Tree.of(tree)
    masks = [1 << term for term in range(tree.leaves)]
    turn = {int(term): place for place, term in enumerate(tree.leaf_order())}
    heights, places = [0] * tree.leaves, [float(turn[term]) for term in range(tree.leaves)]
    found = {}
    for parts in tree.nodes:
        below, at = [heights[part] for part in parts], [places[part] for part in parts]
        found[tuple(sorted(masks[part] for part in parts))] = (1 + max(below), below, at)
        masks.append(sum(masks[part] for part in parts))  # disjoint, so their sum is their union
        heights.append(1 + max(below))
        places.append(sum(at) / len(at))
    return found


def lines_of(tree: Tree | Nested, other: Tree | Nested) -> pd.DataFrame:
    """The tree as lines (x0, y0, x1, y1), ``own`` where the other tree makes no such addition; and leaves."""
    mine, theirs = additions(tree), additions(other)
    rows = []
    for key, (height, below, places) in mine.items():
        own = key not in theirs
        rows.append((min(places), height, max(places), height, own))
        rows += [(x, low, x, height, own) for x, low in zip(places, below)]
    leaves = max((sum(key).bit_length() for key in mine), default=1)
    return pd.DataFrame(rows, columns=["x0", "y0", "x1", "y1", "own"]).astype({"own": bool}).assign(leaves=leaves)


def words(first: str, a: Tree | Nested, second: str, b: Tree | Nested) -> str:
    """How many additions the two share."""
    mine, theirs = additions(a), additions(b)
    shared = len(mine.keys() & theirs.keys())
    deep = [max((height for height, _, _ in one.values()), default=0) for one in (mine, theirs)]
    if mine.keys() == theirs.keys():
        return (
            f"{first} and {second} make the same {len(mine)} additions: the same bits for the same terms. Depth "
            f"{deep[0]}."
        )
    return (
        f"{first} makes {len(mine)} additions, {deep[0]} deep; {second} {len(theirs)}, {deep[1]} deep. {shared} are "
        f"the same; "
        f"the others, dashed, add other partial sums, so bits may differ."
    )


class TreeExplorer(Explorer):
    """Two choices among named trees of the same terms."""

    def __init__(self, trees: Mapping[str, Tree | Nested], first: str, second: str):
        self._trees = dict(trees)
        names = list(self._trees)
        controls = {"first": choice("first tree", names, first), "second": choice("second tree", names, second)}
        super().__init__(controls, self.draw, "Tree explorer: two orders of the same additions")

    def draw(self, first: str, second: str) -> tuple[Figure, str]:
        fig = canvas(9.4, 3.3)
        fig.subplots_adjust(left=0.075, right=0.985, top=0.9, bottom=0.16, wspace=0.13)
        for ax, one, other in zip(fig.subplots(1, 2), (first, second), (second, first)):
            lines = lines_of(self._trees[one], self._trees[other])
            plots.tree_on(ax, lines, int(lines.leaves.iloc[0]) if len(lines) else 1)
            ax.set_title(one, fontsize=10, y=1.0)
            ax.set_xlabel("terms, in the order this tree takes them")
        fig.axes[0].set_ylabel("additions above it")
        return fig, words(first, self._trees[first], second, self._trees[second])


def tree_explorer(
    trees: Mapping[str, Tree | Nested],
    tier: str,
    n: int | str,
    pairs: list[tuple[str, str]] | None = None,
    name: str = "tree-explorer",
) -> str:
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


def fold_trees(p, batches: tuple[int, ...] = (1, 8, 64)) -> dict[str, Nested]:
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


def fold(bounds: list[int]) -> Nested:
    """The tree of pieces that begin at ``bounds`` (rising, the row's end last): blocks in turn, then pieces in turn."""
    pieces = [_in_turn(list(range(begin, end))) for begin, end in zip(bounds, bounds[1:]) if end > begin]
    return _in_turn(pieces) if pieces else 0


def _in_turn(parts: list) -> Nested:
    tree = parts[0]
    for part in parts[1:]:
        tree = (tree, part)
    return tree
