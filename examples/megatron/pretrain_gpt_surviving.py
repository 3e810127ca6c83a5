"""pretrain_gpt.py, which goes on without the ranks that it loses."""

import os

import pretrain_gpt as gpt
import torch
from common import arguments

import shardshift as ss


def main(args):
    """Train."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    adapter = ss.megatron.Adapter(
        gpt.build_model, gpt.wrap, gpt.data, global_batch_size=args.gbs, micro_batch_size=args.mbs
    )
    copies = int(args.use_distributed_optimizer)  # its state has one holder: each rank keeps another's, too
    with ss.session(adapter, args.layout.text, resizes=args.resize, survive=True, shard_copies=copies) as session:
        job = session.start()
        while job and job.iteration < args.train_iters:
            try:
                if session.resize_due(job):
                    job = session.resize(job) or session.start()
                    continue
                losses = gpt.forward_backward(job)
                with session.commit_step(job):
                    gpt.optimizer_step(job)
                gpt.log(job, losses)
            except (ss.PeerLost, RuntimeError) as lost:
                job = session.recover(job, lost) or session.start()


if __name__ == "__main__":
    parser = arguments()
    parser.add_argument("--resize", type=ss.Script.parse)
    gpt.args = parser.parse_args()
    main(gpt.args)
