"""Models by name: those of the ETC paper, and published ones.

The paper names its models by parameters and gives layers and hidden size of one alone (Table II: hidden 3072, 36
layers, called GPT3-32B though these are about 4.2 B parameters; see ``docs/fidelity.md``). The others are sized so
that the name is true: 2.7b and 6.7b as in the GPT-3 paper (Table 2.1: 32 layers of 2560 and of 4096), 64b as 80
layers of 8192 with 64 heads. ``gpt3-32b`` has 32 heads, of 96, so that TP up to 32 divides them. All have GPT-2's
vocabulary, 2048 learned positions and a tied embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from ..values import Infeasible
from .model import Experts, LatentAttention, Model


def _llama3(layers: int, hidden: int, heads: int, ffn: int) -> Model:
    return Model(layers=layers, hidden=hidden, heads=heads, kv_heads=8, head_dim=128, ffn=ffn, vocab=128256)


PRESETS: Final[Mapping[str, Model]] = MappingProxyType(
    {
        "gpt3-2.7b": Model.from_dimensions(layers=32, hidden=2560, heads=32),
        "gpt3-6.7b": Model.from_dimensions(layers=32, hidden=4096, heads=32),
        "gpt3-32b": Model.from_dimensions(layers=36, hidden=3072, heads=32),
        "gpt3-64b": Model.from_dimensions(layers=80, hidden=8192, heads=64),
        "llama3-8b": _llama3(32, 4096, 32, 14336),
        "llama3-70b": _llama3(80, 8192, 64, 28672),
        "llama3-405b": _llama3(126, 16384, 128, 53248),
        "mixtral-8x7b": Model(
            layers=32,
            hidden=4096,
            heads=32,
            kv_heads=8,
            head_dim=128,
            ffn=14336,
            vocab=32000,
            experts=Experts(8, 14336),
        ),
        "deepseek-v3": Model(
            layers=61,
            hidden=7168,
            heads=128,
            kv_heads=128,
            head_dim=192,
            ffn=18432,
            vocab=129280,
            experts=Experts(256, 2048, shared_ffn=2048, first_dense=3),
            latent=LatentAttention(kv_lora=512, nope=128, rope=64, v=128, q_lora=1536),
        ),
    }
)
"""Model by name."""


def preset(name: str) -> Model:
    """The model of a name, in any case.

    Raises:
        Infeasible: if there is none of that name.
    """
    model = PRESETS.get(name.lower())
    if model is None:
        raise Infeasible(f"no model is called {name!r}; what to do: use one of {', '.join(PRESETS)}, or a config.json")
    return model
