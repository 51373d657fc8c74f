"""Which arithmetic runs for how many rows: the dispatch as a table."""

from dataclasses import dataclass

from ...common import BadInput
from .arithmetic import GEMM, GEMV, Arithmetic

GLLM_THRESHOLD = 32


@dataclass(frozen=True)
class Rule:
    """Use ``arithmetic`` for up to ``max_rows`` rows; None means any number."""

    max_rows: int | None
    arithmetic: Arithmetic


@dataclass(frozen=True)
class Policy:
    """Rules in order; the first that admits the row count decides."""

    name: str
    rules: tuple[Rule, ...]

    def choose(self, rows: int) -> Arithmetic:
        """Arithmetic for a matmul of ``rows`` rows."""
        return next(rule.arithmetic for rule in self.rules if rule.max_rows is None or rows <= rule.max_rows)

    @property
    def threshold(self) -> int | None:
        """The row count above which the arithmetic changes, None where it never does."""
        return self.rules[0].max_rows


_ROUNDED = GEMV.but("gemv-rounded", activations="bfloat16")
_EXACT_WEIGHTS = GEMM.but("gemm-exact-weights", tensor_scale="after")

# Below the threshold, above it. None: no threshold.
_PATHS: dict[str, tuple[Arithmetic, Arithmetic | None]] = {
    "default": (GEMV, GEMM),
    "force-gemv": (GEMV, None),
    "force-gemm": (GEMM, None),
    "round-activations": (_ROUNDED, GEMM),
    "round-activations-exact-weights": (_ROUNDED, _EXACT_WEIGHTS),
}
POLICY_NAMES = tuple(_PATHS)


def policy(name: str, threshold: int = GLLM_THRESHOLD) -> Policy:
    """A named policy.

    default: gllm's dispatch. force-gemv, force-gemm: one path for any row count. round-activations: as default, with
    the GEMV's activations rounded to bfloat16. round-activations-exact-weights: moreover the GEMM applies the tensor
    scale to its sum, so that its bfloat16 weights are exact and only the order of additions still differs.
    Raises BadInput for another name or a negative threshold.
    """
    if name not in _PATHS:
        raise BadInput(f"policy {name!r} is unknown: give one of {', '.join(POLICY_NAMES)}.")
    if threshold < 0:
        raise BadInput(f"threshold {threshold} is negative: give the largest row count that still takes the GEMV, 0 or more.")
    below, above = _PATHS[name]
    rules = (Rule(None, below),) if above is None else (Rule(threshold, below), Rule(None, above))
    return Policy(name, rules)
