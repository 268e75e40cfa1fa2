"""Text from files, the hub and corpora by name, as documents."""
