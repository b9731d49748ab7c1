"""Texts: documents, rows, microbatches of one width."""
import numpy as np
import pytest
from support import tiny

from ms_accum.examples.lm import data
from ms_accum.examples.lm.data import PADDING, WIDTHS


def test_a_text_is_split_at_its_empty_lines_and_one_document_in_ten_is_held_out_by_the_seed():
    got = data.documents_of(b"\n\n one\ntwo\r\n\r\nthree \n \t\n\n\nfour\n\n one\ntwo\n\n\xff\x00")
    assert got == [b" one\ntwo\n", b"three \n", b"four\n", b"\xff\x00\n"]
    documents = data.documents_of(tiny.text(40))
    one, other = data.split(documents, 1), data.split(documents, 2)
    assert sum(text.size for text in one) == sum(map(len, documents))
    held_out = [{bytes(row) for row in validation.rows[:-1]} for _, validation in (one, other)]
    assert held_out[0] != held_out[1]
    assert not held_out[0] & {bytes(row) for row in one[0].rows}
    topics, excerpt = (data.load(source, 42)[0].size for source in ("topics", "excerpt"))
    assert 200_000 < topics < 1_000_000
    assert 50_000 < excerpt < topics / 3


def test_documents_are_cut_into_rows_and_lose_no_byte():
    documents = [bytes(range(n)) for n in (1, 32, 33, 64, 65, 200)]
    rows = data.rows_of(documents)
    assert rows.lengths.tolist() == [1, 32, 33, 64, 64, 1, 64, 64, 64, 8, 0]
    assert (len(rows), rows.size, rows.count(np.array([1, 9, -1]))) == (10, sum(map(len, documents)), 40)
    (tokens,) = rows.batch(np.array([5, 0, -1]))
    assert (tokens.shape, tokens.dtype) == ((3, WIDTHS[0]), np.int32)
    assert tokens[0, :2].tolist() == [64, PADDING]
    assert (tokens[1, 0], (tokens != PADDING).sum()) == (0, 2)
    assert rows.batch(np.array([0, 2]))[0].shape == (2, WIDTHS[1])
    assert data.rows_of([b"aabc" * 30]).entropy() == pytest.approx(1.5)


@pytest.mark.parametrize("size", [4, 10**9])
def test_a_microbatch_has_rows_of_one_width_and_all_have_one_size(size):
    rows = data.split(data.documents_of(tiny.text()), 42)[0]
    cut = data.microbatches(rows, np.random.default_rng(1).permutation(len(rows)), size)
    assert {rows.batch(taken)[0].shape for taken in cut} == {(min(size, len(rows)), width) for width in WIDTHS}
    taken = np.concatenate(cut)
    assert sorted(taken[taken >= 0].tolist()) == list(range(len(rows)))
    assert sum(map(rows.count, cut)) == rows.size
