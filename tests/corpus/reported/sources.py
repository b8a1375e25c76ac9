"""Where users report what each program does: title and address of an issue, a pull request or a thread."""

from __future__ import annotations

from typing import NamedTuple


class Source(NamedTuple):
    """A report."""

    title: str
    url: str


GITHUB = "https://github.com"
TORCH = f"{GITHUB}/pytorch/pytorch"

SOURCES = {
    "uneven.rank_0_evaluates": Source(
        "Using torch.distributed.barrier() makes the whole code hang", f"{TORCH}/issues/54059"
    ),
    "uneven.sanity_check": Source(
        "Rank-zero validation can deadlock: Fix distributed training and resume contracts",
        f"{GITHUB}/LibreYOLO/libreyolo/pull/594",
    ),
    "uneven.early_return": Source(
        "Fix DDP synchronization in training callbacks", f"{GITHUB}/talmolab/sleap-nn/pull/437"
    ),
    "uneven.fewer_batches_and_out": Source(
        "How to deal with uneven inputs in DDP with sharded data without hanging",
        f"{GITHUB}/Lightning-AI/pytorch-lightning/issues/20404",
    ),
    "uneven.fewer_batches_and_barrier": Source(
        "DDP Hangs with uneven batches", f"{GITHUB}/microsoft/PyMarlin/issues/80"
    ),
    "uneven.early_stop": Source("Early stopping with ddp bug", f"{GITHUB}/Lightning-AI/pytorch-lightning/issues/379"),
    "uneven.skipped_batch": Source(
        "Keep DFlash DDP ranks in lockstep on no-valid-anchor skips", f"{GITHUB}/NVIDIA-NeMo/Automodel/pull/2468"
    ),
    "uneven.swallowed_exception": Source(
        "Handeling OOM in backward pass using DDP",
        "https://discuss.pytorch.org/t/handeling-oom-in-backward-pass-using-ddp/103916",
    ),
    "uneven.accumulation": Source(
        "Align DDP no_sync with gradient accumulation", f"{GITHUB}/modelscope/FunASR/pull/3472"
    ),
    "uneven.empty_shard": Source(
        "multi-gpu ddp fails if any one rank has all empty validation", f"{GITHUB}/weecology/DeepForest/issues/1407"
    ),
    "uneven.no_sync_once": Source(
        "A very weird bug involving ddp: gradients are synchronised in some backwards only", f"{TORCH}/issues/143647"
    ),
    "uneven.reduced_on_condition": Source(
        "Training is stuck if ranks don't have the same keys in metrics dict",
        f"{GITHUB}/Lightning-AI/pytorch-lightning/issues/7129",
    ),
    "uneven.gather_on_main": Source(
        "self.all_gather in test_epoch_end hangs forever", f"{GITHUB}/Lightning-AI/pytorch-lightning/issues/16541"
    ),
    "arguments.two_models_in_other_order": Source(
        "train_discriminator is drawn by each rank for itself",
        f"{GITHUB}/ZhikangNiu/encodec-pytorch/issues/30",
    ),
    "arguments.thread_of_metrics": Source(
        "Persistent deadlock when calls are made from separate Python threads", f"{TORCH}/issues/175145"
    ),
    "starting.same_rank": Source(
        "Hang at initializing DistributedDataParallel: local ranks are passed as ranks", f"{TORCH}/issues/23074"
    ),
    "starting.larger_world": Source(
        "init_process_group hangs always in all machines: wrongly set world size", f"{TORCH}/issues/52848"
    ),
    "starting.own_ports": Source(
        "How to solve dist.init_process_group from hanging: each process calls find_free_port()",
        f"{TORCH}/issues/53395",
    ),
    "endings.exception_and_upload": Source(
        "WandB hangs at the end of multi-gpu DDP training", f"{GITHUB}/facebookresearch/fairseq/issues/4619"
    ),
    "endings.logged_exit": Source(
        "Do distributed erroring properly: rank 0 quits and the remaining ranks continue",
        f"{GITHUB}/Red-Hat-AI-Innovation-Team/mini_trainer/issues/60",
    ),
    "endings.interrupted": Source("Distributed signal handling", f"{GITHUB}/NVIDIA-NeMo/Automodel/issues/870"),
    "healthy.ends_one_after_another": Source(
        "Only calls destroy_process_group if the trainer exists successfully", f"{GITHUB}/pytorch/torchtitan/pull/1342"
    ),
    "arguments.layer_dropped": Source(
        "layerdrop would cause model training to hang when used with fsdp backend",
        f"{GITHUB}/facebookresearch/fairscale/issues/796",
    ),
    "arguments.norm_left_out": Source(
        "Handle torch AMP auto skip inf/nan steps: some ranks could skip and others try to step",
        f"{GITHUB}/facebookresearch/fairscale/issues/180",
    ),
    "messages.actor_gives_up": Source(
        "Dead lock in distributed inference when ray worker raises an exception",
        f"{GITHUB}/vllm-project/vllm/issues/3455",
    ),
    "standing.lock_across_ranks": Source(
        "Prefer using distributed mode to avoid being blocked by file locks",
        f"{GITHUB}/modelscope/ms-swift/pull/5763",
    ),
    "starting.port_in_use": Source(
        "The server socket has failed to listen on any local network address: address already in use",
        f"{GITHUB}/NVIDIA/Megatron-LM/issues/1371",
    ),
    "starting.second_group": Source(
        "Only honor TORCHELASTIC_USE_AGENT_STORE at the agent's own address", f"{TORCH}/pull/191957"
    ),
    "endings.full_queue": Source(
        "hang on python exit when has iter ref and sampler yields large indices: the queue's thread is joined",
        f"{TORCH}/issues/48666",
    ),
    "endings.interrupted_hang": Source(
        "my get model stuck here, after I interrupt it: Received 2 death signal, shutting down workers",
        f"{GITHUB}/MCG-NJU/RTD-Action/issues/31",
    ),
    "healthy.evaluator_waits": Source(
        "Add a Trainer hook for scheduled asynchronous evaluation", f"{GITHUB}/pytorch/rl/pull/4415"
    ),
    "uneven.unused_parameters": Source(
        "Expected to have finished reduction in the prior iteration before starting a new one", f"{TORCH}/issues/43259"
    ),
    "arguments.all_reduce_sizes": Source(
        "Why different shape of tensor can be all reduced when using nccl as backend?",
        f"{GITHUB}/NVIDIA/nccl/issues/1394",
    ),
    "arguments.all_gather_shapes": Source("distributed.gather shape constraints", f"{TORCH}/issues/103305"),
    "arguments.all_reduce_dtypes": Source(
        "Potential dtype inconsistency in distributed metric reduction", f"{GITHUB}/modelscope/ms-swift/issues/9550"
    ),
    "arguments.broadcast_sources": Source(
        "Group-local and global source ranks: Transfer AR-to-diffusion payloads over NIXL",
        f"{GITHUB}/vllm-project/vllm-omni/pull/6264",
    ),
    "arguments.object_list_sources": Source(
        "Implementation of Early Stopping for DDP training (broadcast_object_list)",
        f"{GITHUB}/ultralytics/yolov5/pull/8345",
    ),
    "arguments.different_order": Source(
        "Training deadlock: a dict's order differs between processes", f"{GITHUB}/NVIDIA/apex/issues/19"
    ),
    "arguments.gather_against_all_reduce": Source(
        "Fix distributed deadlock that comes up in npt", f"{GITHUB}/NVIDIA/nvalchemi-toolkit/pull/143"
    ),
    "arguments.different_models": Source("DDP(model) hangs on non-master node", f"{TORCH}/issues/54232"),
    "arguments.new_group_on_some": Source(
        "dist.new_group() failed. BUG or I misunderstood something?", f"{TORCH}/issues/25390"
    ),
    "arguments.groups_in_other_order": Source(
        "Different collective execution order across ranks", f"{GITHUB}/meta-pytorch/torchrec/pull/4149"
    ),
    "messages.both_receive": Source(
        "Will the sequence of send and recv cause a deadlock?", f"{GITHUB}/NVIDIA/nccl/issues/479"
    ),
    "messages.send_nobody_receives": Source(
        "Update send/recv tests to reflect intended use: sends may block", f"{TORCH}/pull/11275"
    ),
    "messages.ring": Source(
        "Deadlock attempting to do concurrent send, receive", f"{GITHUB}/intel/torch-ccl/issues/72"
    ),
    "messages.one_micro_batch_more": Source(
        "Deadlock occurs when using nccl distributed training (send and recv of a pipeline)", f"{TORCH}/issues/75795"
    ),
    "messages.batch_of_other_order": Source(
        "Skip connection + batch_isend_irecv can hang", f"{GITHUB}/pytorch/PiPPy/issues/969"
    ),
    "standing.all_in_open": Source("Training hangs when using file system", f"{GITHUB}/mlcommons/storage/issues/391"),
    "standing.one_in_open": Source(
        "Hangs on cluster B8/B9 on file writing to NFS", f"{GITHUB}/tenstorrent/tt-metal/issues/42404"
    ),
    "standing.lock": Source("possible deadlock in dataloader", f"{TORCH}/issues/1355"),
    "standing.loader_worker_stuck": Source("Dataloader in DistributedDataParallel hangs", f"{TORCH}/issues/41517"),
    "standing.loader_worker_killed": Source(
        "RuntimeError: DataLoader worker is killed by signal: Killed", f"{TORCH}/issues/8976"
    ),
    "standing.child": Source("torch.distributed launch.py is hanged: os.waitpid", f"{TORCH}/issues/45042"),
    "standing.gil": Source("Add GIL checker to NCCL watchdog monitor", f"{TORCH}/pull/116798"),
    "standing.stopped": Source("Pytorch Distributed DataParallel hanging", f"{TORCH}/issues/134920"),
    "standing.tracker": Source(
        "Fix distributed deadlock when wandb.init hangs on rank 0", f"{GITHUB}/EleutherAI/bergson/pull/249"
    ),
    "starting.late_to_init": Source(
        "Timeout after 30 minutes problem", f"{GITHUB}/JIA-Lab-research/LongLoRA/issues/45"
    ),
    "starting.timeout_15": Source(
        "DistStoreError: Timed out after 1801 seconds waiting for clients. 1/3 clients joined",
        f"{GITHUB}/OpenRLHF/OpenRLHF/issues/1040",
    ),
    "starting.stranger_on_the_port": Source("Address already in use", f"{GITHUB}/huggingface/accelerate/issues/74"),
    "starting.spawned": Source("init_process_group() sometimes hangs (not stable)", f"{TORCH}/issues/15638"),
    "endings.missing_20": Source("Timeout error when preparing data in DDP", f"{GITHUB}/IGNF/myria3d/issues/123"),
    "endings.mismatch_20": Source(
        "distributed all_reduce deadlocks in v1.1: ALLREDUCE against BROADCAST in the watchdog's words",
        f"{TORCH}/issues/20630",
    ),
    "endings.stopped_20": Source(
        "Multi-GPUs: Partial Ranks Hang for a long time after other ranks finished",
        f"{GITHUB}/meta-pytorch/torchrec/issues/189",
    ),
    "endings.missing_5": Source(
        "NCCL watchdog failed to crash program when collective times out", f"{TORCH}/issues/97191"
    ),
    "endings.exception": Source(
        "hang in all_reduce(_has_data ...), after exception", f"{GITHUB}/rwth-i6/returnn/issues/1484"
    ),
    "endings.exception_and_cleanup": Source(
        "Fail fast on rank failure to avoid torchrun shutdown hangs", f"{GITHUB}/mlc-ai/pith-train/pull/31"
    ),
    "endings.out_of_budget": Source(
        "Checkpoint on SIGTERM/SIGUSR1 for graceful preemption: a rank exiting alone would deadlock the others",
        f"{GITHUB}/kyutai-labs/pocket-tts/pull/277",
    ),
    "endings.killed": Source(
        "Uncaught gloo::ioException in Elastic PyTorch: one rank is sent SIGKILL",
        f"{GITHUB}/horovod/horovod/issues/2907",
    ),
    "endings.segmentation_fault": Source("torch.elastic fails to shutdown despite crash", f"{TORCH}/issues/76287"),
    "endings.monitored_barrier": Source("Gloo-only CPU-based monitored barrier", f"{TORCH}/pull/53773"),
    "endings.cancelled": Source(
        "Proper Signal Handling for Distributed Training", f"{GITHUB}/pytorch/examples/issues/1351"
    ),
    "endings.out_of_memory": Source(
        "Bug about distributed launch: a worker is killed while memory runs out", f"{TORCH}/issues/72034"
    ),
    "endings.thread_left": Source(
        "DistributedDataParallel doesn't exit properly; Leaves reduction threads running", f"{TORCH}/issues/2520"
    ),
    "endings.exit_handler": Source("Dataloader Hangs on Exit", f"{TORCH}/issues/81794"),
    "slow.thirty_percent": Source("Cross-Process Performance Analysis: Straggler Detection", f"{TORCH}/issues/71303"),
    "slow.twice": Source("Add straggler detection in training", f"{GITHUB}/flagos-ai/FlagScale/pull/938"),
    "slow.in_turns": Source(
        "Understanding Stragglers in Large Model Training Using What-if Analysis",
        f"{GITHUB}/AI-Infra-Team/awesome-papers/issues/53",
    ),
    "slow.two_of_four": Source(
        "Why sometimes training slowdown on Pod", f"{GITHUB}/ultralytics/ultralytics/issues/8566"
    ),
    "slow.rank_0_logs": Source("Slow training with DDP", f"{GITHUB}/shubham-goel/4D-Humans/issues/139"),
    "slow.loader": Source(
        "Backward-origin compute straggler is undetectable; the control is a slow loader on one rank",
        f"{GITHUB}/traceopt-ai/traceml/issues/252",
    ),
    "healthy.plain": Source(
        "Script freezes with no output when using DistributedDataParallel", f"{TORCH}/issues/22834"
    ),
    "healthy.rank_0_evaluates_alone": Source(
        "fix pytorch multi-GPU training hang: model.module on one rank", f"{GITHUB}/jpata/particleflow/pull/233"
    ),
    "healthy.sanity_check": Source("Hanging Validation: of one rank, now and then", f"{TORCH}/issues/72897"),
    "healthy.checkpoints": Source(
        "Give every process group one collective timeout that survives rank-0-only work",
        f"{GITHUB}/EleutherAI/bergson/pull/444",
    ),
    "healthy.uneven_with_join": Source("Join-based API to support uneven inputs in DDP", f"{TORCH}/issues/38174"),
    "healthy.accumulation": Source(
        "Skip sync across GPUs for all but last gradient accumulation step", f"{GITHUB}/karpathy/nanochat/pull/33"
    ),
    "healthy.late_start": Source(
        "Raise MegaMoE barrier timeout: one rank still compiles while others wait",
        f"{GITHUB}/sgl-project/DeepGEMM/pull/57",
    ),
    "healthy.sub_groups": Source("Distributed hangs when doing hierachical communication", f"{TORCH}/issues/130102"),
    "healthy.pipeline": Source("Understanding errors with async send and receive", f"{GITHUB}/pytorch/gloo/issues/308"),
    "healthy.slow_first_batch": Source(
        "Using DDP with num_workers > 0 hangs before entering the first training epoch loop", f"{TORCH}/issues/82077"
    ),
    "healthy.first_downloads": Source(
        "Timeout after 30 minutes problem: rank 0 prepares the dataset", f"{GITHUB}/JIA-Lab-research/LongLoRA/issues/45"
    ),
    "healthy.late_end": Source(
        "sometimes train will hang with ddp when the process exit", f"{GITHUB}/GestaltCogTeam/BasicTS/issues/250"
    ),
    "healthy.uneven_work": Source(
        "Make training steps of uneven length comparable: Straggler Detection", f"{TORCH}/issues/71303"
    ),
    "healthy.pauses": Source(
        "multi-node distributed training rank0 hang at dataloader after a few epochs", f"{TORCH}/issues/87995"
    ),
    "healthy.checkpoint_in_background": Source(
        "dataloader hangs with fork and pin memory=True: threads beside training", f"{TORCH}/issues/130610"
    ),
    "starting.spawned_and_well": Source(
        "Training script hangs at torch.Distributed.init_process_group under mp.spawn",
        f"{GITHUB}/helboukkouri/character-bert-pretraining/issues/4",
    ),
}
