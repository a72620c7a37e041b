import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit import schedule
from labkit.errors import PlanError
from labkit.schedule import (
    Action,
    add_communication,
    dualpipe_v,
    format_actions,
    gpipe,
    interleaved,
    interleaved_zero_bubble,
    looped_bfs,
    num_in_flight,
    one_f_one_b,
    parse,
    parse_actions,
    zbv,
)

SIZES = {
    "builder": st.sampled_from([gpipe, one_f_one_b]),
    "num_stages": st.integers(1, 9),
    "num_microbatches": st.integers(1, 17),
}
# Sizes that each schedule of several stages per rank takes: name, ranks, micro-batches, stages per rank.
RANKS = st.integers(1, 8)
SEVERAL = st.one_of(
    st.tuples(st.just("looped_bfs"), RANKS, st.integers(1, 12), st.integers(2, 4)),
    st.tuples(
        st.sampled_from(["interleaved", "interleaved_zero_bubble"]), RANKS, st.integers(1, 3), st.integers(2, 4)
    ).map(lambda drawn: (*drawn[:2], drawn[1] * drawn[2], drawn[3])),
    st.tuples(st.just("zbv"), RANKS, st.integers(1, 24), st.just(2)),
    st.tuples(st.just("dualpipe_v"), RANKS, st.integers(0, 12), st.just(2)).map(
        lambda drawn: (*drawn[:2], 2 * drawn[1] + drawn[2], 2)
    ),
)
ACTIONS = st.builds(Action, st.integers(0, 999_999_999), st.sampled_from(schedule.KINDS), st.integers(0, 999_999_999))


@given(ACTIONS)
def test_parse_undoes_str(action):
    assert parse(str(action)) == action


@given(**SIZES)
def test_schedules_are_complete_and_free_of_deadlock(builder, num_stages, num_microbatches):
    actions = builder(num_stages, num_microbatches)
    schedule.validate(actions, num_stages, num_microbatches)
    schedule.validate(add_communication(actions), num_stages, num_microbatches)
    assert [len(line) for line in actions] == [2 * num_microbatches] * num_stages
    assert parse_actions(format_actions(actions)) == actions


@given(**SIZES)
def test_microbatches_go_in_order(builder, num_stages, num_microbatches):
    for line in builder(num_stages, num_microbatches):
        for kind in "FB":
            assert [each.microbatch for each in line if each.kind == kind] == list(range(num_microbatches))


@given(num_stages=SIZES["num_stages"], num_microbatches=SIZES["num_microbatches"])
def test_what_is_in_flight(num_stages, num_microbatches):
    held = [num_in_flight(line) for line in one_f_one_b(num_stages, num_microbatches)]
    assert held == [min(num_stages - stage, num_microbatches) for stage in range(num_stages)]
    assert [num_in_flight(line) for line in gpipe(num_stages, num_microbatches)] == [num_microbatches] * num_stages


@given(**SIZES)
def test_every_send_has_its_receive(builder, num_stages, num_microbatches):
    lowered = {action for line in add_communication(builder(num_stages, num_microbatches)) for action in line}
    for stage in range(num_stages):
        for microbatch in range(num_microbatches):
            has_next, has_previous = stage < num_stages - 1, stage > 0
            assert (Action(stage, "SEND_F", microbatch) in lowered) == has_next
            assert (Action(stage, "RECV_B", microbatch) in lowered) == has_next
            assert (Action(stage, "RECV_F", microbatch) in lowered) == has_previous
            assert (Action(stage, "SEND_B", microbatch) in lowered) == has_previous


@given(random=st.randoms(use_true_random=False), **SIZES)
def test_a_broken_schedule_is_refused(builder, random, num_stages, num_microbatches):
    actions = builder(num_stages, num_microbatches)
    line = random.choice(actions)
    dropped = line.pop(random.randrange(len(line)))
    with pytest.raises(PlanError, match=f"{dropped} is missing"):
        schedule.validate(actions, num_stages, num_microbatches)


@given(random=st.randoms(use_true_random=False), **SIZES)
def test_a_backward_before_its_forward_is_refused(builder, random, num_stages, num_microbatches):
    actions = builder(num_stages, num_microbatches)
    line = random.choice(actions)
    backward = next(each for each in line if each.kind == "B")
    line.remove(backward)
    line.insert(0, backward)
    with pytest.raises(PlanError, match=f"waits at {backward} for "):
        schedule.validate(actions, num_stages, num_microbatches)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0B0\n1F0 1B0 1F0", "rank 1 holds 1F0 and rank 1 holds it too: every action runs once"),
        ("0F0 0B0 1F0\n1B0", r"rank 1 holds 1B0 but rank 0 holds stage 1: a stage lives on one rank"),
        ("0F0 0B0\n2F0 1B0", "rank 1 holds 2F0 but num_stages=2: stages end at 1"),
        ("0F0 0B1\n1F0 1B0", "rank 0 holds 0B1 but num_microbatches=1: micro-batches end at 0"),
        ("0F0 0B0\n1F0 1B0 1W0", "1W0 and 1B0 both run: B is I and W together"),
        ("0F0 0B0\n1F0 1I0", "1W0 is missing"),
        ("0F0 0B0\n1F0 1W0", "1I0 is missing"),
        ("0F0 0B0\n1B0 1F0", "rank 1 waits at 1B0 for 1F0: no rank can go on. Put 1F0 before 1B0 on rank 1"),
        ("0RECV_B0 0F0 0SEND_F0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0", "rank 0 waits at 0RECV_B0 for 1SEND_B0, rank 1 "),
        ("0F0 0B0\n1RECV_F0 1F0 1B0", "rank 1 waits at 1RECV_F0 for 0SEND_F0, which no rank runs. Add 0SEND_F0"),
    ],
)  # fmt: skip
def test_the_message_names_the_offending_action(text, message):
    with pytest.raises(PlanError, match=message):
        schedule.validate(parse_actions(text), 2, 1)


def test_split_backwards_are_a_schedule():
    schedule.validate(parse_actions("0F0 0I0 0W0\n1F0 1I0 1W0"), 2, 1)
    schedule.validate(add_communication(parse_actions("0F0 0I0 0W0\n1F0 1I0 1W0")), 2, 1)
    schedule.validate(parse_actions("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0"), 4, 1)


def test_stages_of_one_rank_send_nothing():
    lowered = add_communication(parse_actions("0F0 1F0 1B0 0B0"))
    assert format_actions(lowered) == "0F0 1F0 1B0 0B0"


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2X0", "-1F0", "2f0", "2F0 3F0", "٢F0", None, 3, "2F1234567890", "2OVERLAP_F_B0"]
)
def test_no_action(text):
    with pytest.raises(PlanError, match="is not an action"):
        parse(text)


@pytest.mark.parametrize(
    "fields", [(-1, "F", 0), (0, "F", -1), (0, "G", 0), (True, "F", 0), (0.0, "F", 0), (0, None, 0), (None, "F", 0)]
)
def test_an_impossible_action(fields):
    with pytest.raises(PlanError):
        Action(*fields)


@pytest.mark.parametrize("builder", [gpipe, one_f_one_b])
@pytest.mark.parametrize(
    "sizes", [(0, 1), (1, 0), (-1, 2), (2.0, 2), (True, 2), (None, 2), ("2", 2), (2, float("nan"))]
)
def test_impossible_sizes(builder, sizes):
    with pytest.raises(PlanError, match=r"num_(stages|microbatches)="):
        builder(*sizes)


def test_build_by_name():
    assert schedule.build("gpipe", 2, 3) == gpipe(2, 3)
    with pytest.raises(PlanError, match=r"schedule='gpip' is unknown: .*Did you mean 'gpipe'"):
        schedule.build("gpip", 2, 3)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([["0F0", "0B0"]], "1 list for num_stages=2: a schedule has one list for each stage"),
        ([["0F0", "0B0"], ["0F0", "0B0"]], "list 1 holds 0F0, an action of stage 0: .* Write 1F0"),
        ([["0F0", "0B0"], ["1F0"]], "1B0 is missing"),
        ([["0F0", "B0"], ["1F0", "1B0"]], "'B0' is not an action"),
    ],
)
def test_lists_of_text_that_are_no_schedule(lists, message):
    with pytest.raises(PlanError, match=message):
        schedule.read(lists, 2, 1)


@given(**SIZES)
def test_read_undoes_str_and_microbatches_are_in_order(builder, num_stages, num_microbatches):
    actions = builder(num_stages, num_microbatches)
    lists = [[str(action) for action in line] for line in actions]
    assert schedule.read(lists, num_stages, num_microbatches) == actions
    schedule.check_order(actions)


@given(SEVERAL)
def test_schedules_of_several_stages_are_complete_and_free_of_deadlock(sizes):
    name, num_ranks, num_microbatches, num_virtual_stages = sizes
    actions = schedule.build(*sizes)
    num_stages = num_ranks * num_virtual_stages
    schedule.validate(actions, num_stages, num_microbatches)
    schedule.validate(add_communication(actions), num_stages, num_microbatches)
    assert parse_actions(format_actions(actions)) == actions
    for rank, line in enumerate(actions):
        held = schedule.stages_of(name, rank, num_ranks, num_virtual_stages)
        assert sorted({action.stage for action in line}) == held


@given(RANKS, st.integers(1, 4), st.integers(2, 4))
def test_what_is_in_flight_of_several_stages(num_ranks, num_rounds, num_virtual_stages):
    m = num_ranks * num_rounds
    every = num_virtual_stages * m
    held = [num_in_flight(line) for line in interleaved(num_ranks, m, num_virtual_stages)]
    hops = [num_ranks - 1 - rank for rank in range(num_ranks)]
    assert held == [min((num_virtual_stages - 1) * num_ranks + 2 * hop + 1, every) for hop in hops]
    assert [num_in_flight(line) for line in looped_bfs(num_ranks, m, num_virtual_stages)] == [every] * num_ranks
    held = [num_in_flight(line) for line in interleaved_zero_bubble(num_ranks, m, num_virtual_stages)]
    assert max(held) <= min(num_virtual_stages * num_ranks, every)


@given(RANKS, st.integers(0, 8))
def test_a_v_is_held_equally_by_all_ranks(num_ranks, more):
    m = 2 * num_ranks + more
    assert {num_in_flight(line) for line in zbv(num_ranks, m)} == {2 * num_ranks}
    assert {num_in_flight(line) for line in dualpipe_v(num_ranks, m)} == {2 * num_ranks + 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("interleaved", 4, 6, 2), r"num_microbatches=6 is not divisible by num_ranks=4: .* Use num_microbatches=8\."),
        (("interleaved_zero_bubble", 4, 2, 2), r"num_microbatches=2 is not divisible .* Use num_microbatches=4\."),
        (("dualpipe_v", 3, 5, 2), r"num_microbatches=5 is fewer than 2 \* num_ranks\(3\) = 6 stages: .*=6\."),
        (("zbv", 2, 4, 3), r"num_virtual_stages=3 with schedule='zbv': a V has two stages per rank\. Use v2\."),
        (("gpipe", 2, 4, 2), r"num_virtual_stages=2 with schedule='gpipe': .* Use v1\."),
        (("looped_bfs", 2, 4, 1), r"num_virtual_stages=1 with schedule='looped_bfs': .* Use v2\."),
        (("zbv", 0, 4, 2), "num_ranks=0"),
        (("interleaved", 2, 4, 2.5), "num_virtual_stages=2.5"),
    ],
)
def test_sizes_that_a_schedule_does_not_take(arguments, message):
    with pytest.raises(PlanError, match=message):
        schedule.build(*arguments)
