"""Why a language model's greedy output depends on what else is in the batch, and how to end it.

Rooms, lowest first; a room imports only from rooms before it:
common, numerics, schedules, kernels, engine, hooks, serving, studies, reporting.
"""

__version__ = "0.1.0"
