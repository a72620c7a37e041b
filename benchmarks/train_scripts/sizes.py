"""One model and one global batch for every layout, small enough for two cores; no imports, read by both sides."""

MODEL = {
    "num_layers": 4,
    "d_model": 128,
    "num_heads": 4,
    "num_kv_heads": 4,
    "d_ff": 352,
    "vocab_size": 256,
    "seq_len": 128,
}
GLOBAL_BATCH_SIZE = 8
LEARNING_RATE = 1e-3
CLIP_NORM = 1.0
WARM_UP_STEPS = 3
LAYOUTS = {
    "dp4": "dp4 b2",
    "tp4": "tp4 b8",
    "pp4": "pp4 1f1b m8 b1",
    "dp2_tp2": "dp2 tp2 b4",
    "zero1": "dp4 zero1 b2 deepspeed",
    "zero3": "dp4 zero3 b2 deepspeed",
    "fsdp2": "dp4 zero3 b2 torch",
}
