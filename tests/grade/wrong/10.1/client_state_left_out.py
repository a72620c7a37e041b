# status: partial
# score: 8
# message: `restore` returned 0 on rank 0, and `save` was given 17, of which 12 were trained on.


def deepspeed_config(
    world_size, batch_size, microbatch_size, stage, bucket_bytes, learning_rate, num_warmup_steps, num_steps
):
    return {
        "train_batch_size": batch_size,
        "train_micro_batch_size_per_gpu": microbatch_size,
        "gradient_accumulation_steps": batch_size // (microbatch_size * world_size),
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": bucket_bytes // 2},
        "optimizer": {"type": "AdamW", "params": {"lr": learning_rate, "betas": [0.9, 0.95], "torch_adam": True}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_type": "linear",
                "warmup_min_lr": 0,
                "warmup_max_lr": learning_rate,
                "warmup_num_steps": num_warmup_steps,
                "total_num_steps": num_steps,
            },
        },
    }


def save(engine, folder, num_samples):
    engine.save_checkpoint(folder)


def restore(engine, folder):
    path, client_state = engine.load_checkpoint(folder)
    if path is None:
        raise RuntimeError(f"no checkpoint in {folder}")
    return client_state.get("num_samples", 0)
