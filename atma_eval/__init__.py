"""Measure how long-context language models behave as the context grows."""

import os

__version__ = "0.1.0"

# OpenMP threads that spin while they wait make short operations up to a hundred times slower once another
# process wants the core. A thousand spins, then sleep: no cost on an idle machine. Read when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
