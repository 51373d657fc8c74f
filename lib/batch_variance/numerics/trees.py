"""The order of additions inside a kernel, revealed from its outputs alone, as a tree.

A sum of n terms is a tree whose leaves are the terms. Put +big in term i, -big in term j and one small unit in every
other: what meets big before the two cancel is absorbed, what comes later survives, so the sum counts the leaves outside
the smallest subtree that holds both i and j. From such counts the tree follows, nodes of many operands (a tensor core
adds 8 or 16 products and its accumulator at once) included. The method was published as FPRev (Xie and others, 2024).
Many probes go into one call, in the kernel's other dimensions, so that the shape under test is the shape that runs.

Equal trees give equal bits for all inputs, if the steps are the same operation; unequal ones show where an order
changed.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Callable, Iterable, Sequence

import numpy as np
import torch

from ..common import BadInput

Nested = int | tuple


@dataclass(frozen=True)
class Tree:
    """leaves: terms; nodes: children of each internal node, which is numbered on from the leaves.

    Canonical, so that trees are equal if and only if they add the same terms in the same order (operands of one
    addition may change places): children ascend by their smallest leaf, nodes by size and smallest leaf. The last is
    the root.
    """

    leaves: int
    nodes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, nested: Nested) -> "Tree":
        """From nested tuples of leaf numbers 0 to n - 1, such as ``((0, 1), 2)``. A tuple of one is its element.
        Raises BadInput where a leaf is missing or comes twice."""
        children: list[tuple[int, ...]] = []
        seen: list[int] = []
        # An explicit stack, for a sequential sum is as deep as it is long. Internal nodes are numbered -1, -2, ...
        # first.
        results: list[list[int]] = [[]]
        stack: list[tuple[str, object]] = [("visit", nested)]
        while stack:
            action, item = stack.pop()
            if action == "close":
                found = results.pop()
                if len(found) == 1:
                    results[-1].append(found[0])
                else:
                    children.append(tuple(found))
                    results[-1].append(-len(children))
            elif isinstance(item, tuple):
                results.append([])
                stack.append(("close", None))
                stack += [("visit", part) for part in reversed(item)]
            else:
                seen.append(int(item))
                results[-1].append(int(item))
        if sorted(seen) != list(range(len(seen))) or not seen:
            raise BadInput(f"{len(seen)} leaves were given, not each of 0 to {len(seen) - 1} once: number them so.")
        return cls._canonical(len(seen), {-1 - i: parts for i, parts in enumerate(children)})

    @classmethod
    def _canonical(cls, leaves: int, children: dict[int, tuple[int, ...]]) -> "Tree":
        """children: id to children's ids, children of a node listed before it; leaves are their own ids."""
        least = {leaf: leaf for leaf in range(leaves)}
        size = dict.fromkeys(range(leaves), 1)
        for node, parts in children.items():
            least[node] = min(least[part] for part in parts)
            size[node] = sum(size[part] for part in parts)
        order = sorted(children, key=lambda node: (size[node], least[node]))
        number = {leaf: leaf for leaf in range(leaves)} | {node: leaves + place for place, node in enumerate(order)}
        return cls(
            leaves, tuple(tuple(number[p] for p in sorted(children[node], key=least.__getitem__)) for node in order)
        )

    @cached_property
    def name(self) -> str:
        """Eight hexadecimal digits that name the tree."""
        return hashlib.sha256(repr((self.leaves, self.nodes)).encode()).hexdigest()[:8]

    @cached_property
    def sizes(self) -> np.ndarray:
        """Leaves under each id, leaves first."""
        found = np.ones(self.leaves + len(self.nodes), dtype=np.int64)
        for place, parts in enumerate(self.nodes):
            found[self.leaves + place] = found[list(parts)].sum()
        return found

    @cached_property
    def depths(self) -> np.ndarray:
        """Additions between each id and the root."""
        found = np.zeros(self.leaves + len(self.nodes), dtype=np.int64)
        for place in reversed(range(len(self.nodes))):
            found[list(self.nodes[place])] = found[self.leaves + place] + 1
        return found

    @property
    def depth(self) -> int:
        """The longest run of dependent additions."""
        return int(self.depths.max())

    @property
    def ways(self) -> dict[int, int]:
        """How many nodes have how many operands."""
        counts = np.unique([len(parts) for parts in self.nodes], return_counts=True)
        return dict(zip(*(values.tolist() for values in counts)))

    def joins(self, leaf: int = 0) -> np.ndarray:
        """int64 [leaves]: size of the smallest subtree that holds both this leaf and each other; 1 for itself."""
        parents = np.full(self.leaves + len(self.nodes), -1, dtype=np.int64)
        for place, parts in enumerate(self.nodes):
            parents[list(parts)] = self.leaves + place
        on_path, node = set(), leaf
        while node >= 0:
            on_path.add(node)
            node = parents[node]
        meets = np.full(len(parents), -1, dtype=np.int64)
        for node in reversed(range(len(parents))):
            meets[node] = node if node in on_path else meets[parents[node]]
        return self.sizes[meets[: self.leaves]]

    def evaluate(self, terms: torch.Tensor, add: Callable = torch.add) -> torch.Tensor:
        """The sum of terms [..., leaves] in this order, two operands at a time in the order of a node's children.

        For trees of two-operand nodes that is the kernel's own arithmetic; a tensor core's wide nodes round
        differently.
        """
        values = list(terms.unbind(-1))
        for parts in self.nodes:
            total = values[parts[0]]
            for part in parts[1:]:
                total = add(total, values[part])
            values.append(total)
        return values[-1]

    def __str__(self) -> str:
        """Nested brackets for up to 16 leaves, a summary above."""
        if self.leaves <= 16:
            words = [str(leaf) for leaf in range(self.leaves)]
            for parts in self.nodes:
                words.append("(" + "+".join(words[part] for part in parts) + ")")
            return words[-1]
        ways = ", ".join(f"{count} of {way}" for way, count in self.ways.items())
        return f"tree {self.name}: {self.leaves} leaves, depth {self.depth}, operands of nodes: {ways}"

    def drawing(self, width: int = 64) -> str:
        """The tree as text, a line a leaf, bars where subtrees close; leaves in the order of the additions' tree."""
        order = self.leaf_order()
        top = max(self.depth, 1)
        lines = []
        for leaf in order:
            depth = int(self.depths[leaf])
            lines.append(f"{leaf:>5} " + "─" * max(1, round((top - depth + 1) / top * width)) + f" {depth}")
        return "\n".join(lines)

    def leaf_order(self) -> list[int]:
        """Leaves from left to right, children in canonical order."""
        found, stack = [], [self.leaves + len(self.nodes) - 1 if self.nodes else 0]
        while stack:
            node = stack.pop()
            if node < self.leaves:
                found.append(node)
            else:
                stack += reversed(self.nodes[node - self.leaves])
        return found


# ---------------------------------------------------------------- trees known by construction


def _fold(parts: Iterable[Nested]) -> Nested:
    total = None
    for part in parts:
        total = part if total is None else (total, part)
    return total


def sequential(n: int) -> Tree:
    """((0 + 1) + 2) + ..."""
    return Tree.of(_fold(range(n)))


def pairwise(n: int) -> Tree:
    """Neighbours added, then neighbours of those, an odd one out carried along."""
    parts: list[Nested] = list(range(n))
    while len(parts) > 1:
        parts = [tuple(parts[i : i + 2]) for i in range(0, len(parts), 2)]
    return Tree.of(parts[0])


def lanes(n: int, count: int) -> Tree:
    """``count`` running sums, term i going to sum i modulo count, added left to right at the end."""
    return Tree.of(_fold(_fold(range(lane, n, count)) for lane in range(min(count, n))))


def segmented(n: int, segment: int, way: int = 1) -> Tree:
    """Segments of ``segment`` terms, each summed from zero ``way`` products at a time, folded left to right.

    way 1 is plain sequential addition; way 16 is a tensor core that adds 16 products and the accumulator at once.
    """

    def one(start: int) -> Nested:
        stop = min(start + segment, n)
        total: Nested | None = None
        for k in range(start, stop, way):
            group = tuple(range(k, min(k + way, stop)))
            total = group if total is None else (total, *group)
        return total

    return Tree.of(_fold(one(start) for start in range(0, n, segment)))


# ---------------------------------------------------------------- revealing


@dataclass(frozen=True)
class Units:
    """The probes' values in one dtype: big absorbs every sum of units; capacity: the largest count that the output
    holds exactly."""

    big: float
    unit: float
    capacity: int


def units_for(inputs: torch.dtype, output: torch.dtype | None = None) -> Units:
    """Values for operands of one dtype whose sum is float32 or wider, and comes out in ``output``.

    Raises BadInput for dtypes too narrow to hold the two values.
    """
    output = output or inputs
    if inputs not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise BadInput(
            f"operands of {inputs} cannot hold a probe's values: give float64, float32, bfloat16 or float16."
        )
    digits = round(-np.log2(torch.finfo(output).eps)) + 1
    if inputs == torch.float16:
        return Units(2.0**15, 2.0**-24, 1 << min(digits, 11) if output == torch.float16 else 1 << 14)
    return Units(2.0**110, 1.0, 1 << min(digits, 30))


def reveal(sums: Callable[[torch.Tensor], torch.Tensor], n: int, units: Units) -> Tree:
    """The tree of an n-term sum. sums: float64 probes [P, n] of 0, unit and plus or minus big, to the P sums [P].

    Adaptive: a sequential or balanced sum takes some n log n probes, n^2 / 2 at worst. Raises BadInput where the counts
    fit no tree: an order that changes between calls or places, or a big that does not absorb. A compensated sum
    shows the order of its terms, not its corrections: hold `Tree.evaluate` against the kernel's bits to tell.
    """
    if n < 1:
        raise BadInput(f"{n} terms have no order of additions: give 1 or more.")
    children: dict[int, tuple[int, ...]] = {}

    def joins(i: int, others: Sequence[int]) -> np.ndarray:
        """Leaves of the smallest subtree that holds i and each of the others."""
        outside = np.zeros(len(others), dtype=np.int64)
        for start in range(0, n, units.capacity):  # count so many leaves at a time that the output holds the count
            probes = torch.zeros(len(others), n, dtype=torch.float64)
            probes[:, start : start + units.capacity] = units.unit
            probes[:, i] = units.big
            probes[torch.arange(len(others)), torch.as_tensor(others)] = -units.big
            counts = sums(probes).double().cpu() / units.unit
            if not torch.equal(counts, counts.round()) or (counts < 0).any() or (counts > n - 2).any():
                bad = counts[(counts != counts.round()) | (counts < 0) | (counts > n - 2)][0].item()
                raise BadInput(
                    f"a probe counted {bad:g} leaves of {n}: this is no fixed tree of additions, "
                    "or big does not absorb."
                )
            outside += counts.long().numpy()
        return n - outside

    def subtree(leaves: list[int]) -> int:
        """Node that holds exactly these leaves; -1, -2, ... for internal ones."""
        first, rest = leaves[0], np.asarray(leaves[1:])
        node, held = first, 1
        if len(rest):
            sizes = joins(first, rest)
            for size in np.unique(sizes):
                group = rest[sizes == size].tolist()
                parts = [node, *split(group, int(size))]
                held += len(group)
                if held != size:
                    raise BadInput(
                        f"probes found a subtree of {size} leaves where {held} are known: "
                        "the order of additions is not one fixed tree."
                    )
                children[-1 - len(children)] = tuple(parts)
                node = -len(children)
        return node

    def split(group: list[int], size: int) -> list[int]:
        """The children that a group joins a node of ``size`` leaves as: one, or several where the node is wide."""
        found = []
        while group:
            if len(group) == 1:
                return [*found, group[0]]
            near = joins(group[0], group[1:]) < size
            mine = [group[0], *np.asarray(group[1:])[near].tolist()]
            found.append(subtree(mine))
            group = np.asarray(group[1:])[~near].tolist()
        return found

    subtree(list(range(n)))
    tree = Tree._canonical(n, children)
    if n > 1 and tree.sizes[-1] != n:
        raise BadInput(
            f"the probes give a tree of {tree.sizes[-1]} leaves for {n} terms: "
            "the order of additions is not one fixed tree."
        )
    # Pairs that the tree was not built from, each asked in two calls: what is no fixed tree contradicts itself here.
    rng = np.random.default_rng(n)
    for i in rng.integers(0, n, 2 * min(n, 8)).tolist() if n > 2 else []:
        others = [j for j in rng.integers(0, n, 16).tolist() if j != i]
        if others and not np.array_equal(joins(i, others), tree.joins(i)[others]):
            raise BadInput(
                f"term {i} meets others elsewhere than the tree says: the order of additions is not one fixed tree."
            )
    return tree


def in_batches(run: Callable[[torch.Tensor], torch.Tensor], width: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Probes in calls of exactly ``width``, the last filled up with zeros: the shape of a call never changes."""

    def sums(probes: torch.Tensor) -> torch.Tensor:
        found = []
        for start in range(0, len(probes), width):
            some = probes[start : start + width]
            filled = torch.cat([some, some.new_zeros(width - len(some), some.shape[1])])
            found.append(run(filled)[: len(some)])
        return torch.cat(found)

    return sums


def reduction_tree(
    operation: Callable[[torch.Tensor], torch.Tensor], rows: int, n: int, dtype=torch.float32, device="cpu"
) -> Tree:
    """The tree by which ``operation`` sums each row of [rows, n] to [rows]: a probe a row, every call of that shape."""
    run = lambda probes: operation(probes.to(dtype).to(device))  # noqa: E731
    return reveal(in_batches(run, rows), n, units_for(dtype))


def matmul_tree(
    operation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    M: int,
    N: int,
    K: int,
    dtype=torch.float32,
    device="cpu",
    row: int = 0,
    probe: str = "columns",
) -> Tree:
    """The tree by which y = x W^T adds its K products, at exactly this M, N and K.

    operation: (x [M, K], weight [N, K]) to y [M, N]. probe: "columns" watches one row, a probe a column of y, which is
    right where all columns are summed alike; "rows" watches column 0, a probe a row.
    """
    if probe not in ("columns", "rows"):
        raise BadInput(f"probe {probe!r} is unknown: give columns or rows.")
    if not 0 <= row < M:
        raise BadInput(f"row {row} is not in a batch of {M}: give 0 to {M - 1}.")
    ones = lambda *shape: torch.ones(*shape, dtype=dtype, device=device)  # noqa: E731

    def run(probes: torch.Tensor) -> torch.Tensor:
        given = probes.to(dtype).to(device)
        if probe == "columns":
            return operation(ones(M, K), given)[row]
        return operation(given, ones(N, K))[:, 0]

    return reveal(in_batches(run, N if probe == "columns" else M), K, units_for(dtype))


def folded_leaves(tree: Tree, block: int) -> Tree | None:
    """The tree over blocks of ``block`` neighbouring leaves, where each block is a subtree of its own; None where not.

    Two kernels that add alike inside a block and differ between blocks differ here, on a size one can draw.
    """
    count = -(-tree.leaves // block)
    held = [set(range(b * block, min((b + 1) * block, tree.leaves))) for b in range(count)]
    wanted = {frozenset(leaves): b for b, leaves in enumerate(held)}
    contents: list[frozenset] = [frozenset([leaf]) for leaf in range(tree.leaves)]
    number: dict[int, int] = {}
    for place, parts in enumerate(tree.nodes):
        contents.append(frozenset().union(*(contents[part] for part in parts)))
    for node, leaves in enumerate(contents):
        if leaves in wanted:
            number[node] = wanted[leaves]
    if len(number) != count:
        return None
    children = {}
    for place, parts in enumerate(tree.nodes):
        node = tree.leaves + place
        if len(contents[node]) > block and node not in number:
            children[-1 - len(children)] = (node, parts)
    ids = dict(number) | {node: name for name, (node, _) in children.items()}
    if any(part not in ids for _, parts in children.values() for part in parts):
        return None
    return Tree._canonical(count, {name: tuple(ids[p] for p in parts) for name, (_, parts) in children.items()})
