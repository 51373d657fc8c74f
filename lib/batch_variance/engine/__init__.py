"""A continuous-batching engine small enough to read in one sitting, its kernels injected and every step traced."""

from .checkpoint import DEFAULT_MODEL, ChatTokenizer, hf_folder
from .client import Load, Run, serve
from .engine import Engine, EngineConfig, Request, Step
from .graphs import DecodeGraphs
from .mechanisms import MECHANISMS, Mechanisms, Settings, build
from .model import ExpertSplit, MatmulRecord, Model, Weights, load_weights

__all__ = [
    "ChatTokenizer", "DEFAULT_MODEL", "DecodeGraphs", "Engine", "EngineConfig", "ExpertSplit", "Load", "MECHANISMS",
    "MatmulRecord", "Mechanisms", "Model", "Request", "Run", "Settings", "Step", "Weights", "build", "hf_folder", "load_weights", "serve",
]
