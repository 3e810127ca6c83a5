"""Models: descriptions of GPT-family models, and the rules that turn one and a configuration into a layout."""

from .describe import Catalogue, describe
from .model import Experts, LatentAttention, Model
from .parameters import parameter_count
from .presets import PRESETS, preset

__all__ = [
    "PRESETS",
    "Catalogue",
    "Experts",
    "LatentAttention",
    "Model",
    "describe",
    "parameter_count",
    "preset",
]
