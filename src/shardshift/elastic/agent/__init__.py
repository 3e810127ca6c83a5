"""The agent of a node: what ``shardshift run`` is. It starts workers, watches them, and never restarts them."""
