"""The matmuls of a mixture of experts: every (token, expert) pair through its expert's weight, and the sum over
experts."""
