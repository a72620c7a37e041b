"""Groups after failures: right again, built anew only when they must be."""

import sys

import cloudpickle
import pytest

import labkit as lk
from labkit.errors import RankError
from tests.ranks import waits

pytestmark = pytest.mark.ranks
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_a_failure_that_is_the_same_everywhere_keeps_the_groups(ranks: lk.cluster.Ranks) -> None:
    ranks.run(waits.sum_of_ranks)
    token = ranks.token
    with pytest.raises(RankError) as caught:
        ranks.run(lambda: 1 / 0)
    assert sorted(caught.value.failures) == [0, 1, 2, 3]
    assert ranks.run(waits.sum_of_ranks) == [6.0] * 4
    assert ranks.token == token


def test_groups_out_of_step_are_built_anew(ranks: lk.cluster.Ranks) -> None:
    def fails_late_on_one() -> None:
        work = waits.dist.all_reduce(waits.numbers(), async_op=True)
        if waits.dist.get_rank() == 2:
            raise ValueError("one rank leaves early")
        work.wait()

    ranks.run(waits.sum_of_ranks)
    token = ranks.token
    with pytest.raises(RankError):
        ranks.run(fails_late_on_one, timeout_s=60)
    assert ranks.run(waits.sum_of_ranks) == [6.0] * 4
    assert ranks.token > token


def test_every_rank_agrees_on_the_generation(ranks: lk.cluster.Ranks) -> None:
    def generation() -> int:
        from labkit.rank import groups

        return groups.generation()

    assert ranks.run(generation) == [ranks.token] * 4
    ranks.run(waits.barrier, block=False)
    ranks.interrupt()
    assert ranks.run(generation) == [ranks.token] * 4


def test_old_groups_are_dead_and_say_so(ranks: lk.cluster.Ranks) -> None:
    def make() -> None:
        import builtins

        builtins.labkit_test_group = waits.dist.new_group()  # type: ignore[attr-defined]

    def use() -> None:
        import builtins

        waits.dist.all_reduce(waits.numbers(), group=builtins.labkit_test_group)  # type: ignore[attr-defined]

    ranks.run(make)
    ranks.run(waits.barrier, block=False)
    ranks.interrupt()
    with pytest.raises(RankError) as caught:
        ranks.run(use, timeout_s=60)
    assert sorted(caught.value.failures) == [0, 1, 2, 3]
    assert ranks.run(waits.sum_of_ranks) == [6.0] * 4


def test_a_learner_may_end_the_default_group(ranks: lk.cluster.Ranks) -> None:
    def end() -> None:
        waits.dist.destroy_process_group()

    ranks.run(end)
    assert ranks.run(waits.sum_of_ranks) == [6.0] * 4


def test_groups_that_were_built_anew_leave_no_thread_or_socket_of_the_old_ones(ranks: lk.cluster.Ranks) -> None:
    def held() -> tuple[int, int]:
        import os

        links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        sockets = [link for link in links if os.path.exists(link) and os.readlink(link).startswith("socket:")]
        return len(os.listdir("/proc/self/task")), len(sockets)

    plan = lk.plan.build(lk.spec.Model.preset("tiny"), lk.spec.Layout.parse("tp2 dp2"))

    def one_round() -> list[tuple[int, int]]:
        lk.launch.train(ranks, plan, num_steps=1)
        ranks.run(waits.barrier, ranks=[0], block=False)
        ranks.interrupt()
        return ranks.run(held)

    one_round()
    before = one_round()
    for _ in range(2):
        after = one_round()
    assert all(a <= b for seen, allowed in zip(after, before, strict=True) for a, b in zip(seen, allowed, strict=True))


def test_nothing_keeps_meshes_of_groups_that_are_gone(ranks: lk.cluster.Ranks) -> None:
    """One that torch's caches keep is equal to the next, and may be given for it: its ranks would wait for nobody."""

    def meshes() -> int:
        import gc

        from torch.distributed.device_mesh import DeviceMesh

        gc.collect()
        return sum(isinstance(one, DeviceMesh) for one in gc.get_objects())

    model = lk.spec.Model.preset("tiny")
    for text in ("tp2 dp2", "tp2 pp2", "dp2 tp2 zero3 sp"):
        lk.launch.train(ranks, lk.plan.build(model, lk.spec.Layout.parse(text)), num_steps=1, progress=False)
    assert min(ranks.run(meshes)) > 0
    ranks.run(waits.barrier, ranks=[0], block=False)
    ranks.interrupt()
    assert ranks.run(meshes) == [0] * 4


def test_an_axis_of_the_same_ranks_is_one_group_in_every_layout(ranks: lk.cluster.Ranks) -> None:
    """DTensor takes equal meshes for one another, and would mix their groups differently on each rank."""

    def groups_of(texts: list[str]) -> list[tuple[str, ...]]:
        from labkit.rank import mesh

        model = lk.spec.Model.preset("tiny")
        found = [mesh.of(lk.plan.build(model, lk.spec.Layout.parse(text))) for text in texts]
        assert all(one is not None for one in found)
        for one in found:
            assert all(one.device_mesh.get_group(axis) is one.group(axis) for axis in ("pp", "tp"))
        return [(one.group("tp").group_name, one.group("pp").group_name) for one in found]

    for first, second, third in ranks.run(groups_of, ["tp2 pp2", "tp2 dp2", "tp2 pp2 dualpipe_v v2 m4"]):
        assert first[0] == second[0] == third[0]
        assert first[1] == third[1] != second[1]
