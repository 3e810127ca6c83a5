"""Changes of layout that several benchmarks look at: those of the paper, and of published models."""

from __future__ import annotations

from typing import Final

TABLE_2: Final = (
    ("PP8TP1", "PP16TP1", 32),
    ("PP4TP2", "PP4TP4", 36),
    ("PP4TP4", "PP4TP2", 36),
    ("PP4TP2", "PP6TP4", 36),
    ("PP6TP4", "PP4TP2", 36),
    ("PP4TP2DP3", "PP4TP8DP1", 36),
)
FIG_8: Final = (("PP2TP4", "PP2TP8"), ("PP2TP4", "PP4TP4"), ("PP2TP4DP1", "PP2TP4DP2"))
FIG_9: Final = (
    *(("PP16TP1", "PP8TP1", layers, 2048) for layers in (32, 64, 128)),
    *(("PP8TP2", "PP8TP4", 64, hidden) for hidden in (2048, 3072, 4096)),
    ("PP4TP2", "PP6TP4", 48, 3072),
)
FIG_11: Final = (
    ("PP4TP2", "PP4TP4"),
    ("PP4TP2", "PP4TP8"),
    ("PP4TP2", "PP6TP4"),
    ("PP8TP2", "PP8TP4"),
    ("PP8TP2", "PP8TP8"),
)
PUBLISHED: Final = (
    ("llama3-8b", "PP2TP4DP2", "PP2TP4DP4"),
    ("llama3-8b", "PP1TP8DP4", "PP2TP4DP2"),
    ("llama3-70b", "PP4TP8DP2", "PP8TP8DP2"),
    ("llama3-70b", "PP8TP8DP2", "PP4TP8DP3"),
    ("llama3-405b", "PP16TP8DP8", "PP16TP8DP7"),
    ("llama3-405b", "PP16TP8DP4", "PP18TP8DP4"),
    ("mixtral-8x7b", "PP4TP2DP4EP4", "PP4TP2DP8EP8"),
    ("mixtral-8x7b", "PP4TP2DP8EP8", "PP8TP2DP4EP4"),
    ("deepseek-v3", "PP16TP1DP64EP64", "PP16TP1DP32EP32"),
    ("deepseek-v3", "PP8TP1DP64EP64", "PP16TP1DP64EP64"),
)
