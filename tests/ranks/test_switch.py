"""The live training state under another layout: the same to the bit, and training goes on as it would have."""

import random
import re
import sys
import threading

import cloudpickle
import psutil
import pytest

import labkit as lk
from labkit.errors import ClusterError, PlanError, RankError, RankTimeout

pytestmark = pytest.mark.ranks
cloudpickle.register_pickle_by_value(sys.modules[__name__])

# Odd sizes: no layout with shards divides them evenly. Tied: two stages hold one matrix.
MODEL = lk.spec.Model(
    num_layers=5, d_model=40, num_heads=4, vocab_size=260, seq_len=16, d_ff=52,
    norm="layer", position="learned", activation="gelu", bias=True, tied_embeddings=True,
)  # fmt: skip
PLAIN = lk.spec.Model(num_layers=8, d_model=32, num_heads=4, num_kv_heads=2, vocab_size=256, seq_len=16)


def plan_of(text, model=MODEL):
    return lk.plan.build(model, lk.spec.Layout.parse(text))


def train(ranks, plan, num_steps, **options):
    return lk.launch.train(ranks, plan, num_steps, progress=False, trace=False, **options)


def switch(ranks, plan, **options):
    return lk.launch.switch(ranks, plan, progress=False, **options)


# What ranks do.


def keep_reference():
    """Keep the whole state, which every rank of a data-parallel layout holds."""
    import builtins

    from labkit.rank import state
    from labkit.rank.switching import contents_of

    live = state.current()
    contents = contents_of(live)
    shapes = {name: tensor.shape for name, tensor in live.weights.tensors.items()}
    quantities = ("weight", "exp_avg", "exp_avg_sq")
    whole = {
        q: {name: contents.read(name, q).clone().view(shape) for name, shape in shapes.items()} for q in quantities
    }
    builtins.labkit_test_reference = whole, contents.num_updates()


def differing():
    """Every quantity of every parameter of this rank that is not, to the bit, its part of what was kept."""
    import builtins

    import torch
    import torch.distributed as dist

    from labkit.plan.shards import of_rank
    from labkit.rank import state
    from labkit.rank.switching import contents_of

    live = state.current()
    contents, (whole, counts) = contents_of(live), builtins.labkit_test_reference
    shards, updates = of_rank(live.plan, dist.get_rank()), contents.num_updates()
    found = [(one.key, "step") for one in shards if one.states and updates.get(one.key) != counts[one.name]]
    for shard in shards:
        for quantity, tensors in whole.items():
            matrix = tensors[shard.name].reshape(tensors[shard.name].shape[0], -1)
            boxes = shard.weights if quantity == "weight" else shard.states
            parts = [matrix[b.top : b.bottom, b.left : b.right].reshape(-1) for b in boxes]
            wanted = torch.cat(parts) if parts else torch.empty(0)
            if not torch.equal(contents.read(shard.key, quantity), wanted):
                found.append((shard.key, quantity))
    return live.step, found


def digest_of_weights():
    import hashlib

    from labkit.rank import training

    weights = training.gather_weights()
    return hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights))).hexdigest()


def held():
    """Descriptors, threads and groups of this process, and the tensors that it keeps."""
    import gc
    import os

    import torch
    import torch.distributed as dist

    gc.collect()
    tensors = sum(isinstance(one, torch.Tensor) for one in gc.get_objects())
    return (
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        len(dist.distributed_c10d._world.pg_map),
        tensors,
    )


def fails_in_the_exchange(on, how):
    """Have exchanges between ranks go wrong on some ranks, until `mend`."""
    import time

    import torch.distributed as dist

    from labkit.rank import switching

    def broken(*_):
        if how == "raise":
            dist.barrier()  # a rank that fails long before the others would have them freed
            raise MemoryError("no room for the exchange")
        time.sleep(600)

    switching.all_to_all_of_the_lab = switching._all_to_all
    if dist.get_rank() in on:
        switching._all_to_all = broken


def mend():
    from labkit.rank import switching

    switching._all_to_all = switching.all_to_all_of_the_lab


@pytest.fixture
def broken_ranks(ranks):
    """Ranks whose exchanges a test breaks."""
    yield ranks
    ranks.run(mend)


# Layouts of every kind; a walk goes from each to another.
TIED = (
    "dp1 b12", "dp2 b6", "dp4 b3", "tp2 b12", "tp4 sp b12", "pp4 m4 b3", "pp2 gpipe m2 b6", "dp2 tp2 b6", "dp3 m2 b2",
    "dp2 tp2 zero1 torch m2 b3", "dp4 zero1 torch b3", "dp3 zero1 torch b4", "dp4 zero2 torch b3",
    "dp4 zero3 torch b3", "dp2 tp2 zero3 sp m2 b3", "dp2 pp2 zero3 m3 b2", "dp4 zero3 hybrid2 b3",
    "dp2 pp2 zero1 zbv v2 m3 b2", "pp2 interleaved v2 m4 b3", "tp2 pp2 dualpipe_v v2 m4 b3", "dp2 bf16 b6",
    "dp2 pp2 zero2 dualpipe_v v2 m6 b1", "pp2 interleaved_zero_bubble v2 m2 b6", "dp2 pp2 looped_bfs v2 m3 b2",
    "tp2 pp2 sp bf16 m4 b3 recompute:full",
)  # fmt: skip


def test_any_layout_to_any_other_keeps_every_bit(ranks):
    first = plan_of("dp4 b3")
    train(ranks, first, 2)
    ranks.run(keep_reference)
    for text in random.Random(1).sample(TIED, len(TIED)):
        result = switch(ranks, plan_of(text))
        size = result.after.world_size
        assert ranks.run(differing, ranks=range(size)) == [(2, [])] * size, f"{result.before.layout} -> {text}"


def test_weights_are_those_that_the_layout_itself_gathers(ranks):
    train(ranks, plan_of("tp2 pp2 m4 b3"), 1)
    wanted = ranks.run(digest_of_weights)
    assert len(set(wanted)) == 1
    for text in ("dp2 tp2 zero3 m2 b3", "dp4 zero1 torch b3", "dp2 pp2 zero3 zbv v2 m3 b2"):
        switch(ranks, plan_of(text))
        assert ranks.run(digest_of_weights) == wanted


CHAIN = (
    "dp4 b3", "tp2 pp2 m4 b3", "dp2 zero1 torch b6", "dp2 pp2 zero3 zbv v2 m3 b2", "dp1 b12", "tp4 sp b12",
    "dp4 zero3 torch b3", "pp2 interleaved v2 m4 b3", "dp2 tp2 zero2 m2 b3", "pp4 m4 b3",
)  # fmt: skip


RUNS = ({}, {"optimizer": "sgd", "learning_rate": 0.1, "clip_norm": 0.5, "weight_decay": 0.0})


def goes_on(ranks, chain, options):
    """A step under each layout, from one state to the next, beside as many on one rank."""
    once = train(ranks, plan_of("dp1 b12"), len(chain), **options)
    losses, norms = [], []
    for number, text in enumerate(chain):
        if number:
            switch(ranks, plan_of(text))
        run = train(ranks, plan_of(text), 1, start="live" if number else "fresh", **options)
        losses += run.losses
        norms += run.grad_norms
    assert losses == pytest.approx(once.losses, rel=1e-5)
    assert norms == pytest.approx(once.grad_norms, rel=1e-4)
    assert losses[0] - losses[-1] > 0.01


@pytest.mark.parametrize("options", RUNS)
def test_training_goes_on_as_under_one_layout(ranks, options):
    goes_on(ranks, CHAIN, options)


def test_there_and_back_changes_nothing_at_all(ranks):
    plan = plan_of("tp2 pp2 m4 b3", PLAIN)
    whole = train(ranks, plan, 5)
    first = train(ranks, plan, 2)
    for text in ("dp2 zero3 b6 torch", "tp2 pp2 m4 b3"):
        switch(ranks, plan_of(text, PLAIN))
    rest = train(ranks, plan, 3, start="live")
    assert first.losses + rest.losses == whole.losses
    assert first.grad_norms + rest.grad_norms == whole.grad_norms


def test_another_precision_is_another_way_to_compute_with_the_same_state(ranks):
    plan = plan_of("dp2 b6", PLAIN)
    whole = train(ranks, plan, 4)
    first = train(ranks, plan, 2)
    for text in ("tp2 bf16 b12", "dp2 fp8 b6", "pp2 fp8 m4 b3", "dp2 b6"):
        switch(ranks, plan_of(text, PLAIN))
    rest = train(ranks, plan, 2, start="live")
    assert first.losses + rest.losses == whole.losses
    switch(ranks, plan_of("dp2 fp8 b6", PLAIN))
    assert train(ranks, plan_of("dp2 fp8 b6", PLAIN), 1, start="live").losses[0] < whole.losses[0]


def test_a_schedule_of_ones_own(ranks):
    layout = lk.spec.Layout.parse("pp2 m2 b6")
    own = lk.plan.build(PLAIN, layout, schedule="1F0 1F1 1B0 1B1\n0F0 0F1 0B0 0B1")
    whole = train(ranks, plan_of("dp1 b12", PLAIN), 3)
    train(ranks, plan_of("dp4 b3", PLAIN), 1)
    switch(ranks, own)
    losses = train(ranks, own, 1, start="live").losses
    switch(ranks, plan_of("tp2 b12", PLAIN))
    losses += train(ranks, plan_of("tp2 b12", PLAIN), 1, start="live").losses
    assert losses == pytest.approx(whole.losses[1:], rel=1e-5)


def test_what_a_switch_says(ranks, capsys):
    train(ranks, plan_of("dp2 b6"), 3)
    result = lk.launch.switch(ranks, plan_of("tp4 b12"))
    assert (result.step, result.before.layout.dp, result.after.layout.tp) == (3, 2, 4)
    assert result.num_bytes == sum(map(sum, result.moves.matrix)) - sum(result.moves.matrix[r][r] for r in range(4))
    assert 0 < max(result.build_s, result.move_s) < result.seconds
    text = r"<Switch at step 3: dp2 b6 → tp4 b12, [\d.]+ MB between ranks in \d+\.\d\d s>"
    assert re.fullmatch(text, repr(result)), result
    assert result._repr_html_() == f"<code>{repr(result).replace('<', '&lt;').replace('>', '&gt;')}</code>"
    assert capsys.readouterr().out == f"switch {repr(result)[19:-1]}\n"


def test_a_switch_that_cannot_be_is_refused_and_moves_nothing(ranks, monkeypatch):
    ranks.run("labkit.rank.state:end", "a test said so")
    with pytest.raises(PlanError, match=r"no live training state: a test said so"):
        switch(ranks, plan_of("dp2 b6"))
    whole = train(ranks, plan_of("dp4 b3"), 3)
    train(ranks, plan_of("dp4 b3"), 1)
    with pytest.raises(PlanError, match="Build the plan from that model"):
        switch(ranks, plan_of("dp4 b3", PLAIN))
    with pytest.raises(PlanError, match=r"= 8 but 4 ranks are up"):
        switch(ranks, plan_of("dp8 b3"))
    with pytest.raises(PlanError, match="not a Plan"):
        switch(ranks, lk.spec.Layout.parse("dp2"))
    with pytest.raises(PlanError, match=r"lk\.cluster\.start"):
        switch([1, 2], plan_of("dp2 b6"))
    with monkeypatch.context() as patch:
        full = psutil.virtual_memory()._replace(available=1 << 20)
        patch.setattr(psutil, "virtual_memory", lambda: full)
        with pytest.raises(PlanError, match=r"GiB are free: CPU ranks share"):
            switch(ranks, plan_of("dp2 b6"))
        assert switch(ranks, plan_of("dp4 b3")).num_bytes == 0  # nothing moves, so nothing must fit
    assert train(ranks, plan_of("dp4 b3"), 2, start="live").losses == pytest.approx(whole.losses[1:], rel=1e-6)


def test_no_switch_while_a_run_is_under_way(ranks):
    run = train(ranks, plan_of("dp2 b6"), 100_000, block=False)
    with pytest.raises(ClusterError, match=r"still going on"):
        switch(ranks, plan_of("tp2 b12"))
    run.stop()
    assert switch(ranks, plan_of("tp2 b12")).step == len(run.losses)


def test_a_state_that_has_the_plan_already_stays(ranks):
    whole = train(ranks, plan_of("dp2 b6"), 2)
    train(ranks, plan_of("dp2 b6"), 1)
    done = switch(ranks, plan_of("dp2 b6"))
    assert (done.step, done.num_bytes, done.build_s, done.move_s) == (1, 0, 0.0, 0.0)
    assert train(ranks, plan_of("dp2 b6"), 1, start="live").losses == whole.losses[1:]


def test_ranks_that_lose_their_part_say_so(ranks):
    train(ranks, plan_of("dp4 b3"), 1)
    switch(ranks, plan_of("dp2 b6"))
    assert ["why_none" in one for one in ranks.run("labkit.rank.switching:describe")] == [False, False, True, True]
    with pytest.raises(RankError, match="the live training state has layout 'dp2 b6', not 'dp4 b3'"):
        train(ranks, plan_of("dp4 b3"), 1, start="live")


def test_a_failure_that_is_the_same_everywhere_leaves_the_old_state_whole(broken_ranks):
    ranks = broken_ranks
    whole = train(ranks, plan_of("dp2 tp2 b6"), 3)
    train(ranks, plan_of("dp2 tp2 b6"), 1)
    ranks.run(fails_in_the_exchange, (0, 1, 2, 3), "raise")
    with pytest.raises(RankError, match="no room for the exchange"):
        switch(ranks, plan_of("pp4 m4 b3"))
    rest = train(ranks, plan_of("dp2 tp2 b6"), 2, start="live")
    assert rest.losses == pytest.approx(whole.losses[1:], rel=1e-6)


def test_a_switch_that_takes_too_long_is_ended_with_its_state(broken_ranks):
    ranks = broken_ranks
    train(ranks, plan_of("dp2 tp2 b6"), 1)
    ranks.run(fails_in_the_exchange, (2,), "wait")
    with pytest.raises(
        RankTimeout, match=r"did not finish the switch to 'pp4 1f1b m4 b3' within 3 s\. They were freed"
    ):
        switch(ranks, plan_of("pp4 m4 b3"), timeout_s=3)
    for text in ("dp2 tp2 b6", "pp4 m4 b3"):
        with pytest.raises(RankError, match="no live training state: the ranks' groups were built anew"):
            train(ranks, plan_of(text), 1, start="live")
    assert len(train(ranks, plan_of("pp4 m4 b3"), 1).losses) == 1


def test_an_interrupt_in_the_middle_ends_the_state_and_says_so(broken_ranks):
    ranks = broken_ranks
    train(ranks, plan_of("dp4 b3"), 1)
    ranks.run(fails_in_the_exchange, (1,), "wait")
    caught = []

    def in_the_background():
        with pytest.raises(RankError) as info:
            switch(ranks, plan_of("tp4 b12"))
        caught.append(info.value)

    thread = threading.Thread(target=in_the_background)
    thread.start()
    while "switch" not in ranks.under_way():
        thread.join(0.05)
        assert thread.is_alive()
    ranks.interrupt()
    thread.join(60)
    assert caught
    with pytest.raises(PlanError, match="the ranks' groups were built anew"):
        switch(ranks, plan_of("tp4 b12"))


def grown(ranks, texts, num_rounds):
    """What ranks hold after two rounds of switches, and after `num_rounds`."""
    found = []
    for _ in range(num_rounds):
        for text in texts:
            switch(ranks, plan_of(text))
            train(ranks, plan_of(text), 1, start="live")
        found.append(ranks.run(held))
    return found[1], found[-1]


def test_twenty_switches_leave_nothing_of_the_old_states(ranks):
    texts = ("dp2 tp2 zero3 m2 b3", "pp2 zbv v2 m4 b3", "dp4 b3", "tp2 b12")
    train(ranks, plan_of(texts[-1]), 1)
    before, after = grown(ranks, texts, num_rounds=5)
    assert all(a <= b for seen, allowed in zip(after, before, strict=True) for a, b in zip(seen, allowed, strict=True))


ON_DEEPSPEED = (
    "dp4 zero1 b3", "dp2 zero3 b6", "dp4 zero3 b3", "tp2 pp2 m4 b3", "dp3 zero2 b4 offload:optimizer",
    "dp4 zero3 b3 offload:all", "dp2 zero2 m2 b3", "dp4 zero3 b3 torch", "dp2 deepspeed b6",
)  # fmt: skip


@pytest.mark.operations
def test_to_deepspeed_and_from_it_every_bit_is_kept(ranks):
    train(ranks, plan_of("dp4 b3"), 2)
    ranks.run(keep_reference)
    for text in ON_DEEPSPEED:
        size = switch(ranks, plan_of(text)).after.world_size
        assert ranks.run(differing, ranks=range(size)) == [(2, [])] * size, text


@pytest.mark.operations
@pytest.mark.parametrize("options", RUNS)
def test_training_goes_on_on_deepspeed(ranks, options):
    goes_on(ranks, ("dp2 zero1 b6", "dp4 zero3 b3", "tp4 b12", "dp4 zero2 b3 offload:optimizer", "dp2 b6"), options)


def test_a_failure_between_deepspeed_layouts_leaves_the_old_one_whole(broken_ranks):
    ranks = broken_ranks
    whole = train(ranks, plan_of("dp4 zero3 b3"), 3)
    train(ranks, plan_of("dp4 zero3 b3"), 1)
    ranks.run(fails_in_the_exchange, (0, 1, 2, 3), "raise")
    with pytest.raises(RankError, match="no room for the exchange"):
        switch(ranks, plan_of("dp2 zero1 b6"))
    rest = train(ranks, plan_of("dp4 zero3 b3"), 2, start="live")
    assert rest.losses == pytest.approx(whole.losses[1:], rel=1e-6)


@pytest.mark.slow
@pytest.mark.operations
def test_switches_between_deepspeed_layouts_leave_nothing(ranks):
    texts = ("dp2 zero3 b6", "dp4 zero1 b3", "dp4 zero3 offload:all b3", "dp4 zero2 torch b3")
    train(ranks, plan_of(texts[-1]), 1)
    before, after = grown(ranks, texts, num_rounds=5)
    assert all(a <= b for seen, allowed in zip(after, before, strict=True) for a, b in zip(seen, allowed, strict=True))
