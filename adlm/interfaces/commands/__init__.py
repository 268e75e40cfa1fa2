"""One file a command: its arguments, what it calls, how the answer is shown."""
