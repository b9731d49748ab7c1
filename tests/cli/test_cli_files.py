"""Files that a run leaves: written whole or not at all."""
import os

import pytest

from ms_accum.cli import files


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(ZeroDivisionError), files.replacing(path) as part:  # noqa: PT012
        part.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "before"
    with files.replacing(path) as part:
        part.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert os.listdir(tmp_path) == ["file"]


def test_nan_and_infinity_are_written_as_null(tmp_path):
    files.write_json(tmp_path / "run.json", {"a": [1, float("nan"), (float("inf"), 2.5)], "b": None, "c": "nan"})
    assert "".join((tmp_path / "run.json").read_text().split()) == '{"a":[1,null,[null,2.5]],"b":null,"c":"nan"}'
