"""The studio: the page at / and the endpoints that it calls."""
