"""torchtitan's Llama debug model changes its parallel layout while it trains.

All that trains is torchtitan's: model, ``ParallelDims``, ``parallelize_llama`` and ``pipeline_llm``, optimizers,
schedulers, dataloader, and the states that its checkpoint manager knows. ``build`` does what torchtitan's ``Trainer``
does when it is made (without metrics, profiler and validator), and ``train_step`` what its ``train_step`` does; the
Trainer itself has no way to take another ``ParallelDims``, and no pipelines with this torch.

shardshift's are the class ``Job``, and one call in ``main``.
"""

import argparse
import os
from pathlib import Path

import cpu  # noqa: F401  (before anything of torchtitan)
import torch
import torch.distributed as dist
from assets import write
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools import utils

import shardshift as ss

SETTINGS = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "tp": "tensor_parallel_degree",
}


class Progress:
    """What torchtitan's Trainer has in a checkpoint as "train_state"."""

    step, ntokens_seen = 0, 0

    def state_dict(self):
        """Of plain numbers."""
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state):
        """Go on from there."""
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]


class Job(ss.fsdp.Job):
    """What shardshift moves, and beside it what torchtitan makes anew for each layout."""

    def __init__(self, mesh, config, dims, parts, optimizers, extras, loss_fn, pipeline):
        super().__init__(parts, optimizers, extras, mesh=mesh)
        self.config, self.dims, self.loss_fn = config, dims, loss_fn
        self.schedule, self.is_first, self.is_last = pipeline

    def begin(self):
        """Make what looks at the model's values and the dataloader's state when it is made: once they are there."""
        self.batches = iter(self.extras["dataloader"])
        self.checkpointer = self.config.checkpoint.build(
            dataloader=self.extras["dataloader"],
            model_parts=self.model,
            optimizers=self.optimizer,
            lr_schedulers=self.extras["lr_scheduler"],
            states={"train_state": self.extras["train_state"]},
            sd_adapter=None,
            base_folder=self.config.dump_folder,
        )


def configure(mesh):
    """The config ``llama3_debugmodel``, small enough for CPU. Made anew for each mesh: building writes into it."""
    config = llama3_debugmodel()
    for layer in config.model_spec.model.layers:
        # FlexAttention has no backward on CPU. torchtitan has no option for SDPA; its own tests swap it like this.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.hf_assets_path = str(args.folder / "assets")
    config.dataloader.dataset_path = str(args.folder / "assets" / "text")
    config.dump_folder = str(args.folder)
    config.training.seq_len, config.training.local_batch_size = 128, 4
    config.training.mixed_precision_param = "float32"
    config.training.steps = args.steps
    for axis, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True):
        setattr(config.parallelism, SETTINGS[axis], size)
    config.parallelism.spmd_backend = "partial_dtensor"  # the default, spmd_types, wants a later torch than 2.13
    config.parallelism.pipeline_parallel_schedule = "1F1B"
    config.activation_checkpoint = None
    config.debug.seed = 7
    config.checkpoint.enable, config.checkpoint.last_save_model_only = True, False
    return config


def build(mesh):
    """A job on a mesh of shardshift's, whose parameters have no values yet.

    torchtitan's own meshes cannot be given to it: it makes them of all ranks of the default process group, in the order
    pp, dp_replicate, dp_shard, tp. So only the sizes are taken from the mesh, whose axes stand in this order, too.
    """
    config, device = configure(mesh), torch.device(utils.device_type)
    spec = config.model_spec
    dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
    dims.build_mesh()
    dist_utils.set_spmd_backend(config.parallelism.spmd_backend)
    spec.model.update_from_config(config=config)
    with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
        model = spec.model.build()
    loss_fn = config.loss.build(compile_config=config.compile)
    how = {
        "parallel_dims": dims,
        "training": config.training,
        "parallelism": config.parallelism,
        "compile_config": config.compile,
        "ac_config": config.activation_checkpoint,
        "dump_folder": config.dump_folder,
    }
    schedule, is_first, is_last = None, True, True
    if dims.pp_enabled:
        schedule, parts, is_first, is_last = spec.pipelining_fn(
            model, **how, device=device, model_config=spec.model, parallelize_fn=spec.parallelize_fn, loss_fn=loss_fn
        )
    else:
        parts = [spec.parallelize_fn(model, **how)]
    for part in parts:
        part.train()
        for module in part.modules():
            if isinstance(module, FSDPModule) and device.type == "cpu":
                # torchtitan asks FSDP to divide by 1, which FSDP does in the reduction; gloo has none that divides.
                module.set_force_sum_reduction_for_comms(True)
    if isinstance(loss_fn, ChunkedLossWrapper) and is_last:
        loss_fn.set_lm_head(parts[-1].lm_head)
        parts[-1]._skip_lm_head = True
    optimizers = config.optimizer.build(model_parts=parts)
    schedulers = config.lr_scheduler.build(optimizers=optimizers, training_steps=config.training.steps)
    batch = dims.get_mesh("batch")
    of_a_microbatch = config.parallelism.pipeline_parallel_microbatch_size
    dataloader = config.dataloader.build(
        dp_world_size=batch.size(),
        dp_rank=batch.get_local_rank(),
        tokenizer=config.tokenizer.build(tokenizer_path=config.hf_assets_path),
        seq_len=config.training.seq_len,
        local_batch_size=of_a_microbatch if dims.pp_enabled else config.training.local_batch_size,
        snapshot_every_n_steps=1,
    )
    # What torchtitan's CheckpointManager saves besides model and optimizer, under the names that it has there.
    extras = {"train_state": Progress(), "dataloader": dataloader, "lr_scheduler": schedulers}
    return Job(mesh, config, dims, parts, optimizers, extras, loss_fn, (schedule, is_first, is_last))


def initialize(job):
    """First values, as torchtitan draws them; after a change they come from the old job."""
    dist_utils.set_determinism(
        job.dims, torch.device(utils.device_type), job.config.debug, distinct_seed_mesh_dims=["pp"]
    )
    for part in job.models:
        part.to_empty(device=utils.device_type)
        with torch.no_grad():
            part.init_weights(buffer_device=None)


def train_step(job):
    """One step; loss and norm of the gradient are those of the whole job."""
    job.optimizer.zero_grad()
    training, dims, progress = job.config.training, job.dims, job.extras["train_state"]
    microbatch = job.config.parallelism.pipeline_parallel_microbatch_size
    batches = [next(job.batches) for _ in range(training.local_batch_size // microbatch if dims.pp_enabled else 1)]
    given = {name: torch.cat([batch[name] for batch, _ in batches]) for name in batches[0][0]}
    tokens, labels = given.pop("input"), torch.cat([each for _, each in batches])
    progress.step, progress.ntokens_seen = progress.step + 1, progress.ntokens_seen + labels.numel()
    valid = dist_utils.dist_sum_tensor((labels != IGNORE_INDEX).sum(), dims.get_mesh("batch"))
    with dist_utils.get_spmd_context(parallel_dims=dims, spmd_typechecking=False)():
        if dims.pp_enabled:
            losses = [] if job.is_last else None
            job.schedule.step(
                *([tokens] if job.is_first else []),
                target=labels if job.is_last else None,
                losses=losses,
                loss_kwargs={"global_valid_tokens": valid},
                return_outputs=False,
                **given,
            )
            loss = torch.stack(losses).sum() if losses else torch.zeros(())
        else:
            loss, _ = job.loss_fn(job.model[0](tokens, **given), labels, valid, positions=given["positions"])
            loss.backward()
    norm = dist_utils.clip_grad_norm_(
        [parameter for part in job.models for parameter in part.parameters()],
        training.max_norm,
        foreach=True,
        pp_mesh=dims.get_optional_mesh("pp"),
        ep_enabled=dims.ep_enabled,
    )
    job.optimizer.step()
    job.extras["lr_scheduler"].step()
    loss = dist_utils.dist_sum_tensor(loss.detach(), dims.get_optional_mesh("loss"))
    if dims.pp_enabled:
        loss = dist_utils.dist_sum_tensor(loss, dims.get_mesh("pp"))
    return float(loss), float(norm)


def sizes(text):
    """``dp_shard=2,tp=2`` as a dict."""
    return {name: int(size) for name, _, size in (part.partition("=") for part in text.split(","))}


def main():
    """Train, and change the layout on the way."""
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan has it
    if utils.device_type != "cpu":
        utils.device_module.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if utils.device_type == "cpu" else "nccl")
    if dist.get_rank() == 0:
        write(args.folder / "assets")
    dist.barrier()
    job = build(init_device_mesh(utils.device_type, tuple(args.mesh.values()), mesh_dim_names=tuple(args.mesh)))
    initialize(job)
    job.begin()
    for step in range(args.steps):
        if step == args.at:
            job.checkpointer.close()
            job = ss.migrate(job, build, ss.Mesh(args.to))
            job.begin()
        tell(step, *train_step(job), job)
    job.checkpointer.save(args.steps, last_step=True)
    job.checkpointer.close()


def tell(step, loss, norm, job):
    """One line for each step."""
    if dist.get_rank() == 0:
        print(f"step {step + 1}: loss {loss!r}, norm {norm!r}, {job.mesh}", flush=True)


def options():
    """Of this program."""
    parser = argparse.ArgumentParser(description="torchtitan's Llama debug model changes its layout while it trains")
    parser.add_argument("folder", type=lambda text: Path(text).resolve(), help="for a tokenizer, a text, checkpoints")
    parser.add_argument("--mesh", type=sizes, default="dp_shard=2,tp=2")
    parser.add_argument("--to", type=sizes, default="pp=2,dp_shard=2")
    parser.add_argument("--at", type=int, default=3, help="change before this step, counted from 0")
    parser.add_argument("--steps", type=int, default=6)
    return parser


if __name__ == "__main__":
    args = options().parse_args()
    main()
    dist.destroy_process_group()
