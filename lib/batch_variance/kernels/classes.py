"""Equivalence classes of kernels: which configurations give a row the same bits, at which numbers of rows.

A class is named by the bits themselves, so two kernels are in one class if and only if their results carry one name.
It is measured, on the device at hand, and holds for that device and those versions: results are cached under them. An
autotuner that keeps to one class (`fastest_inside`) is free within it; a configuration outside is refused.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Callable, Iterable, Mapping

import pandas as pd
import torch

from ..common import BadInput
from ..common.data import cache_folder, write_text
from ..common.provenance import gpu_columns

Operation = Callable[[torch.Tensor], torch.Tensor]

# Row counts at which kernels are known to be chosen anew lie at and just beside multiples and powers of a tile.
SIZES = (
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    15,
    16,
    17,
    24,
    31,
    32,
    33,
    47,
    48,
    63,
    64,
    65,
    96,
    127,
    128,
    129,
    192,
    256,
    257,
    512,
    1024,
)
FAR_SIZES = (*SIZES, 2048, 4096, 8192)  # for recorded classes: as far as "any number of rows" was tried


def bit_name(tensor: torch.Tensor) -> str:
    """Eight hexadecimal digits of a hash of the tensor's dtype and bits."""
    raw = tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(str(tensor.dtype).encode() + raw).hexdigest()[:8]


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """bool [R]: rows whose bits agree."""
    a, b = (t.contiguous().view(torch.uint8).flatten(1) for t in (a, b))
    return (a == b).all(1)


def watched_rows(count: int) -> int:
    """Rows whose bits name a class: one alone is too few where only one value in thousands moves."""
    return min(count, 8)


def classify(
    candidates: Mapping[str, Operation],
    rows: torch.Tensor,
    sizes: Iterable[int] = SIZES,
    seek: bool = False,
) -> pd.DataFrame:
    """Run every candidate over the first M of ``rows``, for every M, and name the bits that the watched rows get.

    candidates: name to operation, [M, ...] to [M, ...], row i of the result belonging to row i. rows: [R, ...].
    sizes: values of M, those above R left out. seek: where the name changes between two sizes, halve the gap until
    the row count at which it changes is known. Returns a row a (candidate, m): candidate, m, bit_class, rows_moved
    (rows that changed bits when all rows were shuffled), not_finite, failure (why the candidate did not run, or "").
    The watched rows are the first eight: at M below eight each is run as row 0 of its own batch, M - 1 others beside
    it.
    """
    usable = sorted({m for m in sizes if 1 <= m <= len(rows)})
    if not usable:
        raise BadInput(f"no size of {list(sizes)} fits {len(rows)} rows: give sizes from 1 to that.")
    found = []
    for name, operation in candidates.items():
        seen = {m: _one(operation, rows, m) for m in usable}
        if seek:
            gaps = list(zip(usable, usable[1:]))
            while gaps:
                low, high = gaps.pop()
                if high - low > 1 and seen[low]["bit_class"] != seen[high]["bit_class"]:
                    middle = (low + high) // 2
                    seen[middle] = _one(operation, rows, middle)
                    gaps += [(low, middle), (middle, high)]
        found += [{"candidate": name, "m": m, **seen[m]} for m in sorted(seen)]
    return pd.DataFrame(found)


def watch(operation: Operation, rows: torch.Tensor, m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of the first m rows, and the results of the watched rows, each among m rows."""
    watched = watched_rows(len(rows))
    if m >= watched:
        out = operation(rows[:m])
        return out, out[:watched]
    outs = [operation(rows.roll(-i, 0)[:m]) for i in range(watched)]
    return outs[0], torch.stack([one[0] for one in outs])


def _one(operation: Operation, rows: torch.Tensor, m: int) -> dict:
    try:
        out, mine = watch(operation, rows, m)
        order = torch.randperm(m, generator=torch.Generator().manual_seed(m)).to(rows.device)
        moved = int((~_same_bits(operation(rows[:m][order]), out[order])).sum())
        return {
            "bit_class": bit_name(mine),
            "rows_moved": moved,
            "not_finite": int((~out.isfinite()).sum()),
            "failure": "",
        }
    except Exception as error:  # noqa: BLE001 - a configuration that does not fit the device is a result
        why = (str(error) or repr(error)).splitlines()[0]
        return {"bit_class": "", "rows_moved": 0, "not_finite": 0, "failure": f"{type(error).__name__}: {why}"[:160]}


@dataclass(frozen=True)
class Classes:
    """A classification and what follows from it. frame: as `classify` returns it."""

    frame: pd.DataFrame

    def of(self, candidate: str) -> set[str]:
        """Names of the classes that a candidate falls into over the row counts tried; one if it is invariant."""
        mine = self.frame[(self.frame.candidate == candidate) & (self.frame.failure == "")]
        if mine.empty:
            raise BadInput(f"{candidate!r} was not classified, or never ran: classify it on this device first.")
        return set(mine.bit_class)

    def invariant(self, candidate: str) -> bool:
        """Whether the candidate ran at every size, in one class, and no row moved when the rows were shuffled."""
        mine = self.frame[self.frame.candidate == candidate]
        return bool(
            len(mine) and (mine.failure == "").all() and mine.bit_class.nunique() == 1 and not mine.rows_moved.any()
        )

    def members(self, bit_class: str) -> list[str]:
        """Invariant candidates in that class, in the order tried."""
        names = self.frame.candidate.unique()
        return [name for name in names if self.invariant(name) and self.of(name) == {bit_class}]

    def require(self, candidate: str, bit_class: str) -> None:
        """Raises BadInput where the candidate is not proved to be in the class."""
        if candidate not in self.members(bit_class):
            raise BadInput(
                f"{candidate!r} is outside class {bit_class} ({', '.join(sorted(self.of(candidate)))}): "
                "it would change bits, so the autotuner may not choose it."
            )


def fastest_inside(classes: Classes, bit_class: str, seconds: Mapping[str, float]) -> str:
    """The fastest candidate of a class. seconds: time a candidate. Raises BadInput where the class has none that was
    timed."""
    allowed = [name for name in classes.members(bit_class) if name in seconds]
    if not allowed:
        raise BadInput(f"class {bit_class} has no candidate that was timed: classify and time at least one.")
    return min(allowed, key=seconds.__getitem__)


def cached(operation: str, shape: str, candidates: Mapping[str, Operation], rows: torch.Tensor, **options) -> Classes:
    """`classify`, remembered by operation, shape, candidates, input bits, options, device and versions."""
    place = {k: v for k, v in gpu_columns().items() if k not in ("commit", "date")}
    key = json.dumps(
        [
            operation,
            shape,
            sorted(candidates),
            bit_name(rows),
            sorted(options.items()),
            str(rows.device),
            torch.get_num_threads(),
            place,
        ],
        default=str,
    )
    path = cache_folder() / "classes" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    if path.exists():
        return Classes(pd.DataFrame(json.loads(path.read_text())["rows"]))
    frame = classify(candidates, rows, **options)
    write_text(path, json.dumps({"key": json.loads(key), "rows": frame.to_dict("records")}))
    return Classes(frame)


def widest_class(runs: Iterable[Mapping]) -> str:
    """Name of the class that holds a candidate at the most row counts, and of those the one with the most candidates.

    runs: mappings with m and bit_class, bit_class "" where a candidate did not run or was wrong. "" if none ran.
    """
    held: dict[str, list[int]] = {}
    for run in runs:
        if run["bit_class"]:
            held.setdefault(run["bit_class"], []).append(run["m"])
    return max(held, key=lambda name: (len(set(held[name])), len(held[name])), default="")
