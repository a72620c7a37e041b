# status: wrong
# score: 0
# message: DeepSpeed refuses the configuration on 4 ranks (AssertionError: Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size 16 != 2 * 1 * 4).


def deepspeed_config(
    world_size, batch_size, microbatch_size, stage, bucket_bytes, learning_rate, num_warmup_steps, num_steps
):
    return {
        "train_batch_size": batch_size,
        "train_micro_batch_size_per_gpu": microbatch_size,
        "gradient_accumulation_steps": batch_size // (microbatch_size * 8),
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
    engine.save_checkpoint(folder, client_state={"num_samples": num_samples})


def restore(engine, folder):
    path, client_state = engine.load_checkpoint(folder)
    if path is None:
        raise RuntimeError(f"no checkpoint in {folder}")
    return client_state["num_samples"]
