"""Names and defaults that `adlm perplexity --help` shows, without the estimators themselves: imports no torch."""

AUTO = "auto"
ESTIMATOR_LINES = {
    "nelbo": "the method's own bound with the terms at t = 0 and 1; exact for ar and a2r",
    "any-order": "the same bound, sampling how many tokens are masked: lower variance, where valid",
    "published": "the released code's protocol: eps 1e-3, t from 1e-3; about 0.1% too low",
}
"""What each of ESTIMATORS (estimators.py) is."""
ZERO_SHOT = ("lambada", "ptb", "wikitext2", "lm1b", "ag_news", "pubmed", "arxiv")
"""The corpora of the paper's zero-shot table."""
BATCH_TOKENS, BATCH_TOKENS_ON_GPU = 2**13, 2**15
"""Tokens per batch of a measurement by default."""
MAX_REPLICATES = 100_000
