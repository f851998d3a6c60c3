"""Speed and exactness of the operations: ``python -m atma_eval.bench cpu`` and ``python -m atma_eval.bench gpu``.

`cpu` holds ratios that any machine can check. `gpu` is one script for a machine that is lent for minutes: parts that
each yield lines (`report.Line`), under one clock (`parts.Bench`), written down after every part.
"""
