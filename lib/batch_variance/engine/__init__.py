"""A continuous-batching engine small enough to read in one sitting, its kernels injected and every step traced."""

from .checkpoint import DEFAULT_MODEL, ChatTokenizer, hf_folder
from .client import Load, Run, serve
from .engine import Engine, EngineConfig, Request, Step
from .model import ExpertSplit, MatmulRecord, Model, Weights, load_weights

__all__ = [
    "ChatTokenizer", "DEFAULT_MODEL", "Engine", "EngineConfig", "ExpertSplit", "Load", "MatmulRecord", "Model", "Request",
    "Run", "Step", "Weights", "hf_folder", "load_weights", "serve",
]
