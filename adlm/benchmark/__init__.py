"""Training and sampling speed."""
