"""From files to what a network reads: corpora, blocks of ids, and problems to reason about. Knows no networks."""
