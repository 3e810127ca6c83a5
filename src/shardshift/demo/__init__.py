"""The main job: a real megatron-core training that changes its layout live, and what it is held against."""

# First of all imports, so that megatron finds the CPU stand-ins in place wherever this package imports it.
from .. import adapters as adapters
from ..adapters import megatron as megatron
