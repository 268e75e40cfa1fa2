"""Training: the loop and its parts. Works through the `Method` protocol, for any method."""
