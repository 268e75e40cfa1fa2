"""Files of pickled tensors, read without running them: a pickle is a program that may call any function."""
