"""Two ways to look at a walk: on the terminal while it goes on, and later, as a trace, in a page or a program."""
