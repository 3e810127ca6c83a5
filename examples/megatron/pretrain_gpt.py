"""A GPT pretrained with megatron-core, by a plain training loop of one's own."""

import os

import torch
from common import ByteTokenizer, PretrainingSampler, arguments, fingerprint
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

import shardshift as ss

SEED = 1234


def build_model(layout):
    """The model chunks of this rank."""
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    vpp = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_moe_experts=args.num_experts,
        moe_router_load_balancing_type="none",
        hidden_dropout=args.dropout,
        attention_dropout=args.dropout,
        add_bias_linear=False,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
        bf16=args.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=not torch.cuda.is_available(),
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        batch_p2p_comm=False,
        deallocate_pipeline_outputs=True,
    )
    chunks = []
    for stage in range(vpp or 1):
        where = {"ignore_virtual": False, "vp_stage": stage if vpp else None}
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(num_experts=args.num_experts),
            args.padded_vocab_size,
            args.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            vp_stage=where["vp_stage"],
        )
        chunks.append(model.cuda(torch.cuda.current_device()))
    return chunks


def wrap(chunks, layout):
    """Data parallelism, optimizer and learning rate schedule."""
    config = chunks[0].config
    if args.bf16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=args.use_distributed_optimizer,
        overlap_grad_reduce=args.overlap,
        overlap_param_gather=args.overlap and args.use_distributed_optimizer,
    )
    model = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    settings = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        min_lr=args.lr / 10,
        weight_decay=0.01,
        clip_grad=1.0,
        bf16=args.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=args.use_distributed_optimizer,
        overlap_param_gather=ddp_config.overlap_param_gather,
    )
    optimizer = get_megatron_optimizer(settings, model, use_gloo_process_groups=torch.cuda.is_available())
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.lr / 10,
        lr_warmup_steps=2 * args.gbs,
        lr_decay_steps=args.train_iters * args.gbs,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if args.overlap:
        config.no_sync_func = [chunk.no_sync for chunk in model] if len(model) > 1 else model[0].no_sync
    return model, optimizer, scheduler


def data(layout, position):
    """This rank's micro-batches from a sample on: an iterator for each model chunk."""

    def needed():
        return parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()

    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=args.seq_length,
        blend=get_blend_from_list(args.data_path),
        split="1,0,0",
        path_to_cache=args.data_cache_path,
        tokenizer=ByteTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    samples = args.train_iters * args.gbs
    dataset, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], needed, config).build()
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    if dataset is None:
        return [None] * chunks
    sampler = PretrainingSampler(
        samples,
        position.consumed_samples,
        args.mbs,
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    workers = {"num_workers": args.num_workers, "persistent_workers": args.num_workers > 0}
    pin = torch.cuda.is_available()
    return [
        iter(torch.utils.data.DataLoader(dataset, batch_sampler=sampler, pin_memory=pin, **workers))
        for _ in range(chunks)
    ]


def forward(data, model):
    """One micro-batch through one model chunk."""
    if data is None:  # a stage in the middle: it has its input from the stage before
        return model(None, None, None), None
    batch = next(data)
    batch = {name: tensor.cuda(non_blocking=True) for name, tensor in batch.items()}
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])

    def mean(losses):
        loss = (losses.float() * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
        return loss, {"loss": loss.detach().clone(), "samples": fingerprint(batch)}

    return output, mean


def forward_backward(job):
    """Gradients of one global batch; per micro-batch the loss, on the last stage."""
    for chunk in job.model:
        chunk.zero_grad_buffer()
    job.optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=job.data,
        model=job.model,
        num_microbatches=args.gbs // (args.mbs * parallel_state.get_data_parallel_world_size()),
        seq_length=args.seq_length,
        micro_batch_size=args.mbs,
        forward_only=False,
    )
    return losses


def optimizer_step(job):
    """Step the optimizer and the learning rate."""
    job.optimizer.step()
    job.scheduler.step(increment=args.gbs)


def log(job, losses):
    """Print the mean loss of the global batch, and which samples it had."""
    if not losses or parallel_state.get_tensor_model_parallel_rank():
        return
    loss = torch.stack([each["loss"] for each in losses]).mean()
    samples = torch.stack([each["samples"] for each in losses]).sum()
    group = parallel_state.get_data_parallel_group()
    torch.distributed.all_reduce(loss, group=group)
    torch.distributed.all_reduce(samples, group=group)
    if parallel_state.get_data_parallel_rank() == 0:
        loss /= parallel_state.get_data_parallel_world_size()
        rate = job.optimizer.param_groups[0]["lr"]
        print(f"step {job.iteration}: loss {loss:.9f}, lr {rate:.3e}, samples {int(samples):x}", flush=True)


def main():
    """Train."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    adapter = ss.megatron.Adapter(build_model, wrap, data, global_batch_size=args.gbs, micro_batch_size=args.mbs)
    with ss.session(adapter, args.layout.text, resizes=args.resize) as session:
        job = session.start()
        while job and job.iteration < args.train_iters:
            if session.resize_due(job):
                job = session.resize(job) or session.start()
                continue
            losses = forward_backward(job)
            with session.commit_step(job):
                optimizer_step(job)
            log(job, losses)


if __name__ == "__main__":
    parser = arguments()
    parser.add_argument("--resize", type=ss.Script.parse)
    args = parser.parse_args()
    main()
