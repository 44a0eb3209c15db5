"""Where a function of the host stands, and what stands in its place."""

import sys
import types

import pytest

from mindspeed_chunk.patches.record import Seam


def hosts_own():
    return "host"


def ours(original):
    return lambda: f"ours around {original()}"


@pytest.fixture
def owner():
    module = types.ModuleType("owner")
    module.function = hosts_own
    return module


@pytest.fixture
def importer(monkeypatch):
    module = types.ModuleType("importer_of_owner")
    module.function = hosts_own
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.fixture
def seam(owner):
    seam = Seam("function", importers=("importer_of_owner", "never_imported"))
    seam.bind(owner)
    return seam


def test_both_the_owner_and_who_had_imported_it_see_ours_and_then_the_hosts_own(seam, owner, importer):
    seam.replace(ours)
    assert owner.function() == importer.function() == "ours around host"
    seam.restore()
    seam.restore()
    assert owner.function is importer.function is hosts_own and not seam.replaced


def test_replacing_again_stands_on_the_hosts_own(seam, owner):
    seam.replace(ours)
    seam.replace(ours)
    assert owner.function() == "ours around host"


def test_taking_back_reaches_an_importer_where_somebody_has_wrapped_the_owners(seam, owner, importer):
    seam.replace(ours)
    owner.function = ours(owner.function)
    seam.forget()
    assert owner.function is importer.function is hosts_own


def test_an_importer_that_was_wrapped_by_somebody_keeps_that(seam, importer):
    seam.replace(ours)
    theirs = importer.function = ours(importer.function)
    seam.restore()
    assert importer.function is theirs


def test_what_fails_to_be_made_leaves_the_hosts_own_and_can_be_tried_again(seam, owner):
    def failing(original):
        raise ImportError("not there")

    with pytest.raises(ImportError):
        seam.replace(failing)
    assert owner.function is hosts_own and not seam.replaced
    seam.replace(ours)
    assert seam.replaced


def test_found_elsewhere_the_first_place_is_as_it_was(seam, owner):
    seam.replace(ours)
    other = types.ModuleType("other")
    other.function = hosts_own
    undo = seam.bind(other)
    assert owner.function is hosts_own and not seam.replaced
    undo()
    assert seam.owner is None
