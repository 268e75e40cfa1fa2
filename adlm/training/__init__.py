"""How a network is trained. Knows methods by their verbs, never by name, and nothing of what a trained one is for."""
