"""Plans a run before it is started: its memory and its time, counted from the config."""
