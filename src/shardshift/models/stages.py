"""Which pipeline stage and model chunk has which layer.

Chunk c of stage s is virtual stage v = c * pp + s, and virtual stages have consecutive layers, as in Megatron-core
(``transformer_block.py``, ``get_num_layers_to_build``; ``transformer_layer.py``, ``get_transformer_layer_offset``).
Megatron refuses layers that virtual stages do not divide unless told a split; here the first virtual stages then have
one more. More virtual stages than layers are legal: the last ones are empty.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..values import Infeasible, ParallelConfig

Ints = NDArray[np.int64]


def layers_of(layers: int, config: ParallelConfig, split: Sequence[int] | None = None) -> tuple[int, ...]:
    """Layers per virtual stage.

    Args:
        layers: of the model.
        config: gives pp and vpp.
        split: layers per virtual stage; None: as even as can be, the first ones having more.

    Raises:
        Infeasible: if the split has not pp * vpp parts, a negative one, or another sum.
    """
    count = config.pp * config.vpp
    if split is None:
        return tuple(layers // count + (stage < layers % count) for stage in range(count))
    if len(split) != count:
        raise Infeasible(
            f"{config}: the split {tuple(split)} has {len(split)} parts for {count} virtual stages (pp {config.pp} x "
            f"vpp {config.vpp}); what to do: give the layers of each virtual stage, 0 where it has none"
        )
    if min(split) < 0 or sum(split) != layers:
        raise Infeasible(
            f"{config}: the split {tuple(split)} has {sum(split)} layers, the model {layers}; what to do: give numbers "
            "of 0 or more that add up to the layers of the model"
        )
    return tuple(split)


def virtual_stage_of(layers: int, config: ParallelConfig, split: Sequence[int] | None = None) -> Ints:
    """The virtual stage of each layer, shape (layers,)."""
    return np.repeat(np.arange(config.pp * config.vpp), layers_of(layers, config, split))
