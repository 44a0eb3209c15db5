"""Every model of every flavour of the look-alike through Chunk MoE, against that flavour's own all-to-all."""

import functools

import pytest

from host_lookalike import FLAVOURS, KINDS, PADDING, faults, ranks
from launcher import run_ranks

pytest.importorskip("pydantic")

TOLERANCE = 1e-12  # fp64; relative to the largest value


@functools.cache
def survey(flavour, balanced=False):
    """What both ranks told; one launch a flavour, shared by the tests."""
    environment = {"MM_FORCE_EP_BALANCE": "1" if balanced else None}
    return run_ranks(ranks.survey, 2, flavour, env=environment)


@functools.cache
def master_faults():
    return run_ranks(faults.master_faults, 2)


@functools.cache
def native(host_chosen):
    environment = {"MINDSPEED_CHUNK_DISPATCHER": "host" if host_chosen else None}
    return run_ranks(faults.native, 2, env=environment)


def worst(errors):
    return {case: max(error.values()) for case, error in errors.items()}


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_outputs_and_gradients_equal_the_hosts_alltoall(flavour):
    for told in survey(flavour):
        errors = worst(told["errors"])
        expected = {(kind, name) for kind in KINDS[flavour] for name in ranks.CHUNKED}
        expected |= {("qwen3_5_moe", "checkpoint"), *(("direct", name) for name in ranks.DIRECT[flavour])}
        if flavour in PADDING:
            expected |= {("qwen3_5_moe", "padding")}
        assert errors.keys() == expected
        assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_chunk_moe_ran_and_the_host_did_not(flavour):
    for told in survey(flavour):
        assert told["host ran"] == []
        assert all(told["actions"].values()), told["actions"]
        for kind in KINDS[flavour]:
            assert told["actions"][kind, "N=2"] == 2 * told["actions"][kind, "one chunk"]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_plan_that_says_alltoall_runs_the_hosts_function_and_nothing_of_ours(flavour):
    for told in survey(flavour):
        assert told["untouched"]
        assert told["ran"] == ["alltoall"]
        assert told["stack"] == []


@pytest.mark.parametrize("flavour", FLAVOURS[1:])
def test_mc2_and_allgather_are_the_users_and_not_replaced(flavour):
    for told in survey(flavour):
        for name in ("mc2", "allgather"):
            ran, events, error = told["others"][name]
            assert (ran, events) == ([name], 0)
            assert error <= TOLERANCE


@pytest.mark.parametrize("flavour", FLAVOURS[1:])
def test_wan_fails_with_the_hosts_alltoall_and_runs_with_ours(flavour):
    for told in survey(flavour):
        assert "unexpected keyword argument 'activation_fn'" in told["upstream"]["wan2_2"]
        assert max(told["errors"]["wan2_2", "N=2"].values()) <= TOLERANCE


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_module_matched_by_two_names_is_the_hosts_error_with_either_dispatcher(flavour):
    for told in survey(flavour):
        plain, chunked = told["two names"]
        assert plain == chunked
        assert "distribute_module should only be called once" in plain


@pytest.mark.parametrize("flavour", FLAVOURS[:-1])
def test_published_module_on_hosts_without_one(flavour):
    for told in survey(flavour):
        module = told["module"]
        assert module["file"] is None
        assert max(module["errors"].values()) <= TOLERANCE
        assert module["without a plan"].startswith("ValueError: ep_plan: None")
        assert module["chunks"] == 3
        assert module["uneven"].startswith("ValueError: num_global_experts: 9")


def test_published_module_of_a_host_that_has_one_is_the_hosts():
    for told in survey("newest"):
        assert told["module"]["file"].endswith("newest/mindspeed_mm/fsdp/distributed/expert_parallel/ep_chunkmoe.py")


def test_forced_balance_is_honoured():
    free, balanced = survey("master")[0], survey("master", balanced=True)
    for told in balanced:
        assert told["balanced"] is True and free["balanced"] is False
        errors = worst(told["errors"])
        assert ("qwen3_5_moe", "padding") in errors and ("direct", "padding") in errors
        assert max(errors.values()) <= TOLERANCE, errors
        assert told["host ran"] == []
    assert balanced[0]["output"] != free["output"], "the switch changes nothing here, so nothing was tested"


@pytest.mark.parametrize("host_chosen", [False, True], ids=["ours", "host's"])
def test_newest_host_has_a_chunkmoe_of_its_own_and_one_switch_chooses(host_chosen):
    for told in native(host_chosen):
        generic, (ran, events, error) = told["generic"], told["qwen3_5_moe"]
        assert generic[0] == ran == (["native chunkmoe"] if host_chosen else [])
        assert told["untouched"] is host_chosen
        assert (events == 0) is host_chosen
        # the host's own takes no notice of padding, ours does
        assert (error <= TOLERANCE) is not host_chosen


@pytest.mark.parametrize("host_chosen", [False, True], ids=["ours", "host's"])
def test_families_that_the_hosts_own_chunkmoe_does_not_know_run_with_ours(host_chosen):
    for told in native(host_chosen):
        for kind, name in (("glm5_next", "Glm5Next"), ("kimi_k3", "Kimi-K3")):
            if host_chosen:
                assert told[kind] == f"NotImplementedError: EP dispatcher chunkmoe is not implemented for {name} MoE."
            else:
                assert told[kind].keys() == {"out", "x", "gate", "fc1", "fc2"}


def test_rows_of_tokens_that_kimi_k3_hands_on_are_cut_and_joined_with_the_batch():
    for told in run_ranks(faults.kimi_layers, 2):
        assert max(told["alltoall"], told["chunkmoe"]) <= TOLERANCE, told
        assert told["micro-chunks, alltoall"] == told["micro-chunks, chunkmoe"] == 3 * 3


def test_mcore_path_keeps_its_own_key_and_group():
    for told in (both["mcore"] for both in master_faults()):
        assert told["bound"] and told["restored"]
        assert told["refused"] == "ValueError: Unsupported token dispatcher type: chunkmoe"
        assert told["own group"] == (0.0, 0), "not asked for: the host's own, bit for bit"
        error, ours_ran = told["asked"]
        assert ours_ran and error <= TOLERANCE


def test_ranks_with_different_settings_get_one_message():
    messages = [told["settings"] for told in master_faults()]
    assert messages[0] == messages[1]
    assert "moe_num_chunks: 2 on rank 0, 3 on rank 1" in messages[0]


def test_a_step_after_one_that_raised_meets_no_stale_state():
    for rank, told in enumerate(master_faults()):
        forward, after_forward, backward, after_backward = told["raises"]
        assert forward == backward == f"RuntimeError: the activation of rank {rank} gives up"
        assert max(after_forward, after_backward) <= TOLERANCE


def test_a_rank_that_raises_in_a_chunk_is_told_first_and_nothing_hangs():
    first, second = run_ranks(faults.one_raises, 2, expect_failure=True)
    assert second.state == "raised" and "the activation of rank 1 gives up" in second.error
    assert first.state == "raised" and first.failed_at > second.failed_at


@functools.cache
def rerouted(*how):
    return run_ranks(faults.other_routing_on_recompute, 2, *how)


@pytest.mark.parametrize(
    ("flavour", "reentrant", "replay"),
    [("master", False, False), ("master", True, False), ("newest", False, False), ("newest", False, True)],
)
def test_routing_that_changes_on_recompute_is_replayed_and_told(flavour, reentrant, replay):
    """Another expert of the other rank, or two tokens that swap theirs: neither hangs, neither goes unnoticed.

    Also where the host's checkpoint comes with contexts of its own: both act.
    """
    for place, (none, other, swapped) in enumerate(rerouted(flavour, reentrant, replay)):
        # one gather for the block, forward and recompute
        assert [told[1] for told in (none, other, swapped)] == [1, 1, 1]
        assert [told[2] for told in (none, other, swapped)] == [[], [{0: 3}], [{0: 6}]]
        assert all(told[3] == 3 for told in (none, other, swapped))
        assert [told[4] for told in (none, other, swapped)] == [replay] * 3
        expected = [told[0] for told in rerouted("master", False, False)[place]]
        assert [told[0] for told in (none, other, swapped)] == pytest.approx(expected, rel=1e-12)
