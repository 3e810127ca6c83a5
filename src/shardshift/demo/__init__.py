"""The main job: a real megatron-core training that changes its layout live, and what it is held against."""
