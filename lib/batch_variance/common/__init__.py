"""What every room shares: errors a user can read, devices, data files, provenance, and counted evidence."""

from .data import data_path, write_atomically
from .devices import resolve_device
from .errors import BadInput
from .evidence import TIERS, Rate, exact_interval
from .provenance import environment

__all__ = ["BadInput", "Rate", "TIERS", "data_path", "environment", "exact_interval", "resolve_device", "write_atomically"]
