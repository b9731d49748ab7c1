"""Cut a text into documents, and documents into rows of a few widths.

    train, validation = load("excerpt", seed=42)
"""
from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

# A row is padded to the next of these widths, in bytes: each width is a graph to compile. The last one is the context.
WIDTHS = (32, 64)
PADDING = 256  # the token after the last byte of a row, and before the first


@dataclass(frozen=True)
class Documents:
    """Rows of text: `rows[i]` is uint8 `(n,)`, at most `WIDTHS[-1]` bytes of one document. The last row is empty."""

    rows: list[np.ndarray]

    def __len__(self) -> int:
        return len(self.rows) - 1

    def count(self, rows: np.ndarray) -> int:
        """Return the number of bytes in `rows`, int `(m,)`."""
        return sum(len(self.rows[row]) for row in rows)

    def batch(self, rows: np.ndarray) -> tuple[np.ndarray]:
        """Return the tokens of `rows`, int `(m,)`: int32 `(m, width)`, filled up with `PADDING`."""
        longest = max(len(self.rows[row]) for row in rows)
        tokens = np.full((len(rows), min(width for width in WIDTHS if width >= longest)), PADDING, np.int32)
        for line, row in zip(tokens, rows):
            line[:len(self.rows[row])] = self.rows[row]
        return (tokens,)

    def microbatches(self, order: np.ndarray, size: int) -> list[np.ndarray]:
        """Cut `order`, int `(n,)`, into microbatches of rows of one width: int `(size,)`.

        Empty rows fill up the last of a width. Otherwise it would have a shape of its own, for which a graph is
        compiled.
        """
        width = np.searchsorted(WIDTHS, [len(self.rows[row]) for row in order])
        size, cuts = min(size, len(order)), []
        for rows in (order[width == place] for place in range(len(WIDTHS))):
            cuts += [rows[start:start + size] for start in range(0, len(rows), size)]
        return [np.append(rows, [-1] * (size - len(rows))).astype(int) for rows in cuts]

    def epoch(self, size: int, seed: int, number: int) -> list[np.ndarray]:
        """Return the rows of the microbatches of an epoch, in an order from the seed: int `(size,)`."""
        rng = np.random.default_rng([seed, number])
        found = self.microbatches(rng.permutation(len(self)), size)
        return [found[i] for i in rng.permutation(len(found))]


def load(source: str, seed: int) -> tuple[Documents, Documents]:
    """Return documents to train on, and a tenth of them, drawn by the seed, to validate on.

    "excerpt": a quarter of the documentation of the language that comes with Python, `pydoc_data.topics`. Anything else
    is a file with documents that are separated by empty lines; it need not be UTF-8. Raise ValueError if it holds fewer
    than 10 documents, OSError if it cannot be read.
    """
    text = "\n\n".join(topics.values()).encode() if source == "excerpt" else Path(source).read_bytes()
    parts = [part.strip(b"\n") + b"\n" for part in re.split(rb"\n\s*\n", text.replace(b"\r\n", b"\n")) if part.strip()]
    # A document that occurs twice is used once: it could be in both the training and the validation data.
    documents = list(dict.fromkeys(parts))[::4 if source == "excerpt" else 1]
    if len(documents) < 10:
        raise ValueError(f"{source} holds {len(documents)} different documents, expected at least 10; separate them by "
                         "empty lines")
    held_out = {*np.random.default_rng(seed).permutation(len(documents))[:len(documents) // 10].tolist()}
    return (rows_of([document for i, document in enumerate(documents) if i not in held_out]),
            rows_of([document for i, document in enumerate(documents) if i in held_out]))


def rows_of(documents: list[bytes]) -> Documents:
    """Cut each document into rows of `WIDTHS[-1]` bytes; the last row is shorter."""
    context = WIDTHS[-1]
    cuts = [document[start:start + context] for document in documents for start in range(0, len(document), context)]
    return Documents([np.frombuffer(row, np.uint8) for row in (*cuts, b"")])
