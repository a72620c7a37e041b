"""DeepSpeed in ranks whose groups come and go: it initialises again, quietly, compiles nothing, leaves nothing."""

import os
import sys

import cloudpickle
import pytest

import labkit as lk
from labkit.errors import RankError
from tests.ranks import waits

pytestmark = pytest.mark.ranks
cloudpickle.register_pickle_by_value(sys.modules[__name__])

CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}


def train(stage: int = 1) -> list[float]:
    """Initialise DeepSpeed on the world as it is now, as a learner would, and take two steps."""
    import torch

    from labkit.rank import deepspeed_library

    deepspeed = deepspeed_library.load()
    with deepspeed_library.quiet():
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = CONFIG | {"zero_optimization": {"stage": stage}}
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
        losses = []
        for _ in range(2):
            loss = engine(torch.ones(1, 8)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
    return losses


def held() -> list[str]:
    """The variables of DeepSpeed that hold something that belongs to groups."""
    from labkit.rank import deepspeed_library

    found = [
        f"{module}.{name}"
        for module, names in deepspeed_library._HOLDERS.items()
        for name in names
        if module in sys.modules and getattr(sys.modules[module], name) is not None
    ]
    if sys.modules["deepspeed.utils.groups"]._WORLD_GROUP is not None:
        found.append("deepspeed.utils.groups._WORLD_GROUP")
    return found


def usage() -> tuple[int, int, list[str]]:
    fds = len(os.listdir("/proc/self/fd"))
    return len(os.listdir("/proc/self/task")), fds, [one for one in os.listdir("/dev/shm") if "deepspeed" in one]


def test_it_initialises_again_after_the_groups_were_built_anew(ranks: lk.cluster.Ranks) -> None:
    first = ranks.run(train, 3)
    assert len({tuple(one) for one in first}) == 1
    assert first[0][1] < first[0][0]
    before = None
    for _ in range(3):
        ranks.run(waits.barrier, block=False)
        ranks.interrupt()
        assert ranks.run(held) == [[]] * 4
        assert ranks.run(train, 1) == first
        if before is None:
            before = ranks.run(usage)
    after = ranks.run(usage)
    assert [one[2] for one in after] == [[]] * 4
    assert all(new[0] <= old[0] and new[1] <= old[1] for new, old in zip(after, before, strict=True)), (before, after)


def test_zero_3_trains_with_a_rank_that_was_restarted(own_ranks: lk.cluster.Ranks) -> None:
    first = own_ranks.run(train, 3)
    own_ranks.kill(2)
    own_ranks.restart(2)
    assert own_ranks.run(train, 3) == first


def test_the_variables_that_are_reset_are_those_that_hold_groups(ranks: lk.cluster.Ranks) -> None:
    """Fails when another version of DeepSpeed keeps its groups under other names."""
    ranks.run(train)
    assert ranks.run(held) == [["deepspeed.comm.comm.cdb", "deepspeed.utils.groups._WORLD_GROUP"]] * 4


def test_it_says_nothing(ranks: lk.cluster.Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    ranks.run(train)
    assert capfd.readouterr() == ("", "")


def test_a_missing_operation_is_an_error_and_no_compilation(ranks: lk.cluster.Ranks) -> None:
    def ask() -> None:
        from labkit.rank import deepspeed_library

        deepspeed_library.load()
        from deepspeed.ops.op_builder.cpu import AsyncIOBuilder

        AsyncIOBuilder().load()

    with pytest.raises(RankError, match="ranks never compile"):
        ranks.run(ask, timeout_s=60)


@pytest.mark.operations
def test_its_first_start_loads_no_compiler_and_asks_for_no_processor() -> None:
    """Both take a process seconds: most of a first change to DeepSpeed, and of each to offload."""

    def loaded() -> tuple[bool, str]:
        import cpuinfo

        return "torch._inductor.compile_fx" in sys.modules, cpuinfo.get_cpu_info.__name__

    def refuse_to_ask() -> None:
        import cpuinfo.cpuinfo

        def get_cpu_info_json() -> None:
            raise RuntimeError("asked which processor this is")

        cpuinfo.cpuinfo.get_cpu_info_json = get_cpu_info_json

    model = lk.spec.Model(num_layers=1, d_model=16, num_heads=2, vocab_size=256, seq_len=8)
    plan = lk.plan.build(model, lk.spec.Layout.parse("zero1 offload:optimizer b2 deepspeed"))
    with lk.cluster.start(1) as ranks:
        ranks.run(refuse_to_ask)
        lk.launch.train(ranks, plan, 1, progress=False)
        assert ranks.run(loaded) == [(False, "get_cpu_info")]
