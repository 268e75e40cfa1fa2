"""The published figures, ours beside them, and parity with the released code."""
