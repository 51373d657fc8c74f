"""Row-invariant base operations for a CPU: every call has one fixed shape, whatever the batch.

A BLAS or oneDNN picks its kernel by the number of rows. Cut into tiles of TILE rows, the last one padded, the same
call is made for any batch, so a row's bits depend on that row alone. `differing_rows` is the control that proves it,
per operation, shape and thread count.
"""

from typing import Callable

import torch

# 16 rows reach about three quarters of the speed of 32 here and halve the waste when one row decodes alone.
TILE = 16


def by_tiles(operation: Callable[..., torch.Tensor], *rows: torch.Tensor) -> torch.Tensor:
    """Apply ``operation`` to tiles of TILE rows and join the results.

    rows: tensors that share their first dimension R. operation: takes [TILE, ...] tensors, returns [TILE, ...].
    Returns [R, ...]. Rows added as padding are zeros and are dropped.
    """
    count = rows[0].shape[0]
    missing = -count % TILE if count else TILE
    # A full batch would pass its own strides on while a padded one is contiguous, and strides choose kernels too.
    rows = tuple(x.contiguous() for x in rows)
    if missing:
        rows = tuple(torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) for x in rows)
    parts = [operation(*(x[start : start + TILE] for x in rows)) for start in range(0, count + missing, TILE)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[:count]


def differing_rows(
    operation: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, sizes: tuple[int, ...], seed: int = 0
) -> tuple[int, int]:
    """Compare each row computed alone with the same row inside shuffled batches of other rows, bit for bit.

    operation: [M, ...] to [M, ...], row i of the result belonging to row i. rows: [R, ...]. sizes: values of M tried.
    Returns (rows that differed, rows compared).
    """
    alone = torch.cat([operation(rows[i : i + 1]) for i in range(rows.shape[0])])
    generator = torch.Generator().manual_seed(seed)
    differ = compared = 0
    for size in sizes:
        pick = torch.randint(rows.shape[0], (size,), generator=generator).to(rows.device)
        found = operation(rows[pick])
        # Equal values are equal bits but for the sign of zero; all NaNs are one.
        expected = alone[pick]
        same = (found == expected) & (found.signbit() == expected.signbit()) | (found.isnan() & expected.isnan())
        differ += int((~same).flatten(1).any(1).sum())
        compared += size
    return differ, compared
