"""The published tables, comparison of our results with them, and parity with the released code."""
