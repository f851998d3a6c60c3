"""Pictures of runs. Importing this package imports no matplotlib.

What they show is plain data: `charts`, chosen by `builders` and made by `estimates` and `forest`. Drawn they are by
`files` in matplotlib, with `lines`, `grids` and `page`, and by `sketch` in a terminal.
"""
