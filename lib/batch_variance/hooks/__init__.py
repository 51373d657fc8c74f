"""Instruments for other people's engines: a probe at one call site, an audit of a whole model, and adapters by name."""

from .axes import AXES
from .layouts import CannotSlice, Flat, Prefix, Rows
from .log import ProbeLog, read_log
from .probe import CallSiteProbe
from .verdicts import verdicts

__all__ = ["AXES", "CallSiteProbe", "CannotSlice", "Flat", "Prefix", "ProbeLog", "Rows", "read_log", "verdicts"]
