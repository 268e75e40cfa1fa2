"""A sampling run as data, as a page and in the terminal."""
