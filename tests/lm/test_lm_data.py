"""Texts: documents, rows, microbatches of one width."""
import re

import numpy as np
import pytest
import tiny

from ms_accum.lm import data
from ms_accum.lm.data import PADDING, WIDTHS


def test_a_text_is_split_at_its_empty_lines_without_repetitions():
    got = data.documents_of(b"\n\n one\ntwo\r\n\r\nthree \n \t\n\n\nfour\n\n one\ntwo\n\n\xff\x00")
    assert got == [b" one\ntwo\n", b"three \n", b"four\n", b"\xff\x00\n"]


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


def test_a_microbatch_has_rows_of_one_width_and_all_have_one_size():
    rows = tiny.split().train
    order = np.random.default_rng(1).permutation(len(rows))
    cut = data.microbatches(rows, order, 4)
    shapes = {rows.batch(piece)[0].shape for piece in cut}
    assert shapes == {(4, width) for width in WIDTHS}
    taken = np.concatenate(cut)
    assert sorted(taken[taken >= 0].tolist()) == list(range(len(rows)))
    assert len({tuple(data.widths(rows.lengths[piece[piece >= 0]]).tolist()) for piece in cut if -1 not in piece}) == 2
    assert sum(map(rows.count, cut)) == rows.size


def test_one_document_in_ten_is_held_out_by_the_seed():
    documents = data.documents_of(tiny.text(40))
    one, other = data.split(documents, 1), data.split(documents, 2)
    assert one.documents == (36, 4)
    assert one.train.size + one.validation.size == sum(map(len, documents))
    held_out = {bytes(row) for row in one.validation.rows[:-1]}
    assert not held_out & {bytes(row) for row in one.train.rows}
    assert len({one.identity, other.identity, data.split(documents, 1).identity}) == 2
    assert one.identity.startswith(f"{one.train.size} + {one.validation.size} with the SHA-256 ")


def test_the_entropy_is_that_of_single_bytes():
    assert data.rows_of([b"aabc" * 30]).entropy() == pytest.approx(1.5)
    assert data.rows_of([b"aaaa"]).entropy() == 0


def test_pythons_documentation_is_there():
    excerpt, topics = (data.load(source, 42) for source in ("excerpt", "topics"))
    assert 50_000 < excerpt.train.size < topics.train.size / 3
    assert 200_000 < topics.train.size < 1_000_000
    assert 4 < topics.train.entropy() < 5


@pytest.mark.parametrize(("content", "message"), [
    (None, r"argument --text: there is no file book; give excerpt, topics or a file"),
    (b"", r"argument --text: book holds 0 different documents, expected at least 10; separate them by empty lines"),
    (b"one\n\ntwo\n\n" * 9, r"argument --text: book holds 2 different documents"),
])
def test_a_file_without_documents_is_refused(content, message, tmp_path):
    if content is not None:
        (tmp_path / "book").write_bytes(content)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}" if content is not None else message):
        data.load("book", 0)
