"""The NVFP4 matmul: what is rounded where, which kernel runs for how many rows, and the kernels."""

from .arithmetic import GEMM, GEMV, Arithmetic
from .policy import POLICY_NAMES, Policy, Rule, policy

__all__ = ["Arithmetic", "GEMM", "GEMV", "POLICY_NAMES", "Policy", "Rule", "policy"]
