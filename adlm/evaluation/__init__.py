"""Numbers about models and about this code itself. Never imports training."""
