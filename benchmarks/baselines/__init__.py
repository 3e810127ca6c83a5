"""Other ways to change a layout, as real as one machine allows: one small module each, one protocol.

All move the same state between the same layouts (``common.Place``), in phases that are timed apart, and what each has
loaded is held to the codes of its elements. A baseline gets what helps it: memory that has been written to, a warm page
cache, plans and metadata from the run before, as many threads as there is use for.

| module | what it is |
|---|---|
| ``megatron`` | each rank saves, an offline script reshards the files, each rank loads; and EasyCkpt's save |
| ``checkpoint`` | torch.distributed.checkpoint with DTensor state |
| ``megatron_dist`` | megatron-core's ``dist_checkpointing`` |
| ``tenplex`` | state in a memory store per node, differential reads; and all through one node's store |
| ``etc`` | the paper's own plans, carried out by our engine |
| ``resharding`` | megatron-core's ``resharding``: the weights alone |
| ``restart`` | a fresh job under torchrun, which loads a checkpoint |
| ``bare`` | no baseline but the floor: the moved bytes as flat buffers |

``resharding`` and ``restart`` have processes of their own. Both are compared elsewhere too: in ``peer`` weights against
weights, in ``elastic`` with a Megatron job that trains.
"""
