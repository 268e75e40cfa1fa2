"""Model folders, the released checkpoints, and a pickle interpreter that never calls anything."""
