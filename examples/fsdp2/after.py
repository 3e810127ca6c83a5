"""Train a language model with FSDP2 and tensor parallelism, in four layouts one after the other."""

import os

import torch
import torch.distributed as dist
from common import DEVICE, GLOBAL_BATCH, Batches, Transformer, initialize, load, log, options, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

import shardshift as ss

CHANGES = {4: ss.Mesh({"dp": 2, "tp": 2}), 8: ss.Mesh({"dp": 2, "tp": 1}), 12: ss.Mesh({"dp": 4, "tp": 1})}


def build(mesh):
    """Model, optimizer, and what else goes on, on a mesh; parameters have no values yet."""
    with torch.device("meta"):
        model = Transformer()
    dp, tp = mesh["dp"], mesh["tp"]
    for layer in model.layers:
        if tp.size() > 1:
            columns = dict.fromkeys(("wq", "wk", "wv", "w1", "w3"), ColwiseParallel())
            parallelize_module(layer, tp, columns | dict.fromkeys(("wo", "w2"), RowwiseParallel()))
        fully_shard(layer, mesh=dp)
    fully_shard(model, mesh=dp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    data = Batches(dp.get_local_rank(), dp.size())
    return model, optimizer, {"scheduler": scheduler, "data": data}


def train_step(model, optimizer, extras, mesh):
    """One step; the loss is that of the whole batch."""
    batch = next(extras["data"])
    optimizer.zero_grad()
    loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    extras["scheduler"].step()
    mean = loss.detach() / mesh["dp"].size()
    dist.all_reduce(mean, group=mesh.get_group("dp"))
    return mean


def main():
    """Train."""
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    mesh = init_device_mesh(DEVICE, (args.dp, args.tp), mesh_dim_names=("dp", "tp"))
    job = ss.fsdp.Job(*build(mesh), mesh=mesh)
    initialize(job.model)
    if args.load:
        load(args.load, job.model, job.optimizer, job.extras)
    for step in range(job.extras["data"].consumed // GLOBAL_BATCH, args.until):
        to = CHANGES.get(step)
        if to and (job or dist.get_rank() in to.ranks):
            job = ss.migrate(job, build, to)
        if job is None:
            continue  # not in this layout: stands by
        loss = train_step(job.model, job.optimizer, job.extras, job.device_mesh)
        log(step + 1, loss, job.optimizer.param_groups[0]["lr"])
    if args.save:
        save(args.save, job.model, job.optimizer, job.extras)
    dist.destroy_process_group()


if __name__ == "__main__":
    args = options().parse_args()
    main()
