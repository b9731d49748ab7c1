"""Cut a text into documents, and documents into samples of a few widths."""
from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

# A row is padded to the next of these widths, in bytes: each width is a graph to compile. The last one is the context.
WIDTHS = (32, 64)
PADDING = 256  # the token after the last byte of a row, and before the first
FEWEST = 10  # documents
HELD_OUT = 10  # one document in so many is validated on
EXCERPT = 4  # one document in so many is in the excerpt, so that a run takes less than a minute


@dataclass(frozen=True)
class Documents:
    """Rows of text: `rows[i]` is uint8 `(n,)`, at most `WIDTHS[-1]` bytes of one document. The last row is empty."""

    rows: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        return len(self.rows) - 1

    @cached_property
    def lengths(self) -> np.ndarray:
        """Return the number of bytes in each row: int `(n,)`."""
        return np.array([len(row) for row in self.rows])

    @property
    def size(self) -> int:
        """Return the number of bytes."""
        return int(self.lengths.sum())

    def count(self, rows: np.ndarray) -> int:
        """Return the number of bytes in `rows`, int `(m,)`."""
        return int(self.lengths[rows].sum())

    def batch(self, rows: np.ndarray) -> tuple[np.ndarray]:
        """Return the tokens of `rows`, int `(m,)`: int32 `(m, width)`, filled up with `PADDING`."""
        tokens = np.full((len(rows), WIDTHS[widths(self.lengths[rows]).max()]), PADDING, np.int32)
        for line, row in zip(tokens, rows):
            line[:self.lengths[row]] = self.rows[row]
        return (tokens,)

    def entropy(self) -> float:
        """Return the entropy of a single byte in bits: the best loss of a model without context."""
        counts = np.bincount(np.concatenate(self.rows), minlength=256)
        shares = counts[counts > 0] / self.size
        return float(-shares @ np.log2(shares))


def microbatches(documents: Documents, order: np.ndarray, size: int) -> list[np.ndarray]:
    """Cut `order`, int `(n,)`, into microbatches of `size` rows of one width; empty rows fill up the last of a width.

    Without empty rows, each last microbatch would have its own shape, for which a graph is compiled.
    """
    size = min(size, len(order))
    width = widths(documents.lengths[order])
    of_width = [order[width == place] for place in range(len(WIDTHS))]
    cuts = [rows[start:start + size] for rows in of_width for start in range(0, len(rows), size)]
    return [np.append(piece, [-1] * (size - len(piece))).astype(int) for piece in cuts]


def widths(lengths: np.ndarray) -> np.ndarray:
    """Return the place in `WIDTHS` of each length's width, int `(n,)` both."""
    return np.searchsorted(WIDTHS, lengths)


def load(source: str, seed: int) -> tuple[Documents, Documents]:
    """Load the text of `--text`. Return documents to train on, and randomly chosen ones to validate on.

    "topics": the documentation of the language that comes with Python (`pydoc_data.topics`). "excerpt": a part of its
    documents. Anything else is a file; it need not be UTF-8. Raise ValueError if it holds fewer than `FEWEST`
    documents, OSError if it cannot be read.
    """
    if source in ("excerpt", "topics"):
        documents = documents_of("\n\n".join(topics.values()).encode())
        return split(documents[::EXCERPT if source == "excerpt" else 1], seed)
    path = Path(source)
    if not path.is_file():
        raise ValueError(f"argument --text: there is no file {path}; give excerpt, topics or a file")
    documents = documents_of(path.read_bytes())
    if len(documents) < FEWEST:
        raise ValueError(f"argument --text: {path} holds {len(documents)} different documents, expected at least "
                         f"{FEWEST}; separate them by empty lines")
    return split(documents, seed)


def documents_of(text: bytes) -> list[bytes]:
    """Split a text at its empty lines. Each document ends in a newline.

    A document that occurs twice is used once, because it could be in both the training and the validation data.
    """
    parts = re.split(rb"\n\s*\n", text.replace(b"\r\n", b"\n"))
    return list(dict.fromkeys(part.strip(b"\n") + b"\n" for part in parts if part.strip()))


def split(documents: list[bytes], seed: int) -> tuple[Documents, Documents]:
    """Return documents to train on, and randomly chosen ones to validate on."""
    held_out = {*np.random.default_rng(seed).permutation(len(documents))[:len(documents) // HELD_OUT].tolist()}
    train, validation = ([document for i, document in enumerate(documents) if (i in held_out) == drawn]
                         for drawn in (False, True))
    return rows_of(train), rows_of(validation)


def rows_of(documents: list[bytes]) -> Documents:
    """Cut each document into rows of `WIDTHS[-1]` bytes; the last row is shorter."""
    context = WIDTHS[-1]
    cuts = [document[start:start + context] for document in documents for start in range(0, len(document), context)]
    return Documents(tuple(np.frombuffer(row, np.uint8) for row in (*cuts, b"")))
