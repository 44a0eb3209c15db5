"""The comparison of records with what is promised of them finds each kind of difference."""

import copy

import pytest

from json_records import assert_record

LINT = {
    "file": "a.yaml",
    "findings": [{"rule": "r", "severity": "note", "path": "a.b", "line": 1, "message": "m", "fixable": False}],
    "counts": {"error": 0, "warning": 0, "note": 1},
}


@pytest.mark.parametrize("change", ["a key more", "a key less", "another type", "a deep key less"])
def test_a_difference_is_found(change):
    record = copy.deepcopy(LINT)
    assert_record("lint", record)
    if change == "a key more":
        record["counts"]["hint"] = 0
        told = "not under [lint] in json_records.txt:\ncounts.hint: number"
    elif change == "a key less":
        del record["file"]
        told = "under [lint] in json_records.txt, and not in the record:\nfile"
    elif change == "another type":
        record["findings"][0]["line"] = "1"
        told = r"findings[].line: string"
    else:
        del record["findings"][0]["message"]
        told = "findings[].message"
    with pytest.raises(AssertionError) as caught:
        assert_record("lint", record)
    assert told in str(caught.value)
