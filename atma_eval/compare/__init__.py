"""Models of one or more runs against each other, from their records alone. Needs no torch.

``columns`` takes rows apart, ``pairing`` finds the samples two models share, ``unlike`` what keeps them from sharing,
``contrast`` tests their difference, ``cells`` and ``tables`` put them together. ``sheets``, ``effective`` and
``published`` say it in words, with ``notes`` above and ``footnotes`` below; ``formats`` and ``data`` write it.
"""

from atma_eval.compare.tables import CompareSpec, Comparison, Table, compare

__all__ = ["CompareSpec", "Comparison", "Table", "compare"]
