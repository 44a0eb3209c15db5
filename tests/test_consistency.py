"""What ranks are told about each other's settings, over stores of every kind; ranks are threads here."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from launcher import run_ranks
from mindspeed_chunk import consistency
from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.consistency import compare, describe, flatten

SAME = {"features.recompute": True, "parallel.expert_parallel_size": 2, "names": ["layers", "lm_head"]}
PATIENCE_S = 30.0
BEGINNING = "every rank must run the same configuration, but "


def on_threads(store, ranks, size=None, patience_s=PATIENCE_S):
    """Each of `ranks` {rank: (settings, wait)} compares itself with the others; {rank: message or None}."""
    size = size or len(ranks)

    def run(rank):
        settings, wait = ranks[rank]
        try:
            compare(store, rank, size, settings, wait, patience_s)
        except ConfigError as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return dict(zip(ranks, pool.map(run, ranks), strict=True))


def all_but(rank, change, size, wait=True):
    """`size` ranks with the same settings, one of them with a change."""
    return {each: ({**SAME, **change} if each == rank else SAME, wait) for each in range(size)}


@pytest.fixture(params=["hash", "file", "tcp"])
def store(request, tmp_path):
    if request.param == "hash":
        yield dist.HashStore()
    elif request.param == "file":
        yield dist.FileStore(str(tmp_path / "store"), 4)
    else:
        yield dist.PrefixStore("default_pg", dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False))


def test_equal_settings_pass_at_once(store):
    start = time.monotonic()
    assert set(on_threads(store, all_but(0, {}, 4)).values()) == {None}
    assert time.monotonic() - start < PATIENCE_S / 3


def test_a_difference_is_one_message_for_all_that_wait(store):
    start = time.monotonic()
    ranks = all_but(3, {"features.recompute": False}, 4) | {1: (SAME, False)}
    told = on_threads(store, ranks)
    assert time.monotonic() - start < PATIENCE_S / 3, "nobody waits until the time is over when all have answered"
    assert told.pop(1) is None, "a rank that does not wait is told nothing"
    assert set(told.values()) == {
        f"{BEGINNING}features.recompute: True on ranks 0-2, False on rank 3; start all ranks with the same yaml, "
        "arguments, environment and version of the plugin"
    }


def test_a_rank_that_never_answers_is_named_when_the_time_is_over():
    start = time.monotonic()
    told = on_threads(dist.HashStore(), {0: (SAME, True), 2: (SAME, True)}, size=3, patience_s=2.0)
    assert time.monotonic() - start > 1.7
    assert set(told.values()) == {
        f"{BEGINNING}rank 1: no answer within 2 s: start all ranks at the same time, "
        "install the plugin there, and do not turn it off "
        "(MINDSPEED_CHUNK_DISABLE)"
    }


def test_a_rank_that_comes_late_but_in_time_is_waited_for():
    store, told = dist.HashStore(), {}
    early = threading.Thread(target=lambda: told.update(on_threads(store, {0: (SAME, True)}, size=2)))
    early.start()
    time.sleep(0.5)
    told |= on_threads(store, {1: (SAME, True)}, size=2)
    early.join()
    assert told == {0: None, 1: None}


def test_a_rank_that_does_not_wait_returns_at_once():
    start = time.monotonic()
    assert on_threads(dist.HashStore(), {0: (SAME, False)}, size=1000) == {0: None}
    assert time.monotonic() - start < PATIENCE_S / 3


def test_a_start_with_the_store_of_an_earlier_one_compares_anew(store):
    """As after a restart by torchrun: once with the same settings, then with others, then with those corrected."""
    for change in ({}, {}, {"features.recompute": False}, {}):
        told = on_threads(store, all_but(1, change, 2))
        assert all(message is None for message in told.values()) is not bool(change), (change, told)
    assert set(on_threads(store, all_but(0, {}, 3)).values()) == {None}, "and with another number of ranks"


def test_after_a_start_that_broke_off_on_some_ranks_equal_settings_are_not_refused():
    store = dist.HashStore()
    on_threads(store, {0: (SAME, True), 1: (SAME, True)}, size=3, patience_s=0.2)  # rank 2 did not come so far
    told = on_threads(store, all_but(0, {}, 3), patience_s=1.0)
    assert set(told.values()) == {None}


class Slow(dist.HashStore):
    """A store that needs longer for each entry than the ranks are patient."""

    def get(self, key):
        time.sleep(0.3)
        return super().get(key)


def test_a_rank_waits_for_the_one_that_reads_all_settings_however_short_the_patience():
    told = on_threads(Slow(), {0: (SAME, True), 1: (SAME, True)}, size=3, patience_s=0.2)
    assert len(set(told.values())) == 1 and "rank 2: no answer within 0 s" in told[0]


def test_values_that_mean_off_are_alike():
    ranks = [{"b": 1}, *({"a": off, "b": 1} for off in (None, False, 0, [], ""))]
    told = on_threads(dist.HashStore(), {rank: (settings, True) for rank, settings in enumerate(ranks)})
    assert set(told.values()) == {None}


class Ending(dist.HashStore):
    """A store that ends with the rank that hosts it: at once when that one can see that all have read the verdict."""

    ended = False

    def check(self, keys):
        if self.ended:
            raise RuntimeError("Connection reset by peer")
        return super().check(keys)

    def set(self, key, value):
        super().set(key, value)
        self.ended = self.ended or key.endswith("/read")


def test_a_store_that_ends_with_a_rank_that_has_read_takes_the_difference_from_none():
    told = on_threads(Ending(), {rank: ({**SAME, "parallel.ep_plan.moe_num_chunks": rank}, True) for rank in range(4)})
    assert len(set(told.values())) == 1 and "parallel.ep_plan.moe_num_chunks: 0 on rank 0" in told[0]


class Counting:
    """A store that counts what is asked of it."""

    def __init__(self, store):
        self.store, self.calls = store, 0

    def __getattr__(self, name):
        self.calls += name != "check"
        return getattr(self.store, name)


def test_the_messages_of_a_rank_do_not_grow_with_the_number_of_ranks():
    def most(size, change):
        counting = [Counting(store) for store in [dist.HashStore()] for _ in range(size)]
        ranks = all_but(1, change, size)

        def run(rank):
            try:
                compare(counting[rank], rank, size, *ranks[rank], PATIENCE_S)
            except ConfigError as error:
                return str(error)

        with ThreadPoolExecutor(size) as pool:
            messages = set(pool.map(run, range(size)))
        return sorted((each.calls for each in counting), reverse=True), messages

    assert most(64, {})[0][0] <= 8
    calls, messages = most(64, {"features.recompute": False})
    assert len(messages) == 1 and "True on ranks 0, 2-63, False on rank 1;" in messages.pop()
    assert calls[0] >= 64 and calls[1] <= 10, "one rank reads what all have said"


def test_a_message_stays_short_whatever_the_number_of_ranks():
    """Every second of 4096 ranks has another value, 50 ranks one of their own, and 425 do not answer."""
    odd, even = [*range(1, 4096, 2)], [*range(0, 4096, 2)]
    long = {f"key {number:2}": "x" * 200 for number in range(50)}
    groups = [({"a": 1} | long, odd), ({"a": 2}, even), *(({"a": rank}, [rank]) for rank in range(4096, 4146))]
    text = describe(groups, [*range(4146, 4996, 2)], 54)
    assert "\n" not in text and len(text) < 3500, len(text)
    assert text.startswith("a: 1 on ranks 1, 3, 5, 7, 9, 11, 13, 15, ... (2048 in all), 2 on ranks 0, 2, 4, ")
    assert "4101 on rank 4101, and 44 more values; key  0: 'xxxx" in text and "and 43 more keys; " in text
    assert "ranks 4146, 4148, " in text and "... (425 in all): no answer within 54 s" in text


def test_of_lists_what_differs_is_shown():
    modules = [f"model.language_model.layers.{{{number}}}" for number in range(20)]
    text = describe([({"m": modules}, [0]), ({"m": [*modules, "lm_head"]}, [1])], [], 54)
    assert text.startswith("m: [...] on rank 0, [..., 'lm_head'] on rank 1; ")
    swapped = describe([({"m": ["a", "b"]}, [0]), ({"m": ["b", "a"]}, [1])], [], 54)
    assert swapped.startswith("m: ['a', 'b'] on rank 0, ['b', 'a'] on rank 1; ")


class Plain:
    """A value that says where it lies in memory."""


def test_values_look_alike_in_every_process():
    """Two fresh values of the same kind, sets in another order, tuples and lists."""
    first = {"a": Plain(), "b": {"x", "yy", "zzz"}, "c": (1, 2), "d": torch.bfloat16}
    second = {"a": Plain(), "b": {"zzz", "yy", "x"}, "c": [1, 2], "d": torch.bfloat16}
    assert set(on_threads(dist.HashStore(), {0: (first, True), 1: (second, True)}).values()) == {None}


def test_sections_are_flattened_by_their_keys():
    assert flatten({"a": {"b": 1, "c": [2]}, "d": None}, "p") == {"p.a.b": 1, "p.a.c": [2], "p.d": None}


def in_a_group(rank, world_size, differ):
    """What `check` makes of the default group; twice, as after a second `init_process_group`."""
    from mindspeed_chunk.observe import observe

    called = []
    for name in ("all_reduce", "all_gather_into_tensor", "all_gather_object", "barrier", "broadcast", "new_group"):
        setattr(dist, name, lambda *args, name=name, **kwargs: called.append(name))
    messages = []
    with observe() as events:
        for _ in range(2):
            start = time.perf_counter()
            try:
                consistency.check({"key": rank * differ}, wait=True, patience_s=20)
                messages.append(None)
            except ConfigError as error:
                messages.append(str(error))
    return messages, called, len(events), time.perf_counter() - start


def test_the_default_group_of_real_ranks_without_a_collective():
    for messages, called, events, _ in run_ranks(in_a_group, 2, 0):
        assert (messages, called, events) == ([None, None], [], 0)
    for messages, called, events, _ in run_ranks(in_a_group, 4, 1):
        assert (called, events) == ([], 0)
        assert all("key: 0 on rank 0, 1 on rank 1, 2 on rank 2, 3 on rank 3;" in message for message in messages)


def test_one_rank_compares_itself_with_nobody():
    (told,) = run_ranks(in_a_group, 1, 1)
    assert told[0] == [None, None]
