"""Model folders, the released checkpoints, and an interpreter that reads pickles without executing them."""
